"""Names of ATen ops: in-place ops and their functional variants, and nodes that compute nothing."""

from __future__ import annotations

from .ir import GETITEM

STRUCTURAL = frozenset((GETITEM,))  # these pick an output of the node before them
_IN_PLACE_OPERATORS = frozenset(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))


def functional_name(op_type: str) -> str:
    """``aten.relu_.default`` -> ``aten.relu.default``, ``aten.__iand__.Tensor`` -> ``aten.__and__.Tensor``: in-place
    ops are lowered as their functional variants."""
    parts = op_type.split(".")
    if len(parts) != 3:
        return op_type
    namespace, name, overload = parts
    if name in _IN_PLACE_OPERATORS:
        name = f"__{name[3:]}"
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return f"{namespace}.{name}.{overload}"
