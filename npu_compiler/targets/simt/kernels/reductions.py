"""Reductions of a row: a variable of each thread, and how threads bring theirs together."""

from __future__ import annotations

from ....graph import expr
from ...codegen.nest import Step
from ...codegen.row_passes import Pass
from ..lang.dialect import SUBGROUP
from ..lang.function import Scope
from ..lang.scalar import Scalars, Value, accumulator, kind_of

# the structs of reduce.h
_OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "argmax": "ArgMax", "argmin": "ArgMin"}


class RowReduction:
    """The reductions of a pass: variables ``f{number}`` (and positions ``q{number}``) and how threads bring them
    together, so that each has the whole result, combined in one fixed order."""

    def __init__(self, s: Scalars, function: Scope):
        self.s, self.out, self.function = s, function.lines, function

    def begin(self, p: Pass) -> None:
        for st in p.reductions:
            self.out.declare(kind_of(st.value.dtype), f"f{st.number}", accumulator(st.reduce, st.value.dtype))
            if _is_arg(st):
                self.out.declare("int", f"q{st.number}", "2147483647")

    def _bind(self, p: Pass) -> None:
        for st in p.reductions:
            if _is_arg(st):
                self.s.bound[expr.stage(st.number, "int64")] = Value(f"q{st.number}", "int")
            else:
                self.s.bound[expr.stage(st.number, st.value.dtype)] = Value(f"f{st.number}", kind_of(st.value.dtype))

    def meet_along(self, p: Pass, team: int) -> None:
        """Between the lanes of a subgroup, or all threads of a workgroup."""
        self._bind(p)
        for st in p.reductions:
            self.function.include("reduce.h")
            n = st.number
            if _is_arg(st):
                self.out.call(f"subgroup_reduce_arg<{_OPS[st.reduce]}>", f"f{n}", f"q{n}")
            else:
                self.out.assign(f"f{n}", f"subgroup_reduce<{_OPS[st.reduce]}>(f{n})")
        if team > SUBGROUP and p.reductions:
            with self.out.when("lane == 0"):
                self._leave(p, team // SUBGROUP, "sid")
            self._join(p, team // SUBGROUP, "0", 1)

    def meet_across(self, p: Pass, parts: int) -> None:
        """Between the same lane of all subgroups; a single part has nothing to combine with."""
        self._bind(p)
        if parts > 1 and p.reductions:
            self.function.include("reduce.h")
            self._leave(p, parts * SUBGROUP, f"sid * {SUBGROUP} + lane")
            self._join(p, parts, "lane", SUBGROUP)

    def _leave(self, p: Pass, length: int, place: str) -> None:
        for st in p.reductions:
            n = st.number
            self.out.assign(f"{self.function.array(kind_of(st.value.dtype), f's{n}', length)}[{place}]", f"f{n}")
            if _is_arg(st):
                self.out.assign(f"{self.function.array('int', f'p{n}', length)}[{place}]", f"q{n}")

    def _join(self, p: Pass, parts: int, first: str, step: int) -> None:
        self.out.call("barrier")
        for st in p.reductions:
            n, kind = st.number, kind_of(st.value.dtype)
            sizes = f"<{_OPS[st.reduce]}, {parts}, {step}, {kind}>"
            if _is_arg(st):
                self.out.call(f"join_arg{sizes}", f"s{n} + {first}", f"p{n} + {first}", f"f{n}", f"q{n}")
            else:
                self.out.assign(f"f{n}", f"join{sizes}(s{n} + {first})")


def _is_arg(st: Step) -> bool:
    return st.reduce in ("argmax", "argmin")
