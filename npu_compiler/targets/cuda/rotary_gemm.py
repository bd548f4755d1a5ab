"""Products of queries, keys and values on Hopper whose epilogue computes rotary embeddings and updates caches: the
supported kernels, and the functor for ``kernels/tma_head_stores.h``."""

from __future__ import annotations

from collections.abc import Callable

from ...graph import affine, expr
from ...graph.expr import Expr
from ...schedule.anchors import Gemm, GemmWithLoops
from ...support import dtypes
from ..codegen.nest import use_counts
from ..simt.kernels.epilogue import Epilogue
from ..simt.kernels.gemm import product_of
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members, Pointers
from ..simt.lang.scalar import Scalars, Value, stored
from ..simt.lang.vectorize import Points, is_along
from .decoded_gemm import DecodedGemm, decoded_plan, supports_decoded
from .head_loops import WIDTH, Digit, HeadLoops, heads_of
from .tile_selection import Plan, choose_for_heads
from .tma_epilogue import supports_tma_store
from .tma_gemm import TmaGemm, supports_tma, tile_k


def supports_rotary_gemm(kernel: GemmWithLoops, dialect: Dialect) -> bool:
    """Whether :func:`emit_rotary_gemm` supports ``kernel``: TMA or warps load the operands of the product, and its
    consumers read heads of it."""
    product, (head, _) = kernel.product, heads_of(kernel)
    if not head or product.dual or product.extra_stages or product.n_major or product_of(product).batch > 1:
        return False
    if dtypes.DTYPES[product.outputs[0].dtype].size != 2 or _plan(product, head, dialect) is None:
        return False
    return _epilogue(product, Members(Function(kernel, dialect), "")).width == WIDTH


def emit_rotary_gemm(kernel: GemmWithLoops, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_rotary_gemm`."""
    plan = _plan(kernel.product, heads_of(kernel)[0], dialect)
    assert plan is not None
    kind = RotaryGemm if supports_tma(kernel.product) else DecodedRotaryGemm
    return kind(kernel, dialect, plan).emit()


def _plan(product: Gemm, head: int, dialect: Dialect) -> Plan | None:
    if supports_tma(product):
        return choose_for_heads(product, tile_k(product), supports_tma_store(product), head, dialect)
    return decoded_plan(product, dialect, head) if supports_decoded(product, dialect) else None


def _epilogue(product: Gemm, members: Members) -> Epilogue:
    return Epilogue(product, members, max_width=WIDTH, columns=True)


class HeadStores(TmaGemm):
    """The function of a product whose threads store the results of the consumers of ``whole``."""

    whole: GemmWithLoops

    def _begin(self, whole: GemmWithLoops) -> None:
        self.whole = whole
        self.head, self.heads = heads_of(whole)
        self.pairs_ahead = 2 if self.plan.n <= 128 else 1

    def _epilogue(self) -> tuple[dict[str, bool | int], str]:
        flags = dict(READ_AHEAD=True, SHARED=False, MERGED=False, RESULT_STAGES=0, RESIDUAL=False, KEEPS=False)
        return flags, HeadFunctor(self).finish()


class RotaryGemm(HeadStores):
    """The function of a :class:`GemmWithLoops` whose weights TMA loads."""

    def __init__(self, kernel: GemmWithLoops, dialect: Dialect, plan: Plan):
        super().__init__(kernel.product, dialect, plan, kernel)
        self._begin(kernel)


class DecodedRotaryGemm(HeadStores, DecodedGemm):
    """The function of a :class:`GemmWithLoops` whose weights warps decode."""

    def __init__(self, kernel: GemmWithLoops, dialect: Dialect, plan: Plan):
        super().__init__(kernel.product, dialect, plan, kernel)
        self._begin(kernel)


class HeadFunctor:
    """The epilogue as a struct for ``tma_head_stores.h``. Each of the consumers has methods that read the operands of a
    pair of vectors, and that store its results."""

    def __init__(self, function: HeadStores):
        self.f, self.whole, self.heads, self.half = function.f, function.whole, function.heads, function.head // 2
        self.members = Members(function.f, "@NAME@_heads")
        self.epilogue = _epilogue(self.whole.product, self.members)
        self.variables = [self._variables(x) for x in self.heads]
        self.places: dict[tuple[int, int, int], str] = {}  # names by key

    def finish(self) -> str:
        """Define the struct, and return the C++ expression that instantiates it."""
        self._compare_places()
        self._types()
        self._results()
        for n, x in enumerate(self.heads):
            self._read(n, x)
            self._store(n, x)
        out, sums = self.members.lines, f"THREAD const {self.epilogue.sum}*"
        with out.method("void read_ahead(int m, int n, THREAD Ahead& ahead) const"):
            out.add("read_vectors(m, n, ahead.near);", f"read_vectors(m, n + {self.half}, ahead.far);")
            self._dispatch(lambda n: f"read{n}(m, n, ahead);")
        with out.method(f"void store(int m, int n, {sums} near, {sums} far, THREAD const Ahead& ahead) const"):
            out.add(f"float x[{WIDTH}], y[{WIDTH}];")
            out.add("results(m, n, near, x, ahead.near);", f"results(m, n + {self.half}, far, y, ahead.far);")
            self._dispatch(lambda n: f"store{n}(m, n, x, y, ahead);")
        return self.members.finish()

    # -- variables
    def _variables(self, x: HeadLoops) -> dict[Expr, tuple[str, str]]:
        """Return type and name of the variables that hold a consumer's loads. Consumers share variables of one type."""
        made: dict[Expr, tuple[str, str]] = {}
        for load in x.loads():
            ctype = dtypes.DTYPES[load.dtype].ctype
            kind = self._vector(load) if is_along(load, x.lane) else ctype
            made[load] = kind, f"{ctype}_{'x' if kind == ctype else 'v'}{sum(k == kind for k, _ in made.values())}"
        return made

    def _vector(self, x: Expr) -> str:
        return f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {WIDTH}>"

    def _types(self) -> None:
        """Define the struct ``Ahead`` with all variables. Those of the product's own epilogue are ``Vectors``."""
        out = self.members.lines
        own = (f"{self._vector(x)} v{n};" for n, x in enumerate(self.epilogue.ahead))
        others = dict.fromkeys(variable for made in self.variables for variable in made.values())
        out.add(f"CONSTANTS int WIDTH = {WIDTH};", f"struct Vectors {{ {' '.join(own)} }};")
        out.add(f"struct Ahead {{ Vectors near, far; {' '.join(f'{kind} {name};' for kind, name in others)} }};")
        out.add("struct Shared {};")

    # -- methods
    def _dispatch(self, statement: Callable[[int], str]) -> None:
        """Emit the ``statement`` of the consumer that reads column ``n``; all columns of a head have the same one."""
        for n, x in enumerate(self.heads):
            inside = [f"n >= {x.first}"] * (x.first > 0) + [f"n < {x.first + x.width}"]
            self.members.lines.add(f"if ({' && '.join(inside)}) {statement(n)}")

    def _results(self) -> None:
        """Add the methods that compute results of the product, rounded as in memory, and read operands for them."""
        out, sums = self.members.lines, f"THREAD const {self.epilogue.sum}* acc"
        with out.method("void read_vectors(int m, int n, THREAD Vectors& ahead) const"):
            self.epilogue.read_ahead("m", "n", WIDTH)
        with out.method(f"void results(int m, int n, {sums}, THREAD float* x, THREAD const Vectors& ahead) const"):
            self.epilogue.rounded("x", "m", "n", WIDTH, lambda which, i: f"acc[{i}]")

    def _read(self, n: int, x: HeadLoops) -> None:
        with self.members.lines.method(f"void read{n}(int m, int n, THREAD Ahead& ahead) const"):
            s = self._scalars(x, self.members)
            self._indices(x)
            for load, (kind, name) in self.variables[n].items():
                at = f"{s.pointers[load.value.operand]} + {s.address(load)}"
                self.members.lines.add(f"ahead.{name} = *(DEVICE const {kind}*)({at});")
        self.members.checks |= s.checks

    def _store(self, n: int, x: HeadLoops) -> None:
        out, values = self.members.lines, "THREAD const float* near, THREAD const float* far"
        with out.method(f"void store{n}(int m, int n, {values}, THREAD const Ahead& ahead) const"):
            self._indices(x)
            if x.update is not None:
                search = f"is_overwritten<{x.nest.size[x.update]}u>({self.places[self._key(x)]}, (uint)i{x.update})"
                out.add(f"if (unordered && {search}) return;")
            s = self._scalars(x, self.members)
            points = Points(s, x.nest, x.lane, WIDTH)
            for load, (kind, name) in self.variables[n].items():
                whole = kind == dtypes.DTYPES[load.dtype].ctype
                s.bound[load] = stored(f"ahead.{name}" + ("" if whole else ".v[0]"), load.dtype)
                if not whole:
                    each = stored(f"ahead.{name}.v[i{points.inner}]", load.dtype)
                    s.bound[expr.substitute(load, points.shift)] = each
            for load in (y for step in x.nest.steps for y in expr.walk(step.value) if y.op == "load"):
                if load.value.operand >= x.near:
                    name = "near" if load.value.operand == x.near else "far"
                    s.bound[load] = Value(f"{name}[0]", "float")
                    s.bound[expr.substitute(load, points.shift)] = Value(f"{name}[i{points.inner}]", "float")
            points.run(x.nest.steps)
        self.members.checks |= s.checks

    def _scalars(self, x: HeadLoops, members: Members) -> Scalars:
        inputs, outputs = self.whole.inputs, self.whole.outputs
        numbers = {n: inputs.index(o) for n, o in enumerate(x.loops.inputs) if o in inputs}
        numbers |= {~n: ~outputs.index(o) for n, o in enumerate(x.loops.outputs)}
        uses = use_counts([e for step in x.nest.steps for e in step.exprs()])
        return Scalars(x.nest, Pointers(members, numbers), members.lines, uses)

    def _indices(self, x: HeadLoops) -> None:
        """Emit the variables of the nest's dims for row ``m`` and column ``n`` in the first half of a head."""
        column = f"(uint)(n - {x.first})" if x.first else "(uint)n"
        lane = Digit(x.lane, 1, 2 * self.half)
        for flat, digits in (("(uint)m", x.rows), (column, (lane, *x.columns))):
            for d in digits:
                self.members.lines.add(f"const int i{d.dim} = {_digit(flat, d, d is digits[-1])};")

    # -- scatters
    def _key(self, x: HeadLoops) -> tuple[int, int, int]:
        """Return what determines the places of a scatter: the input, and the address of a row's place in it."""
        assert x.place is not None and x.update is not None
        form = affine.affine(x.place.args[0])
        return self.whole.inputs.index(x.loops.inputs[x.place.value.operand]), form.coefficient(x.update), form.const

    def _compare_places(self) -> None:
        """Add the method ``begin``, which compares the places of all updates, to know whether some are overwritten."""
        out, tests = self.members.lines, []
        for n, x in enumerate(self.heads):
            if x.place is None or self._key(x) in self.places:
                continue
            members = Members(self.f, f"@NAME@_places{n}")
            with members.lines.method("int64_t of(uint update) const"):
                members.lines.let("int", f"i{x.update}", "(int)update")
                members.lines.return_value(self._scalars(x, members).text(x.place, "int64_t"))
            self.f.include("scatter.h")
            self.f.lines.declare("const auto", f"places{n}", members.finish())
            self.members.capture(members.name, f"places{n}")
            self.places[self._key(x)] = f"places{n}"
            tests.append(f"is_unordered<{x.nest.size[x.update or 0]}u, THREADS>(places{n}, tid)")
        with out.block("template <int THREADS> INLINE void begin(int tid, int number) const {"):
            if tests:
                out.assign("unordered", f"named_barrier_any(number, THREADS, {' || '.join(tests)})")
        if tests:
            self.members.field("mutable bool", "unordered")


def _digit(flat: str, d: Digit, last: bool) -> str:
    """Return the C++ expression of a digit of ``flat``. No digit is above the ``last`` one."""
    text = f"{flat} / {d.divisor}u" if d.divisor > 1 else flat
    return f"(int)({text})" if last else f"(int)({text} % {d.size}u)"
