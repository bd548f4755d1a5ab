"""Reductions of a row: a variable of each thread, and how threads bring theirs together."""

from __future__ import annotations

from ....graph import expr
from ...codegen.nest import Step
from ...codegen.row_passes import Pass
from ..lang.dialect import SIMD
from ..lang.function import Scope
from ..lang.scalar import Scalars, Value, accumulator, combine, kind_of


class RowFold:
    """The reductions of a pass: variables ``f{number}`` (and positions ``q{number}``) and how threads bring them
    together, so that each has the whole result, combined in one fixed order."""

    def __init__(self, s: Scalars, function: Scope):
        self.s, self.out, self.function = s, function.lines, function

    def begin(self, p: Pass) -> None:
        for st in p.folds:
            kind = kind_of(st.value.dtype)
            self.out.add(f"{kind} f{st.number} = {accumulator(st.reduce, st.value.dtype)};")
            if st.reduce.startswith("arg"):
                self.out.add(f"int q{st.number} = 2147483647;")

    def _bind(self, p: Pass) -> None:
        for st in p.folds:
            if st.reduce.startswith("arg"):
                self.s.bound[expr.stage(st.number, "int64")] = Value(f"q{st.number}", "int")
            else:
                self.s.bound[expr.stage(st.number, st.value.dtype)] = Value(f"f{st.number}", kind_of(st.value.dtype))

    def _step(self, st: Step, other: str, other_position: str) -> str:
        name, kind = f"f{st.number}", kind_of(st.value.dtype)
        if st.reduce.startswith("arg"):
            return f"{st.reduce}_step({name}, q{st.number}, {other}, {other_position});"
        return f"{name} = {combine(st.reduce, kind, name, other)};"

    def meet_along(self, p: Pass, team: int) -> None:
        """Between the lanes of a simd, or all threads of a group."""
        self._bind(p)
        for st in p.folds:
            self.out.add("#pragma unroll")
            self.out.add(f"for (int m = 16; m > 0; m >>= 1) {self._xor(st)}")
        if team == SIMD or not p.folds:
            return
        for st in p.folds:
            n, kind = st.number, kind_of(st.value.dtype)
            self.function.array(kind, f"s{n}", team // SIMD)
            self.out.add(f"if (lane == 0) s{n}[sid] = f{n};")
            if st.reduce.startswith("arg"):
                self.function.array("int", f"p{n}", team // SIMD)
                self.out.add(f"if (lane == 0) p{n}[sid] = q{n};")
        self.out.add("barrier();")
        self._gather(p, team // SIMD, "")

    def _xor(self, st: Step) -> str:
        n = st.number
        position = f"simd_xor(q{n}, m)" if st.reduce.startswith("arg") else ""
        if position:
            kind = kind_of(st.value.dtype)
            return f"{{ const {kind} o = simd_xor(f{n}, m); const int oq = {position}; {self._step(st, 'o', 'oq')} }}"
        return self._step(st, f"simd_xor(f{n}, m)", "")

    def meet_across(self, p: Pass, parts: int) -> None:
        """Between the same lane of all simds; a single part has nobody to meet."""
        self._bind(p)
        if parts == 1:
            return
        for st in p.folds:
            n, kind = st.number, kind_of(st.value.dtype)
            self.function.array(kind, f"s{n}", parts * SIMD)
            self.out.add(f"s{n}[sid * 32 + lane] = f{n};")
            if st.reduce.startswith("arg"):
                self.function.array("int", f"p{n}", parts * SIMD)
                self.out.add(f"p{n}[sid * 32 + lane] = q{n};")
        if p.folds:
            self.out.add("barrier();")
            self._gather(p, parts, " * 32 + lane")

    def _gather(self, p: Pass, parts: int, at: str) -> None:
        for st in p.folds:
            n, arg = st.number, st.reduce.startswith("arg")
            first = "lane" if at else "0"
            self.out.add(f"f{n} = s{n}[{first}];" + (f" q{n} = p{n}[{first}];" if arg else ""))
            self.out.add(f"for (int k = 1; k < {parts}; k++) {self._step(st, f's{n}[k{at}]', f'p{n}[k{at}]')}")
