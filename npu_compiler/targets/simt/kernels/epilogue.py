"""The epilogue of a hand-written kernel as a functor: bias, activation, residual and rounding, applied to the
accumulators before they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ....graph import affine, expr
from ....graph.expr import Expr
from ....schedule.anchors import Anchor
from ....support import dtypes
from ...codegen.epilogue_nest import epilogue_nest, row_digits
from ...codegen.nest import Step, use_counts
from ..lang.function import Members, Pointers, Scope
from ..lang.scalar import Scalars, Value, before_storage, ctype, kind_of, literal, storage, stored
from ..lang.vectorize import Points, vector_width


class Epilogue:
    """Renders statements that store results at (row, column) of the output; ``row`` counts its leading dims in order.

    ``width``: neighbouring columns that :meth:`store` can store as a vector of up to 16 bytes, or of ``max_width``
    columns. ``ahead``: loads that can be executed before the sums are known: residuals and, with ``columns``, vectors
    that all rows share, which are otherwise in ``shared``. ``first``: the function's operand number of the kernel's
    first input, if the function computes several kernels. ``row_sum``: the float variable to which :meth:`store` adds,
    if the kernel has a sum among its ``extra_stages``, or ''. ``sum``, ``result``: the C++ types of accumulators and of
    results in registers. ``only_sums``: whether the epilogue reads only accumulators.
    ``widened``: the loads of ``ahead`` that are 8-bit integers have been converted to floats. ``floats``: so have 8-bit
    results, for :meth:`compute`. ``keeps``: such results of another epilogue are the second accumulators.
    """

    def __init__(
        self, kernel: Anchor, function: Scope, max_width: int = 0, columns: bool = False, first: int = 0,
        widened: bool = False, floats: bool = False, keeps: bool = False,
    ):  # fmt: skip
        self.widened, self.keeps = widened, keeps
        self.numbers = {n: first + n for n in range(len(kernel.inputs))} if first else None
        self.nest, self.acc, self.pitch = epilogue_nest(kernel)
        self.step, *more = self.nest.steps
        self.function = function
        out = kernel.outputs[0]
        self.step.value = self.step.value.cast(out.dtype)
        if floats and dtypes.DTYPES[out.dtype].size == 1:
            self.step.value = self.step.value.cast("float32")
        self.steps = [self.step, *more]
        self.row_sum = next((f"f{s.number}" for s in more if s.kind == "reduce"), "")
        lane = len(out.shape) - 1
        self.lane = lane if lane in self.nest.size else -1
        self.width = 1
        if self.lane >= 0:
            self.width = vector_width(self.nest, kernel, self.steps, self.lane, self.acc, max_width)
        self._fetched: dict[Expr, Value] = {}
        self.registers: dict[str, str] = {}  # variables and their types
        values = [x for step in self.steps for x in expr.walk(step.value)]
        loads = [x for x in dict.fromkeys(values) if self._is_ahead(x, True)]
        self.sum = kind_of(next((x.dtype for x in values if x.op == "load" and x.value.operand >= self.acc), "float32"))
        self.result = kind_of(self.step.value.dtype)
        self.only_sums = all(x.value.operand >= self.acc for x in values if x.op == "load")
        self.ahead = [x for x in loads if columns or self._is_ahead(x, False)]
        self.shared = [x for x in loads if x not in self.ahead]

    def fetch(self, row: str, column: str, guard: str, constant: bool | None = None) -> None:
        """Load operands of the next :meth:`store` at (row, column) into ``registers``, if ``guard`` holds: weights
        (``constant`` True), results of other kernels (False), or all (None)."""
        if constant is None:
            self._fetched = {}
        loads = {x: None for x in expr.walk(self.step.value) if x.op == "load" and x.value.operand < self.acc}
        kinds = {x: self.nest.inputs[x.value.operand].buffer.constant for x in loads}
        simple = [
            x for x in loads
            if constant in (kinds[x], None) and not x.value.checks and not x.value.guarded
            and not any(y.op == "load" for a in x.args for y in expr.walk(a))
        ]  # fmt: skip
        out = self.function.lines
        for x in simple:
            name = f"early{len(self._fetched)}"
            self._fetched[x] = stored(name, x.dtype)
            self.registers[name] = ctype(x.dtype)
            out.assign(name, storage(literal(0, kind_of(x.dtype)), x.dtype))
        if simple:
            with out.block(f"if ({guard}) {{"):
                s = Scalars(self.nest, Pointers(self.function, self.numbers), out, use_counts([self.step.value]))
                self._indices(row, column)
                for x in simple:
                    name = f"early{list(self._fetched).index(x)}"
                    out.add(f"{name} = {s.pointers[x.value.operand]}[{s.address(x)}];")

    def _is_ahead(self, x: Expr, columns: bool) -> bool:
        """Whether ``x`` reads, without conditions, one element for every result (a residual) or, with ``columns``, for
        every column."""
        if x.op != "load" or x.value.operand >= self.acc or x.value.guarded or x.value.checks:
            return False
        form = affine.affine(x.args[0])
        by_row = any(form.coefficient(d) for d in self.nest.order if d != self.lane)
        return form.coefficient(self.lane) == 1 and (by_row or columns)

    def read_shared(self, column: str, width: int) -> None:
        """Emit loads of ``width`` neighbours of every load of ``shared`` into the variable of that name."""
        self._read(self.shared, "shared", "0", column, width)

    def read_ahead(self, row: str, column: str, width: int) -> None:
        """Emit loads of ``width`` neighbours of every load of ``ahead`` into the variable of that name."""
        self._read(self.ahead, "ahead", row, column, width)

    def _read(self, loads: list[Expr], to: str, row: str, column: str, width: int) -> None:
        out = self.function.lines
        s = Scalars(self.nest, Pointers(self.function, self.numbers), out, use_counts([self.step.value]))
        with out.block("{"):
            self._indices(row, column)
            for n, x in enumerate(loads):
                vector = f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {width}>"
                at = f"{s.pointers[x.value.operand]} + {s.address(x)}"
                out.add(f"{to}.v{n} = *(DEVICE const {vector}*)({at});")

    def _indices(self, row: str, column: str) -> None:
        out = self.function.lines
        if self.lane >= 0:
            out.add(f"const int i{self.lane} = {column};")
        out.add(f"const uint row = (uint)({row}); (void)row;")
        for d, divisor, wrap in row_digits(self.nest, self.step.value, self.acc, self.pitch, self.lane):
            text = f"row / {divisor}u" if divisor > 1 else "row"
            out.add(f"const int i{d} = (int)({f'{text} % {wrap}u' if wrap else text});")

    def store(
        self, row: str, column: str, width: int, accumulators: Callable[[int, str], str], ahead: bool = False,
        shared: bool = False,
    ) -> None:  # fmt: skip
        """Emit statements that store ``width`` neighbours. ``accumulators(which, position)`` returns the expression of
        one sum. ``ahead``, ``shared``: whether the variables of these names hold the loads."""
        self._run(self.steps, row, column, width, accumulators, ahead, shared)

    def compute(
        self, to: str, row: str, column: str, width: int, accumulators: Callable[[int, str], str], ahead: bool,
        shared: bool,
    ) -> None:  # fmt: skip
        """Like :meth:`store`, but the results are not rounded and go to the array ``to`` of type ``result``, or to
        ``{to}n`` for output n > 0."""
        unrounded = [replace(step, value=before_storage(step.value)) for step in self.steps]
        self._run(unrounded, row, column, width, accumulators, ahead, shared, to)

    def rounded(self, to: str, row: str, column: str, width: int, accumulators: Callable[[int, str], str]) -> None:
        """Emit statements that set the array ``to`` of floats to ``width`` results as they would be stored. The
        variable ``ahead`` holds loads."""
        self._run([self.step], row, column, width, accumulators, True, False, to)

    def put(self, row: str, column: str, width: int, values: Callable[[str], str]) -> None:
        """Emit statements that store ``width`` results of :meth:`compute`: floats ``values(position)``."""
        sums = next(x for x in expr.walk(self.step.value) if x.op == "load" and x.value.operand >= self.acc)
        stored = replace(self.step, value=sums.cast(self.step.value.dtype))
        self._run([stored], row, column, width, lambda which, i: values(i), False, False)

    def ahead_dtype(self, x: Expr) -> str:
        """Return the dtype in which a load of ``ahead`` is held."""
        return "float32" if self.widened and dtypes.DTYPES[x.dtype].size == 1 else x.dtype

    def _total(self, which: int, text: str) -> Value:
        """Return an accumulator as a register."""
        if self.keeps and which == 1 and self.sum == "int":
            return Value(f"f32_of_bits((uint){text})", "float")
        return Value(text, self.sum)

    def _run(
        self, steps: list[Step], row: str, column: str, width: int, accumulators: Callable[[int, str], str],
        ahead: bool, shared: bool, to: str = "",
    ) -> None:  # fmt: skip
        out = self.function.lines
        s = Scalars(self.nest, Pointers(self.function, self.numbers), out, use_counts([x.value for x in steps]))
        if dtypes.DTYPES[self.step.value.dtype].size == 2:
            s.fast = self.function.dialect.fast
        points = Points(s, self.nest, self.lane, width)
        s.bound.update(self._fetched)
        early = [(f"ahead.v{n}", x, self.ahead_dtype(x)) for n, x in enumerate(self.ahead if ahead else ())]
        early += [(f"shared.v{n}", x, x.dtype) for n, x in enumerate(self.shared if shared else ())]
        for name, x, dtype in early:
            s.bound[x] = stored(f"{name}.v[0]", dtype)
            if width > 1:
                s.bound[expr.substitute(x, points.shift)] = stored(f"{name}.v[i{points.inner}]", dtype)
        for x in (x for step in steps for x in expr.walk(step.value)):
            if x.op == "load" and x.value.operand >= self.acc:
                which = x.value.operand - self.acc
                s.bound[x] = self._total(which, accumulators(which, "0"))
                if width > 1:
                    total = self._total(which, accumulators(which, f"i{points.inner}"))
                    s.bound[expr.substitute(x, points.shift)] = total
        with out.block("{"):
            self._indices(row, column)
            points.run(steps, sink=to)
        self.function.checks |= s.checks


class Functor:
    """An epilogue as a struct for kernel templates; ``gemm.h`` and ``tma_epilogue.h`` document its methods. ``width``:
    neighbouring columns of a vector. ``sums``: accumulators per result, which alternate in the array ``acc``."""

    def __init__(self, epilogue: Epilogue, members: Members, width: int, sums: int = 1):
        self.epilogue, self.members, self.width, self.sums = epilogue, members, width, sums
        members.lines.add(f"CONSTANTS int WIDTH = {width};")

    def types(self) -> None:
        """Add the structs ``Ahead`` and ``Shared``, values that were loaded before, as arguments of the methods; and
        ``Result``, the type of results in registers."""
        held = [self.epilogue.ahead_dtype(x) for x in self.epilogue.ahead]
        for name, found in (("Ahead", held), ("Shared", [x.dtype for x in self.epilogue.shared])):
            vectors = (f"Vec<{dtypes.DTYPES[dtype].ctype}, {self.width}> v{n};" for n, dtype in enumerate(found))
            self.members.lines.add(f"struct {name} {{ {' '.join(vectors)} }};")
        self.members.lines.add(f"typedef {self.epilogue.result} Result;")

    def read_ahead(self) -> None:
        """Add method ``read_ahead``: the loads of ``ahead`` at row m, column n."""
        with self.members.lines.block("INLINE void read_ahead(int m, int n, THREAD Ahead& ahead) const {"):
            self.epilogue.read_ahead("m", "n", self.width)

    def read_shared(self) -> None:
        """Add method ``read_shared``: the loads of ``shared`` at column n."""
        with self.members.lines.block("INLINE void read_shared(int n, THREAD Shared& shared) const {"):
            self.epilogue.read_shared("n", self.width)

    def store(self, width: int = 0, name: str = "store") -> None:
        """Add method ``name``, which stores ``width`` neighbours (default: a vector)."""
        with self._method(f"float {name}(int m, int n, THREAD const {self.epilogue.sum}* acc)"):
            self.epilogue.store("m", "n", width or self.width, self._sum)

    def store_rest(self, width: int) -> None:
        """Add method ``store_rest`` for ``width`` neighbours at the end of a row."""
        self.members.lines.add(f"CONSTANTS int REST = {width};")
        self.store(width, "store_rest")

    def store_read(self, ahead: bool, shared: bool) -> None:
        """Add method ``store`` with values that were loaded before: those of ``ahead``, of ``shared``, or both."""
        read = "THREAD const Ahead& ahead, THREAD const Shared& shared"
        with self._method(f"float store(int m, int n, THREAD const {self.epilogue.sum}* acc, {read})"):
            self.epilogue.store("m", "n", self.width, self._sum, ahead, shared)

    def compute(self, ahead: bool = False, shared: bool = False) -> None:
        """Add method ``compute``: results in registers in ``y``, and those of the second output in ``y1``."""
        read = "THREAD const Ahead& ahead, THREAD const Shared& shared"
        to = "THREAD Result* y, THREAD Result* y1"
        with self._method(f"float compute(int m, int n, THREAD const {self.epilogue.sum}* acc, {to}, {read})"):
            self.epilogue.compute("y", "m", "n", self.width, self._sum, ahead, shared)

    def put(self) -> None:
        """Add method ``put``, which stores results of ``compute``."""
        with self.members.lines.block("INLINE void put(int m, int n, THREAD const float* y) const {"):
            self.epilogue.put("m", "n", self.width, lambda i: f"y[{i}]")

    def _sum(self, which: int, at: str) -> str:
        return f"acc[{at}]" if self.sums == 1 else f"acc[({at}) * {self.sums} + {which}]"

    @contextmanager
    def _method(self, head: str) -> Iterator[None]:
        """Open a method that returns its vector's part of the row's sum."""
        out, total = self.members.lines, self.epilogue.row_sum
        with out.block(f"INLINE {head} const {{"):
            if total:
                out.add(f"float {total} = 0.0f;")
            yield
            out.add(f"return {total or '0.0f'};")

    def finish(self) -> str:
        """Define the struct, and return the C++ expression that instantiates it."""
        return self.members.finish()
