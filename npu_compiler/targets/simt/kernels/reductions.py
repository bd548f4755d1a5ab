"""Reductions of a row: the accumulators of each thread, and their combination among threads."""

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
    """The reductions of a pass: accumulators ``f{number}`` (and positions ``q{number}``). The threads combine theirs in
    a fixed order, and each thread has the result."""

    def __init__(self, s: Scalars, function: Scope):
        self.s, self.out, self.function = s, function.lines, function

    def begin(self, p: Pass) -> None:
        """Declare the accumulators of pass ``p`` with their initial values."""
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

    def combine_along(self, p: Pass, threads: int) -> None:
        """Combine the accumulators of ``threads`` threads: the lanes of a subgroup, or all threads of a workgroup."""
        self._bind(p)
        for st in p.reductions:
            self.function.include("reduce.h")
            n = st.number
            if _is_arg(st):
                self.out.call(f"subgroup_reduce_arg<{_OPS[st.reduce]}>", f"f{n}", f"q{n}")
            else:
                self.out.assign(f"f{n}", f"subgroup_reduce<{_OPS[st.reduce]}>(f{n})")
        if threads > SUBGROUP and p.reductions:
            with self.out.when("lane == 0"):
                self._store_partials(p, threads // SUBGROUP, "subgroup")
            self._combine_partials(p, threads // SUBGROUP, "0", 1)

    def combine_across(self, p: Pass, parts: int) -> None:
        """Combine the accumulators of equal lanes of ``parts`` subgroups."""
        self._bind(p)
        if parts > 1 and p.reductions:
            self.function.include("reduce.h")
            self._store_partials(p, parts * SUBGROUP, f"subgroup * {SUBGROUP} + lane")
            self._combine_partials(p, parts, "lane", SUBGROUP)

    def _store_partials(self, p: Pass, length: int, place: str) -> None:
        for st in p.reductions:
            n = st.number
            self.out.assign(f"{self.function.array(kind_of(st.value.dtype), f's{n}', length)}[{place}]", f"f{n}")
            if _is_arg(st):
                self.out.assign(f"{self.function.array('int', f'p{n}', length)}[{place}]", f"q{n}")

    def _combine_partials(self, p: Pass, parts: int, first: str, step: int) -> None:
        self.out.call("barrier")
        for st in p.reductions:
            n, kind = st.number, kind_of(st.value.dtype)
            sizes = f"<{_OPS[st.reduce]}, {parts}, {step}, {kind}>"
            if _is_arg(st):
                self.out.call(f"reduce_shared_arg{sizes}", f"s{n} + {first}", f"p{n} + {first}", f"f{n}", f"q{n}")
            else:
                self.out.assign(f"f{n}", f"reduce_shared{sizes}(s{n} + {first})")


def _is_arg(st: Step) -> bool:
    return st.reduce in ("argmax", "argmin")
