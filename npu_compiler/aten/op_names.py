"""Names of ATen ops: in-place ops and their functional variants, nodes that compute nothing, arguments with text."""

from __future__ import annotations

from .ir import GETITEM

STRUCTURAL = frozenset((GETITEM,))  # these pick an output of the node before them
OWN_NAMESPACES = frozenset(("aten", "prims"))  # of PyTorch itself
# Arguments of these namespaces that are text: they name one of a few modes, an equation or a message.
TEXT_ARGUMENTS = frozenset(
    "UPLO approximate assert_msg driver equation indexing interpolation mode norm ord p pad_mode padding padding_side "
    "reduce rounding_mode side".split()
)
_IN_PLACE_OPERATORS = frozenset(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))

# In-place ops whose functional variant has another overload name.
_OVERLOADS = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.float_power_.Scalar": "aten.float_power.Tensor_Scalar",
    "aten.float_power_.Tensor": "aten.float_power.Tensor_Tensor",
    "aten.floor_divide_.Tensor": "aten.floor_divide.default",
    "aten.ldexp_.default": "aten.ldexp.Tensor",
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
    "aten.pow_.Tensor": "aten.pow.Tensor_Tensor",
    "aten.transpose_.default": "aten.transpose.int",
}


def functional_name(op_type: str) -> str:
    """Return the name of the functional variant by which an in-place op is lowered: ``aten.relu.default`` for
    ``aten.relu_.default``, ``aten.__and__.Tensor`` for ``aten.__iand__.Tensor``. Other names are returned unchanged."""
    parts = op_type.split(".")
    if len(parts) != 3 or op_type in _OVERLOADS:
        return _OVERLOADS.get(op_type, op_type)
    namespace, name, overload = parts
    if name in _IN_PLACE_OPERATORS:
        name = f"__{name[3:]}"
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return f"{namespace}.{name}.{overload}"


def is_in_place(op_type: str) -> bool:
    """Whether ``op_type`` is an in-place op (``aten.add_.Tensor``)."""
    return functional_name(op_type) != op_type
