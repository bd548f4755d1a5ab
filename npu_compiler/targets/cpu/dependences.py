"""What the value of an expression in a loop nest depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...graph import affine
from ...graph.expr import Expr
from ..codegen.nest import Nest
from .blocks import Value


class Dependences:
    """Dims and lanes on which the expressions of one kernel depend.

    ``lane``: the dim of the vector lanes; None: all values are uniform. ``stages``: results of reductions and saved
    temporaries, each with what it depends on and its text.
    """

    def __init__(self, nest: Nest, lane: int | None):
        self.nest, self.lane = nest, lane
        self.stages: dict[Expr, tuple[frozenset[Any], Value]] = {}
        self.written = {op.buffer.id for op in nest.outputs}
        self._deps: dict[Expr, frozenset[Any]] = {}
        self._pinned: dict[Expr, bool] = {}

    def deps(self, e: Expr) -> frozenset[Any]:
        """Return the dims (and 'row') that a value depends on."""
        if e in self.stages:
            return self.stages[e][0]
        found = self._deps.get(e)
        if found is None:
            if e.op == "index":
                found = frozenset((e.value,))
            elif e.dtype == "int64" and e.op in ("add", "sub", "mul", "neg") and list(affine.affine(e).terms) != [e]:
                found = self._union(affine.affine(e).terms)
            elif e.op == "load":
                found = self._union((*affine.affine(e.args[0]).terms, *e.args[1:]))
                if self._changes(e.value.operand):
                    found = frozenset((*self.nest.order, "row"))
            else:
                found = self._union(e.args)
            self._deps[e] = found
        return found

    def _changes(self, operand: int) -> bool:
        """Whether an operand changes from row to row: a saved temporary, or an operand that a serial nest updates."""
        if operand >= len(self.nest.inputs):
            return True
        return operand >= 0 and self.nest.serial and self.nest.inputs[operand].buffer.id in self.written

    def _union(self, parts: Iterable[Expr]) -> frozenset[Any]:
        return frozenset[Any]().union(*(self.deps(p) for p in parts))

    def varying(self, e: Expr) -> bool:
        """Whether ``e`` differs between lanes."""
        return self.lane is not None and self.lane in self.deps(e)

    def pinned(self, e: Expr) -> bool:
        """Whether ``e`` must stay in its branch, because it could read out of bounds outside."""
        found = self._pinned.get(e)
        if found is None:
            found = any(self.pinned(a) for a in e.args)
            if e.op == "load":
                found = found or e.value.guarded or bool(e.value.checks)
            self._pinned[e] = found
        return found
