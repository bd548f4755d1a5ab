"""Generates the C++ of ``loops`` kernels: one function per kernel, every size a literal, vector code along one dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ... import affine, dtypes, expr
from ...affine import Affine
from ...expr import Expr, const
from ...kernel import Kernel, Operand
from .nest import Access, build_nest, identity_element
from .plan import SEQUENTIAL_SUM, TILE_BLOCK, Pass, Plan, make_plan, use_counts
from .render import CTYPE, Block, Renderer, Value, convert, literal, uniform_kind, vector_kind
from .small_kernels import emit_small, small_scratch_bytes

MAX_SEGMENTS = 6
OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "argmax": "Max", "argmin": "Min"}


def emit_loops(kernel: Kernel, name: str, pointer: Callable[[Operand], str]) -> str:
    """The C++ function of a ``loops``, ``scan`` or ``sort`` kernel (needs ``small.h``):

    ``static int name(void* const* bufs, char* arena, npu::Thread& th, int* counter)``, called by every thread, returns 1
    if this thread met a data-dependent index out of range (it is clamped), else 0. ``pointer`` gives the C++ expression
    of an operand's first element, of type ``const T*`` for inputs and ``T*`` for outputs.
    """
    if kernel.kind in ("scan", "sort"):
        return emit_small(kernel, name, pointer)
    return _Emitter(kernel, pointer).function(name)


def scratch_bytes(kernel: Kernel) -> int:
    """Bytes of ``th.scratch`` that the kernel uses on each thread."""
    if kernel.kind in ("scan", "sort"):
        return small_scratch_bytes(kernel)
    nest = build_nest(kernel)
    return 0 if nest.empty else make_plan(nest).scratch_bytes


class _Emitter:
    def __init__(self, kernel: Kernel, pointer: Callable[[Operand], str]):
        self.kernel, self.pointer = kernel, pointer

    def function(self, name: str) -> str:
        root = Block(None, f"static NPU_NOINLINE int {name}(void* const* bufs, char* arena, npu::Thread& th, int* counter) {{")
        root.items += ["using namespace npu;", "(void)bufs, (void)arena, (void)th, (void)counter;"]
        nest = build_nest(self.kernel)
        if nest.empty:
            root.items.append("return 0;")
            return "\n".join(root.lines()) + "\n"
        self.nest = nest
        self.plan = make_plan(nest)
        steps = [s for p in self.plan.passes for s in (*p.folds, *p.saves, *p.stores)] + self.plan.row_stores
        exprs = [s.value for s in steps] + [s.target for s in steps if s.target is not None]
        names = [f"a{i}" for i in range(len(nest.inputs))] + [f"s{n}" for n in self.plan.saved]
        self.render = Renderer(nest, names, self.plan.lane, self.plan.wide, use_counts(exprs))
        loaded = {x.value.operand for e in exprs for x in expr.walk(e) if x.op == "load"}
        for i, op in enumerate(nest.inputs):
            if i in loaded:
                root.items.append(f"const auto* const a{i} = {self.pointer(op)};")
        for i, op in enumerate(nest.outputs):
            if ~i in loaded:
                root.items.append(f"auto* const b{i} = {self.pointer(op)};")
        for n, dtype in self.plan.saved.items():
            kind = vector_kind(dtype)
            lane_type = {"vf": "float", "vd": "double", "vi64": "int64_t"}.get(kind, "int32_t")
            root.items.append(f"{lane_type}* const s{n} = ({lane_type}*)(th.scratch + {self.plan.scratch[n]});")
            self._register_saved(n, dtype)
        root.items.append("int bad = 0;")
        with self._rows(root) as block:
            self._row(block)
        root.items.append("return bad;")
        return "\n".join(root.lines()) + "\n"

    def _register_saved(self, n: int, dtype: str) -> None:
        """Later passes read a saved temporary like an operand indexed by the reduced position."""
        offset: Expr = const(0, "int64")
        dims = self.plan.inner_folds + ([] if self.plan.wide else [self.plan.lane])
        for d in dims:
            offset = offset * self.nest.size[d] + expr.index(d)
        number = len(self.nest.inputs) + list(self.plan.saved).index(n)
        place = Expr("load", dtype, (offset,), Access(number, False, ()))
        self.saved_places = getattr(self, "saved_places", {}) | {n: place}

    # -- rows -----------------------------------------------------------------------------------------------------
    @contextmanager
    def _rows(self, root: Block) -> Iterator[Block]:
        """The loops over chunks and rows; yields the innermost row block."""
        plan, size = self.plan, self.nest.size
        rest = [d for d in self.nest.rows if d not in (plan.lane, plan.tile, *plan.prefix)]
        with ExitStack() as stack:
            if plan.chunks == 1:
                block = stack.enter_context(root.child("if (next_chunk(th, counter) == 0) {"))
            else:
                block = stack.enter_context(root.child(f"for (long c; (c = next_chunk(th, counter)) < {plan.chunks};) {{"))
            if plan.units > 1:
                first, last = ("0", str(plan.units)) if plan.chunks == 1 else (f"c * {plan.per_chunk}", f"c * {plan.per_chunk} + {plan.per_chunk}")
                if plan.units % plan.per_chunk:
                    last = f"scalar_min({last}, {plan.units}L)"
                header = f"for (long r = {first}, end = {last}; r < end; r++) {{"
                block = stack.enter_context(block.child(header, binds=frozenset((*plan.prefix, plan.lane if plan.lane_blocks > 1 else None))))
                self._decode(block)
            for d in rest:
                block = stack.enter_context(block.child(f"for (long i{d} = 0; i{d} < {size[d]}; i{d}++) {{", binds=frozenset((d,))))
            block.binds = block.binds | {"row"}
            yield block

    def _decode(self, block: Block) -> None:
        """Row indices and the lane range from the flat unit number."""
        plan, size = self.plan, self.nest.size
        step = 1
        if plan.lane_blocks > 1:
            at = "r" if plan.units == plan.lane_blocks else f"r % {plan.lane_blocks}"
            block.items.append(f"const long lo = {at} * {plan.block_size}, hi = scalar_min(lo + {plan.block_size}, {size[plan.lane or 0]}L);")
            step = plan.lane_blocks
        if plan.tile_blocks > 1:
            at = f"r / {step} % {plan.tile_blocks}" if plan.units > plan.tile_blocks * step else f"r / {step}"
            end = f"scalar_min(first + {TILE_BLOCK}, {size[plan.tile or 0]}L)"
            block.items.append(f"const long first = {at} * {TILE_BLOCK}, last = {end};")
            step *= plan.tile_blocks
        for n, d in enumerate(reversed(plan.prefix)):
            text = f"r / {step}" if step > 1 else "r"
            block.items.append(f"const long i{d} = {text}{f' % {size[d]}' if n < len(plan.prefix) - 1 else ''};")
            step *= size[d]

    def _row(self, block: Block) -> None:
        plan = self.plan
        if plan.lane is None:
            self._stores(block, plan.row_stores, {})
        elif plan.wide:
            for low, high in self._segments():
                self._wide(block, low, high)
        else:
            for number, p in enumerate(plan.passes):
                self._narrow_pass(block, number, p)
            self._stores(block, plan.row_stores, {})

    def _segments(self) -> list[tuple[int, int]]:
        """Ranges of the lane dim in which its guards do not change."""
        plan = self.plan
        assert plan.lane is not None
        size = self.nest.size[plan.lane]
        steps = [s for p in plan.passes for s in (*p.folds, *p.saves, *p.stores)] + plan.row_stores
        guarded = [s.value for s in steps if any(x.op == "where" for x in expr.walk(s.value))]
        points = affine.breakpoints(guarded, plan.lane, size)
        if not points or len(points) >= MAX_SEGMENTS:
            return [(0, size)]
        return list(zip([0, *points], [*points, size], strict=True))

    @contextmanager
    def _lanes(self, block: Block, helper: str, count: int, low: int, high: int, arguments: str) -> Iterator[Block]:
        """A loop over part of the lane dim; the range is narrowed to the thread's block if the lanes are split."""
        plan = self.plan
        ranges = self.render.ranges
        self.render.ranges = {**ranges, plan.lane or 0: (low, high - 1)}
        if plan.one_by_one:
            with block.child(f"for (long i{plan.lane} = {low}; i{plan.lane} < {high}; i{plan.lane}++) {{", binds=frozenset((plan.lane,))) as inner:
                inner.items.append("const int L = 1;")
                yield inner
        else:
            static, dynamic = f"<{count}, {low}, {high}>(", f"<{count}>(lo, hi, "
            if plan.lane_blocks > 1 and (low, high) != (0, self.nest.size[plan.lane or 0]):
                dynamic = f"<{count}>(scalar_max(lo, {low}L), scalar_min(hi, {high}L), "
            call = dynamic if plan.lane_blocks > 1 else static
            with block.child(f"{helper}{call}[&]({arguments}) NPU_BODY {{", "});", binds=frozenset((plan.lane,))) as inner:
                yield inner
        self.render.ranges = ranges

    def _known(self, e: Expr) -> Expr:
        """With the guards decided by the current lane range, and saved temporaries as loads."""
        e = expr.rewrite(e, lambda x: self.saved_places.get(x.value) if x.op == "stage" and x.value in self.plan.saved else None)
        return affine.simplify(e, self.render.ranges)

    # -- lanes over rows ------------------------------------------------------------------------------------------
    def _wide(self, block: Block, low: int, high: int) -> None:
        plan, lane = self.plan, self.plan.lane
        if plan.tile is not None:
            self._tiled(block, low, high)
            return
        if not plan.passes:
            with self._lanes(block, "lanes", 1, low, high, f"long i{lane}, auto L, int") as body:
                self._stores(body, plan.row_stores, {})
            return
        with self._lanes(block, "tiles", plan.unroll, low, high, "long b, auto L, auto W") as tile:
            tile.binds = frozenset()
            for number, p in enumerate(plan.passes):
                for s in p.folds:
                    tile.items.append(f"{self._accumulator(number, s.number, s.reduce, s.value.dtype, 'W', plan.inner_folds)} f{s.number};")
                with self._fold_loops(tile, number, p) as (inner, guards):
                    with self._vectors(inner) as body:
                        self._pass_body(body, p, guards, {"position": self.nest.position})
                for s in p.folds:
                    e, kind = self._result(s.number, s.reduce, s.value.dtype)
                    text = f"f{s.number}.get(u)"
                    self.render.stages[e] = (frozenset((lane,)), Value(f"({text} != 0)" if kind == "mask" else text, kind))
            if plan.row_stores:
                with self._vectors(tile) as body:
                    self._stores(body, plan.row_stores, {})

    def _tiled(self, block: Block, low: int, high: int) -> None:
        """Square tiles: loads along the tile dim are transposed in registers, so that stores follow the lanes."""
        plan, lane, tile, render = self.plan, self.plan.lane, self.plan.tile, self.render
        assert lane is not None and tile is not None
        corner = max(self.nest.size) + 1  # stands for the first position of a tile
        first, last = ("first", "last") if plan.tile_blocks > 1 else ("0", str(self.nest.size[tile]))
        with block.child(f"for (long i{corner} = {first}; i{corner} < {last}; i{corner} += VL) {{", binds=frozenset((corner,))) as outer:
            outer.items.append(f"const int n = (int)scalar_min<long>(VL, {last} - i{corner});")
            with self._lanes(outer, "lanes", 1, low, high, f"long i{lane}, auto L, int") as body:
                names = {}
                for x in plan.tiled:
                    at = render.place(expr.substitute(x, {tile: expr.index(corner)}), body)
                    assert at is not None
                    names[x] = render.name("x")
                    base = render.inputs[x.value.operand]
                    body.items.append(f"{CTYPE.get(vector_kind(x.dtype), vector_kind(x.dtype))} {names[x]}[VL];")
                    body.items.append(f"ld_tile({names[x]}, {base} + {at[0]}, {at[1]}, L, n);")
                with body.child("for (int k = 0; k < n; k++) {", binds=frozenset((tile,))) as inner:
                    inner.items.append(f"const long i{tile} = i{corner} + k;")
                    for x, name in names.items():
                        kind = vector_kind(x.dtype)
                        inner.values[x] = Value(f"({name}[k] != 0)" if kind == "mask" else f"{name}[k]", kind)
                    self._stores(inner, plan.row_stores, {})

    @contextmanager
    def _vectors(self, block: Block) -> Iterator[Block]:
        """The vectors of a tile."""
        lane = self.plan.lane
        header = "#pragma GCC unroll 8\nfor (int u = 0; u < W; u++) {"
        with block.child(header, binds=frozenset((lane,))) as inner:
            inner.items.append(f"const long i{lane} = b + u * VL;")
            yield inner

    # -- lanes along the row --------------------------------------------------------------------------------------
    def _narrow_pass(self, block: Block, number: int, p: Pass) -> None:
        plan, lane = self.plan, self.plan.lane
        assert lane is not None
        size = self.nest.size[lane]
        steps = -(-size // (16 * plan.unroll))
        for s in p.folds:
            block.items.append(
                f"{self._accumulator(number, s.number, s.reduce, s.value.dtype, str(plan.unroll), [*plan.inner_folds, lane])} f{s.number};"
            )
        carry = [f"f{s.number}.carry();" for s in p.folds if self._long(s.reduce, s.value.dtype)]
        blocked = bool(carry) and steps > SEQUENTIAL_SUM
        with self._fold_loops(block, number, p) as (outer, guards):
            if blocked:
                length = f"{SEQUENTIAL_SUM * plan.unroll} * VL"
                with outer.child(f"for (long lo = 0; lo < {size}; lo += {length}) {{", kind="loop") as part:
                    part.items.append(f"const long hi = scalar_min<long>(lo + {length}, {size});")
                    header = f"lanes<{plan.unroll}>(lo, hi, [&](long i{lane}, auto L, int u) NPU_BODY {{"
                    with part.child(header, "});", binds=frozenset((lane,))) as body:
                        self._pass_body(body, p, guards, {"position": self.nest.position})
                    part.items += carry
            else:
                for low, high in self._segments():
                    with self._lanes(outer, "lanes", plan.unroll, low, high, f"long i{lane}, auto L, int u") as body:
                        self._pass_body(body, p, guards, {"position": self.nest.position})
        for s in p.folds:
            e, kind = self._result(s.number, s.reduce, s.value.dtype)
            uniform = uniform_kind(e.dtype)
            text = f"splat<{kind}>(f{s.number}.all())" if uniform == kind else f"({uniform})f{s.number}.all()"
            block.items.append(f"const {uniform} r{s.number} = {text};")
            self.render.stages[e] = (frozenset(("row",)), Value(f"r{s.number}", uniform))

    # -- reductions -----------------------------------------------------------------------------------------------
    def _long(self, reduce: str, dtype: str) -> bool:
        """Whether a sum is long enough for partial sums to be carried."""
        plan = self.plan
        terms = self.nest.points(self.nest.folds) // (1 if plan.wide else 16 * plan.unroll)
        return reduce == "sum" and dtypes.is_float(dtype) and terms > SEQUENTIAL_SUM

    def _accumulator(self, number: int, n: int, reduce: str, dtype: str, count: str, dims: list[int]) -> str:
        kind = vector_kind(dtype)
        kind = "vi32" if kind == "mask" else kind
        if reduce in ("argmax", "argmin"):
            place = "vi32" if self.nest.points(self.nest.folds) < 2**31 else "vi64"
            return f"Best<{OPS[reduce]}, {kind}, {place}, {count}>"
        if self._long(reduce, dtype):
            return f"LongSum<{kind}, {count}, {'false' if self.plan.wide else 'true'}>"
        return f"Fold<{OPS[reduce]}, {kind}, {count}>"

    def _result(self, n: int, reduce: str, dtype: str) -> tuple[Expr, str]:
        """The stage expression of a reduction and the vector kind of its result."""
        dtype = "int64" if reduce in ("argmax", "argmin") else dtype
        return expr.stage(n, dtype), vector_kind(dtype)

    @contextmanager
    def _fold_loops(self, block: Block, number: int, p: Pass) -> Iterator[tuple[Block, dict[int, Expr]]]:
        """Scalar loops over the reduced dims (clipped where guards allow); yields the body and the folds' expressions."""
        plan = self.plan
        values = {s.number: self._known(s.value) for s in p.folds}
        clips: dict[int, list[tuple[int, Affine]]] = {}
        if not p.saves and not p.stores:
            values, clips = self._clip(p, values)
        sequential = 1 if plan.wide else -(-self.nest.size[plan.lane or 0] // (16 * plan.unroll))
        carries: dict[int, int] = {}  # dim -> iterations between carries
        sums = [s for s in p.folds if self._long(s.reduce, s.value.dtype)]
        if sums and sequential <= SEQUENTIAL_SUM:
            for d in reversed(plan.inner_folds):
                if sequential * self.nest.size[d] > SEQUENTIAL_SUM:
                    carries[d] = max(1, SEQUENTIAL_SUM // sequential)
                    break
                sequential *= self.nest.size[d]
        with ExitStack() as stack:
            for d in plan.inner_folds:
                low, high = self._bounds(d, clips.get(d, []), block)
                binds = frozenset((d,))
                if d in carries:
                    n = carries[d]
                    outer = block.child(f"for (long p{d} = {low}; p{d} < {high}; p{d} += {n}) {{")
                    block = stack.enter_context(outer)
                    stack.callback(block.items.extend, [f"f{s.number}.carry();" for s in sums])
                    low, high = f"p{d}", f"scalar_min<long>(p{d} + {n}, {high})"
                header = f"for (long i{d} = {low}, e{d} = {high}; i{d} < e{d}; i{d}++) {{"
                block = stack.enter_context(block.child(header, binds=binds))
            yield block, values

    def _bounds(self, d: int, clips: list[tuple[int, Affine]], block: Block) -> tuple[str, str]:
        low, high = "0", str(self.nest.size[d])
        for a, rest in clips:  # a * i + rest >= 0
            text = self.render.offset(rest if a < 0 else Affine({}, 0).plus(rest, -1), block)
            if a > 0:
                edge = text if a == 1 else f"ceil_quotient({text}, {a})"
                low = f"scalar_max<long>({low}, {edge})"
            else:
                edge = text if a == -1 else f"floor_quotient({text}, {-a})"
                high = f"scalar_min<long>({high}, {edge} + 1)"
        if clips:
            names = self.render.name("lo"), self.render.name("hi")
            block.items.append(f"const long {names[0]} = {low}, {names[1]} = {high};")
            return names
        return low, high

    def _clip(self, p: Pass, values: dict[int, Expr]) -> tuple[dict[int, Expr], dict[int, list[tuple[int, Affine]]]]:
        """Conditions outside which every reduction sees its identity become bounds of the loops."""
        guards = []
        for s in p.folds:
            e = values[s.number]
            neutral = const(identity_element(s.reduce, e.dtype), e.dtype)
            if s.reduce in ("argmax", "argmin") or e.op != "where" or e.args[2] is not neutral:
                return values, {}
            guards.append(affine.conjuncts(e.args[0]))
        clips: dict[int, list[tuple[int, Affine]]] = {}
        done: set[Expr] = set()
        folds = self.plan.inner_folds
        for c in guards[0] if guards else []:
            bounds = affine.as_bounds(c)
            if not bounds or not all(c in g for g in guards):
                continue
            form = bounds[0]
            dims = {t.value for t in form.terms if t.op == "index"}
            own = [d for d in folds if d in dims]
            if not own or form.opaque() or self.plan.lane in dims:
                continue
            d = own[-1]
            rest = Affine({t: k for t, k in form.terms.items() if t is not expr.index(d)}, form.const)
            clips.setdefault(d, []).append((form.coefficient(d), rest))
            done.add(c)
        out = {}
        for s, conditions in zip(p.folds, guards, strict=True):
            e = values[s.number]
            left = [c for c in conditions if c not in done]
            inner = e.args[1]
            for c in left[::-1]:
                inner = expr.where(c, inner, e.args[2])
            out[s.number] = inner
        return out, clips

    # -- bodies ---------------------------------------------------------------------------------------------------
    def _pass_body(self, body: Block, p: Pass, folds: dict[int, Expr], extra: dict[str, Expr]) -> None:
        """Everything one vector of points does in a pass: all values first, then the writes."""
        lines = []
        for s in p.folds:
            e = affine.simplify(folds[s.number], self.render.ranges)
            kind = vector_kind(e.dtype)
            text = self.render.text(e, "vi32" if kind == "mask" else kind, body)
            if s.reduce in ("argmax", "argmin"):
                place = "vi32" if self.nest.points(self.nest.folds) < 2**31 else "vi64"
                text += f", {self.render.text(affine.simplify(extra['position'], self.render.ranges), place, body)}"
            lines.append(f"f{s.number}.add(u, {text}, L);")
        for s in p.saves:
            e = self._known(s.value)
            place = self.render.place(self.saved_places[s.number], body)
            assert place is not None
            text = self.render.text(e, vector_kind(e.dtype), body)
            target = f"s{s.number} + ({place[0]} * W + u) * VL" if self.plan.wide else f"s{s.number} + {place[0]}"
            lines.append(f"st({target}, {text}, {'Full{}' if self.plan.wide else 'L'});")
        self._stores(body, p.stores, {}, lines)

    def _stores(self, body: Block, stores: list, _: dict, lines: list[str] | None = None) -> None:
        lines = [] if lines is None else lines
        for s in stores:
            lines += self._store(body, s)
        body.items += lines

    def _store(self, body: Block, s) -> list[str]:
        render = self.render
        dtype = self.nest.outputs[s.output].dtype
        e = self._known(s.value.cast(dtype))
        target = self._known(s.target)
        kind = vector_kind(dtype)
        if render.lane is None or (not self.plan.wide and s.per_row):
            text = render.text(e, uniform_kind(dtype), body)
            place = render.place(target, body)
            text = f"({text})[0]" if kind in ("vf", "vd") else text
            return [f"st1(b{s.output} + {place[0]}, {text});"] if place else []
        text = render.text(e, kind, body)
        if not text.isidentifier():
            name = render.name()
            body.items.append(f"const {'vi32' if kind == 'mask' else kind} {name} = {text};")
            text = name
        place = render.place(target, body)
        if place is None:
            return []
        offset, stride, gather = place
        if gather:
            return [f"scatter(b{s.output}, {gather}, {text}, L);"]
        if stride == 1:
            return [f"st(b{s.output} + {offset}, {text}, L);"]
        return [f"st_strided(b{s.output} + {offset}, {stride}, {text}, L);"]
