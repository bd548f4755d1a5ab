"""C++ of generated loop nests: one function per kernel; sizes are literals, and vector lanes run along one dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache

from ...graph import affine, expr
from ...graph.expr import Expr, const
from ...schedule.kernel import Buffer, LoopBody, Loops, Operand, Scan, Sort
from ...support import dtypes
from ..codegen.nest import Access, Nest, Step, build_nest, use_counts
from ..codegen.row_passes import WORTH_SAVING, Pass
from .blocks import CTYPE, LANE_TYPE, Block, Value, uniform_kind, vector_kind
from .devices import MEASURED, CPUCosts
from .lanes import segments
from .plan import TILE_BLOCK, Plan, make_plan, parts_of_lanes
from .reductions import OPS, accumulator, clip, is_long, reduction_loops, waiting, waiting_type
from .render import Renderer
from .small_kernels import emit_small, small_scratch_bytes
from .stores import Stores

ARGUMENTS = "void* const* bufs, char* arena, npu::Thread& th, int* counter"


def emit_loops(
    kernel: Loops | Scan | Sort,
    name: str,
    pointer: Callable[[Operand], str],
    costs: CPUCosts = MEASURED,
    own_chunks: bool = True,
) -> str:
    """Return the C++ function ``name`` of a ``loops``, ``scan`` or ``sort`` kernel (needs ``small.h``).

    Every thread calls ``static int name(void* const* bufs, char* arena, npu::Thread& th, int* counter)``. It returns 1
    if this thread found a data-dependent index out of range, which it replaced by 0; 2 if it divided by zero (3: both);
    otherwise 0. ``pointer`` returns the C++ expression of an operand's first element, of type ``const T*`` for inputs
    and ``T*`` for outputs. ``costs`` decide how the work is divided among threads. ``own_chunks``: a thread takes its
    own part of the chunks first, which needs a counter for each thread.
    """
    if not isinstance(kernel, Loops):
        return emit_small(kernel, name, pointer, costs)
    lines, inputs, outputs, _ = _emit(*_key(kernel), costs, own_chunks)
    head = [f"static NPU_NOINLINE int {name}({ARGUMENTS}) {{", "  using namespace npu;"]
    head.append("  (void)bufs, (void)arena, (void)th, (void)counter;")
    head += [f"  const auto* const a{i} = {pointer(kernel.inputs[i])};" for i in inputs]
    head += [f"  auto* const b{i} = {pointer(kernel.outputs[i])};" for i in outputs]
    return "\n".join([*head, *lines, "}\n"])


def scratch_bytes(kernel: Loops | Scan | Sort, costs: CPUCosts = MEASURED, own_chunks: bool = True) -> int:
    """Return the bytes of ``th.scratch`` that the kernel uses on each thread. With the arguments of
    :func:`emit_loops`, the kernel is not emitted again."""
    if not isinstance(kernel, Loops):
        return small_scratch_bytes(kernel)
    return _emit(*_key(kernel), costs, own_chunks)[3]


def _key(kernel: Loops) -> tuple[LoopBody, tuple[Operand, ...], tuple[Operand, ...]]:
    """Return the loops and the layouts of the operands, without addresses: all that a kernel's text depends on."""
    numbers: dict[int, Buffer] = {}

    def anonymous(op: Operand) -> Operand:
        b = op.buffer
        buffer = numbers.setdefault(b.id, Buffer(len(numbers), "arena", b.dtype, (), ""))
        return replace(op, buffer=buffer, offset=0)

    return kernel.body, tuple(map(anonymous, kernel.inputs)), tuple(map(anonymous, kernel.outputs))


@lru_cache(maxsize=512)
def _emit(
    body: LoopBody, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...], costs: CPUCosts, own_chunks: bool
) -> tuple[list[str], list[int], list[int], int]:
    """Return (lines of the function after its pointers, inputs used, outputs used, scratch bytes)."""
    nest = build_nest(Loops(label="", inputs=inputs, outputs=outputs, body=body))
    if nest.empty:
        return ["  return 0;"], [], [], 0
    return _Emitter(nest, make_plan(nest, costs), own_chunks).emit()


class _Emitter:
    """Emits one nest. The row block contains the passes. Loop bodies are lambdas (position, lanes, vector number)."""

    def __init__(self, nest: Nest, plan: Plan, own_chunks: bool):
        self.nest, self.plan, self.row, self.own_chunks = nest, plan, plan.row, own_chunks
        self.exprs = [e for s in self.row.steps for e in s.exprs()]
        names = [f"a{i}" for i in range(len(nest.inputs))] + [f"s{n}" for n in self.row.saved]
        self.render = Renderer(nest, names, plan.lane, plan.across_rows, use_counts(self.exprs))
        self.saved_places = {n: self._saved_place(n, at) for at, n in enumerate(self.row.saved)}
        self.stores = Stores(nest, plan, self.render, self._known)

    def emit(self) -> tuple[list[str], list[int], list[int], int]:
        root = Block(None, "")
        for n, dtype in self.row.saved.items():
            lane_type = LANE_TYPE[vector_kind(dtype)]
            root.items.append(f"{lane_type}* const s{n} = ({lane_type}*)(th.scratch + {self.plan.scratch[n]});")
        if self.plan.rows_at_once:
            for s in self.row.passes[0].reductions:
                at = self.plan.scratch[s.number]
                root.items.append(f"auto* const w{s.number} = ({waiting_type(self.plan, s)}*)(th.scratch + {at});")
        root.items.append("int bad = 0;")
        flags = len(root.items)
        with self._rows(root) as block:
            self._row(block)
        if self.render.divides:
            root.items.insert(flags, "int by_zero = 0;")
        root.items.append("return bad | by_zero << 1;" if self.render.divides else "return bad;")
        touched = {x.value.operand for e in self.exprs for x in expr.walk(e) if x.op == "load"}
        used = [i for i in range(len(self.nest.inputs)) if i in touched]
        written = [i for i in range(len(self.nest.outputs)) if ~i in touched]
        return list(root.lines(1)), used, written, self.plan.scratch_bytes

    def _saved_place(self, n: int, at: int) -> Expr:
        """Return the place where later passes read a saved value: an operand indexed by the reduced position."""
        offset: Expr = const(0, "int64")
        lane = self.plan.lane
        for d in self.plan.inner_reductions + ([] if self.plan.across_rows or lane is None else [lane]):
            offset = offset * self.nest.size[d] + expr.index(d)
        return Expr("load", self.row.saved[n], (offset,), Access(len(self.nest.inputs) + at, False, ()))

    # -- rows -----------------------------------------------------------------------------------------------------
    @contextmanager
    def _rows(self, root: Block) -> Iterator[Block]:
        """Emit the loops over chunks and rows, and yield the innermost row block."""
        plan, size = self.plan, self.nest.size
        rest = [
            d for d in self.nest.rows if d not in (plan.lane, plan.tile, plan.interleaved, plan.inner, *plan.prefix)
        ]
        chunks = f"for (long c; (c = next_chunk(th, counter)) < {plan.chunks};) {{"
        if self.own_chunks:
            chunks = f"for (long c, part = 0; (c = own_chunk(th, counter, {plan.chunks}, part)) < {plan.chunks};) {{"
        with ExitStack() as stack:
            once = "if (next_chunk(th, counter) == 0) {"
            block = stack.enter_context(root.child(chunks if plan.chunks > 1 else once))
            if plan.iterations > 1:
                n = plan.per_chunk
                first, last = (f"c * {n}", f"c * {n} + {n}") if plan.chunks > 1 else ("0", str(plan.iterations))
                last = f"scalar_min({last}, {plan.iterations}L)" if plan.iterations % n else last
                header = f"for (long r = {first}, end = {last}; r < end; r++) {{"
                block = stack.enter_context(block.child(header, binds=frozenset(plan.prefix)))
                self._decode(block)
            for d in rest:
                header = f"for (long i{d} = 0; i{d} < {size[d]}; i{d}++) {{"
                block = stack.enter_context(block.child(header, binds=frozenset((d,))))
            block.binds = block.binds | {"row"}
            yield block

    def _decode(self, block: Block) -> None:
        """Decode row indices, and the range of the lane and tile dims, from the number of the iteration."""
        plan, size = self.plan, self.nest.size
        step = 1

        def digit(count: int) -> str:
            nonlocal step
            text = f"r / {step}" if step > 1 else "r"
            step *= count
            return text if step == plan.iterations else f"{text} % {count}"

        if plan.lane_blocks > 1 and plan.lane is not None:
            block.items.append(f"const long lo = {digit(plan.lane_blocks)} * {plan.block_size};")
            block.items.append(f"const long hi = scalar_min(lo + {plan.block_size}, {size[plan.lane]}L);")
        if plan.tile is not None and plan.tile_blocks > 1:
            block.items.append(f"const long first = {digit(plan.tile_blocks)} * {TILE_BLOCK};")
            block.items.append(f"const long last = scalar_min(first + {TILE_BLOCK}, {size[plan.tile]}L);")
        for d in reversed(plan.prefix):
            block.items.append(f"const long i{d} = {digit(size[d])};")

    def _row(self, block: Block) -> None:
        if self.plan.lane is None:
            self.stores.emit(block, self.row.stores)
        elif not self.plan.across_rows:
            for number, p in enumerate(self.row.passes):
                self._pass_along(block, number, p)
            self.stores.emit(block, self.row.stores)
        else:
            for low, high in parts_of_lanes(self.plan, self.exprs, self.render.ranges):
                if self.plan.tile is not None:
                    self._tiled(block, low, high, self.plan.lane, self.plan.tile)
                elif self.row.passes:
                    self._passes_across(block, low, high, self.plan.lane)
                else:
                    with self._lanes(block, "lanes", 1, low, high, f"long i{self.plan.lane}, auto L, int") as body:
                        self._point(body)

    def _point(self, body: Block) -> None:
        """Emit one vector of points, or those along the inner dim."""
        d = self.plan.inner
        if d is None:
            return self.stores.emit(body, self.row.stores)
        header = f"for (long i{d} = 0; i{d} < {self.nest.size[d]}; i{d}++) {{"
        with body.child(header, binds=frozenset((d,))) as inner:
            self.stores.emit(inner, self.row.stores)

    # -- lanes ----------------------------------------------------------------------------------------------------
    @contextmanager
    def _lanes(self, block: Block, helper: str, count: int, low: int, high: int, arguments: str) -> Iterator[Block]:
        """Emit a loop over [low, high) of the lane dim, limited to the thread's block if the lanes are split."""
        plan, lane = self.plan, self.plan.lane
        assert lane is not None
        ranges = self.render.ranges
        self.render.ranges = {**ranges, lane: (low, high - 1)}
        call = f"<{count}, {low}, {high}>("
        if plan.lane_blocks > 1:
            whole = (low, high) == (0, self.nest.size[lane])
            call = f"<{count}>(" + ("lo, hi, " if whole else f"scalar_max(lo, {low}L), scalar_min(hi, {high}L), ")
        header = f"{helper}{call}[&]({arguments}) NPU_BODY {{"
        with block.child(header, "});", binds=frozenset((lane,))) as inner:
            yield inner
        self.render.ranges = ranges

    def _known(self, e: Expr) -> Expr:
        """Simplify an expression: guards are decided by the current lane range, saved values become loads."""

        def step(x: Expr) -> Expr | None:
            return self.saved_places.get(x.value) if x.op == "stage" else None

        return affine.simplify(expr.rewrite(e, step) if self.row.saved else e, self.render.ranges)

    # -- lanes across rows ----------------------------------------------------------------------------------------
    def _passes_across(self, block: Block, low: int, high: int, lane: int) -> None:
        with ExitStack() as stack:
            if self.plan.rows_at_once:
                (d,) = self.plan.inner_reductions
                header = f"for (long p{d} = 0; p{d} < {self.nest.size[d]}; p{d} += {self.plan.rows_at_once}) {{"
                block = stack.enter_context(block.child(header))
            self._tile(block, low, high, lane)

    def _tile(self, block: Block, low: int, high: int, lane: int) -> None:
        """Emit the passes over rows of one to four vectors."""
        with self._lanes(block, "tiles", self.plan.unroll[0], low, high, "long b, auto L, auto W") as tile:
            tile.binds = frozenset()  # the vectors of the tile define the lane dim
            for p in self.row.passes:
                self._hoist_row_values(tile, lane, p)
                values, clips = clip(self.plan, p, {s.number: self._known(s.value) for s in p.reductions})
                for s in p.reductions:
                    kind = accumulator(self.plan, s, "W")
                    if self._in_memory(s, values[s.number]):
                        kind = f"StoredReduction<{OPS[s.reduce]}, {self._ctype(values[s.number])}, W, decltype(L)>"
                    tile.items.append(f"{kind} f{s.number};")
                if self.plan.rows_at_once:
                    tile.items.append(waiting(self.plan, p, "load"))
                loops = reduction_loops(self.plan, self.render, tile, p, clips, 1)
                with loops as inner, self._vectors(inner, lane) as body:
                    self._pass_body(body, p, values)
                if self.plan.rows_at_once:
                    tile.items.append(waiting(self.plan, p, "save"))
                for s in p.reductions:
                    e, kind = _result(s)
                    text = f"(f{s.number}.get(u) != 0)" if kind == "mask" else f"f{s.number}.get(u)"
                    self.render.stages[e] = (frozenset((lane,)), Value(text, kind))
            if self.row.stores:
                with self._vectors(tile, lane) as body:
                    self.stores.emit(body, self.row.stores)

    def _hoist_row_values(self, tile: Block, lane: int, p: Pass) -> None:
        """Emit what depends on the row's reductions only, such as the logarithm of a sum, before the loop of a pass."""
        render = self.render
        found: dict[Expr, None] = {}

        def collect(e: Expr) -> None:
            leaves = {x.op for x in expr.walk(e) if not x.args}
            if "stage" in leaves and leaves <= {"stage", "const"}:
                if e not in render.stages and vector_kind(e.dtype) in ("vf", "vd") and expr.cost(e) >= WORTH_SAVING:
                    found[e] = None
            else:
                for x in e.args:
                    collect(x)

        for s in p.steps:
            collect(affine.simplify(self.stores.value(s) if s.kind == "store" else self._known(s.value), render.ranges))
        values = {e: Value(f"{render.name('h')}[u]", vector_kind(e.dtype)) for e in found}
        if values:
            tile.items += [f"{v.kind} {v.text.removesuffix('[u]')}[W];" for v in values.values()]
            with self._vectors(tile, lane) as body:
                body.items += [f"{v.text} = {render.text(e, v.kind, body)};" for e, v in values.items()]
        render.stages |= {e: (frozenset((lane,)), v) for e, v in values.items()}

    @contextmanager
    def _vectors(self, block: Block, lane: int) -> Iterator[Block]:
        """Emit the loop over the vectors of a tile."""
        header = "#pragma GCC unroll 8\nfor (int u = 0; u < W; u++) {"
        with block.child(header, binds=frozenset((lane,))) as inner:
            inner.items.append(f"const long i{lane} = b + u * VL;")
            yield inner

    def _tiled(self, block: Block, low: int, high: int, lane: int, tile: int) -> None:
        """Emit square tiles: loads along the tile dim are transposed in registers, so stores are contiguous."""
        plan, render = self.plan, self.render
        corner = max(self.nest.size) + 1  # a new dim: the first position of a tile
        first, last = ("first", "last") if plan.tile_blocks > 1 else ("0", str(self.nest.size[tile]))
        header = f"for (long i{corner} = {first}; i{corner} < {last}; i{corner} += VL) {{"
        with ExitStack() as stack:

            def along_lanes(outer: Block) -> Block:
                return stack.enter_context(self._lanes(outer, "lanes", 1, low, high, f"long i{lane}, auto L, int"))

            def along_tile(outer: Block) -> Block:
                inner = stack.enter_context(outer.child(header, binds=frozenset((corner,))))
                inner.items.append(f"const int n = (int)scalar_min<long>(VL, {last} - i{corner});")
                return inner

            body = along_tile(along_lanes(block)) if plan.tiles_along else along_lanes(along_tile(block))
            names = {}
            for x in plan.tiled:
                at = render.place(expr.substitute(x, {tile: expr.index(corner)}), body)
                assert at is not None
                names[x] = render.name("x")
                kind = vector_kind(x.dtype)
                body.items.append(f"{CTYPE.get(kind, kind)} {names[x]}[VL];")
                source = f"{render.inputs[x.value.operand]} + {at.offset}"
                step = affine.affine(x.args[0]).coefficient(tile)
                body.items.append(f"ld_tile<{step}>({names[x]}, {source}, {at.stride}, L, n);")
            with body.child("for (int k = 0; k < n; k++) {", binds=frozenset((tile,))) as inner:
                inner.items.append(f"const long i{tile} = i{corner} + k;")
                for x, name in names.items():
                    kind = vector_kind(x.dtype)
                    inner.values[x] = Value(f"({name}[k] != 0)" if kind == "mask" else f"{name}[k]", kind)
                self.stores.emit(inner, self.row.stores)

    # -- lanes along the row --------------------------------------------------------------------------------------
    def _pass_along(self, block: Block, number: int, p: Pass) -> None:
        plan, lane = self.plan, self.plan.lane
        assert lane is not None
        size, count = self.nest.size[lane], plan.unroll[number]
        for s in p.reductions:
            block.items.append(f"{accumulator(plan, s, str(count), along=True)} f{s.number};")
        carries = [f"f{s.number}.carry();" for s in p.reductions if is_long(plan, s, count)]
        steps = plan.lane_steps(count)
        values, clips = clip(plan, p, {s.number: self._known(s.value) for s in p.reductions})
        arguments = f"long i{lane}, auto L, int u"
        with reduction_loops(plan, self.render, block, p, clips, steps) as outer:
            if carries and steps > plan.sequential:  # the lane loop itself exceeds the limit, so it flushes
                length = f"{plan.sequential * count} * VL"
                with outer.child(f"for (long lo = 0; lo < {size}; lo += {length}) {{") as part:
                    part.items.append(f"const long hi = scalar_min<long>(lo + {length}, {size});")
                    header = f"lanes<{count}>(lo, hi, [&]({arguments}) NPU_BODY {{"
                    with part.child(header, "});", binds=frozenset((lane,))) as body:
                        self._pass_body(body, p, values)
                    part.items += carries
            else:
                for low, high in segments(self.exprs, lane, self.render.ranges):
                    with self._lanes(outer, "lanes", count, low, high, arguments) as body:
                        self._pass_body(body, p, values)
        for s in p.reductions:
            e, kind = _result(s)
            uniform = uniform_kind(e.dtype)
            text = f"splat<{kind}>(f{s.number}.all())" if uniform == kind else f"({uniform})f{s.number}.all()"
            block.items.append(f"const {uniform} r{s.number} = {text};")
            self.render.stages[e] = (frozenset(("row",)), Value(f"r{s.number}", uniform))

    # -- bodies ---------------------------------------------------------------------------------------------------
    def _pass_body(self, body: Block, p: Pass, values: dict[int, Expr]) -> None:
        """Emit one vector of points of a pass: first all values, then the stores."""
        render, across_rows = self.render, self.plan.across_rows
        lines = []
        for s in p.reductions:
            e = affine.simplify(values[s.number], render.ranges)
            kind = vector_kind(e.dtype)
            if across_rows and self._in_memory(s, e):
                place = render.place(e, body)
                assert place is not None
                lines.append(f"f{s.number}.add(u, {render.inputs[e.value.operand]} + {place.offset}, L);")
                continue
            text = render.text(e, "vi32" if kind == "mask" else kind, body)
            if s.reduce in ("argmax", "argmin"):
                at = affine.simplify(self.nest.position, render.ranges)
                text += f", {render.text(at, self.plan.position_kind, body)}"
            lines.append(f"f{s.number}.add(u, {text}, L);")
        for s in p.saves:
            e = self._known(s.value)
            place = render.place(self.saved_places[s.number], body)
            assert place is not None
            text = render.text(e, vector_kind(e.dtype), body)
            offset = f"({place.offset} * W + u) * VL" if across_rows else place.offset
            lines.append(f"st(s{s.number} + {offset}, {text}, {'Full{}' if across_rows else 'L'});")
        self.stores.emit(body, p.stores, lines)

    def _in_memory(self, s: Step, e: Expr) -> bool:
        """Whether a reduction takes 16-bit floats as they are in memory, next to each other: it needs no float32."""
        if s.reduce not in ("max", "min") or e.op != "load" or e.dtype not in ("bfloat16", "float16"):
            return False
        if self.plan.rows_at_once:  # accumulators of that kind stay in registers
            return False
        known = not e.value.checks and not affine.affine(e.args[0]).opaque()
        return 0 <= e.value.operand < len(self.nest.inputs) and known and self.stores.beside(e)

    def _ctype(self, e: Expr) -> str:
        """Return the C++ type of the elements that a load reads."""
        return dtypes.DTYPES[self.nest.inputs[e.value.operand].dtype].ctype


def _result(s: Step) -> tuple[Expr, str]:
    """Return the stage expression of a reduction and the vector kind of its result."""
    dtype = "int64" if s.reduce in ("argmax", "argmin") else s.value.dtype
    return expr.stage(s.number, dtype), vector_kind(dtype)
