"""Nodes that the caller of ``partition`` excludes from the NPU: by names of nodes and ops, and by a callback.

An in-place op has two names: that of the IR (``aten.relu_.default``) and that of its functional variant
(``aten.relu.default``).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from ..aten.ir import IRGraph, OpNode
from ..aten.op_names import functional_name
from ..ops.registry import REGISTRY, find
from ..support.errors import ConfigError, Reason

IsSupported = Callable[..., bool]


class Exclusions:
    """Tells why the caller excludes a node. Raises ``ConfigError`` if a name in ``force_cpu`` does not exist."""

    def __init__(self, ir: IRGraph, force_cpu: Collection[str], is_supported: IsSupported | None):
        self._spelling = {n.name: n.op_type for n in ir.nodes}
        self._forced = frozenset((force_cpu,) if isinstance(force_cpu, str) else force_cpu)
        self._is_supported = is_supported
        self._takes_attrs = is_supported is not None and _takes_attrs(is_supported)
        ops = set(self._spelling.values())
        known = {*self._spelling, *ops, *map(functional_name, ops)}
        for name in sorted(self._forced - known):
            if find(name) is None:
                candidates = sorted(known) + sorted(REGISTRY.keys() - known)
                near = [c for c in candidates if name in c.split(".")] or difflib.get_close_matches(name, candidates)
                hint = f"; did you mean {', '.join(near[:3])}?" if near else ""
                raise ConfigError(f"force_cpu: {name!r} is neither a node nor an op of {ir.model_name!r}{hint}")

    def __call__(self, node: OpNode) -> Reason | None:
        names = dict.fromkeys((self._spelling.get(node.name, node.op_type), node.op_type))
        names |= dict.fromkeys(map(functional_name, list(names)))
        if self._forced.intersection((node.name, *names)):
            return Reason("forced", "the caller put it on the host")
        for name in names if self._is_supported is not None else ():
            if not self._allowed(name, node.attrs):
                return Reason("no_kernel", f"the caller's is_supported_fn refuses {name}")
        return None

    def _allowed(self, op_type: str, attrs: dict[str, Any]) -> bool:
        assert self._is_supported is not None
        return bool(self._is_supported(op_type, dict(attrs)) if self._takes_attrs else self._is_supported(op_type))


def _takes_attrs(f: Callable[..., Any]) -> bool:
    """Whether a callback takes the attributes: it has a second parameter without a default, or one named ``attrs``."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "attrs")
