"""``loops`` kernels: a thread computes an element or a vector; a thread, a subgroup or a workgroup reduces a row."""

from __future__ import annotations

from ....graph import affine, expr
from ....schedule.kernel import FusedLoops, Kernel, Loops
from ....support import dtypes
from ...codegen.nest import Nest, Step, accesses, build_nest, fold_single_points
from ...codegen.row_passes import Row, make_row
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import Scalars, Value, accumulator, kind_of
from ..lang.vectorize import Points, decode, memory_order, point_order, scalars_for, store_width, vector_width
from .reductions import RowReduction
from .scatter import THREADS, accumulate, emit_updates, is_elementwise, stores_rows, update_threads
from .transposed import emit_transposed, transposition

# A thread gathers POINTS_PER_THREAD vectors if there are at least MIN_UNROLLED_VECTORS.
POINTS_PER_THREAD, MIN_UNROLLED_VECTORS = 4, 1 << 20
THREAD_REDUCTION = 16  # the most points that one thread reduces
SUBGROUP_REDUCTION = 2048  # the most points that a subgroup reduces; a workgroup reduces more


def emit_loops(kernel: Loops, dialect: Dialect) -> Emission:
    """Return the function of a ``loops`` kernel."""
    nest = build_nest(kernel)
    if not nest.reduced and not nest.empty:
        fold_single_points(nest)
    scatters = nest.serial and not nest.empty and not nest.reduced and not is_elementwise(nest)
    rows = scatters and stores_rows(nest)
    function = Function(kernel, dialect, explicit_wait=rows)
    if nest.empty:
        return function.finish(0, THREADS)
    if rows:
        s = scalars_for(nest, function, nest.steps)
        return function.finish(emit_updates(nest, function, kernel, s, "workgroup"), THREADS)
    if not nest.reduced:
        return accumulate(nest, function) if scatters else _pointwise(nest, function)
    return _Reduction(nest, function).emit()


# -- pointwise ------------------------------------------------------------------------------------------------------
def _pointwise(nest: Nest, function: Function) -> Emission:
    if (found := transposition(nest, function.dialect)) is not None:
        return emit_transposed(nest, function, found)
    workgroups = _points_of(nest, function, function.kernel, scalars_for(nest, function, nest.steps), "workgroup")
    return function.finish(workgroups, THREADS)


def _points_of(nest: Nest, function: Function, kernel: Kernel, s: Scalars, workgroup: str) -> int:
    """Emit all points of ``kernel``'s nest, and return the number of workgroups. ``workgroup``: the C++ expression of a
    workgroup's number among them."""
    order = point_order(nest)
    width = store_width(nest, kernel, order[-1]) if order else 1
    count = nest.points(order) // width
    if MIN_UNROLLED_VECTORS <= count < 2**31 and _stores_little(nest, width):
        return _unrolled_points(nest, function, s, order, width, workgroup)
    out = function.lines
    flat = "uint64_t" if count >= 2**31 else "uint"
    out.add(f"const {flat} f = ({flat}){workgroup} * {THREADS}u + (uint)tid;")
    if count % THREADS:
        out.add(f"if (f >= {count}u) return;")
    decode(s, nest, order, "f", width)
    Points(s, nest, order[-1] if order else -1, width).run(nest.steps)
    function.checks |= s.checks
    return blocks(count, THREADS)


def _stores_little(nest: Nest, width: int) -> bool:
    """Whether a thread has one vector of up to 8 bytes to store, so that few loads are in flight, and can load the
    elements of several ones without branches."""
    (step, *others) = nest.steps
    if others or step.target is None or width * dtypes.DTYPES[step.target.dtype].size > 8:
        return False
    loads = [x for x in expr.walk(step.value) if x.op == "load"]
    if any(0 in o.shape for o in nest.inputs) or any(x.value.checks for x in (*loads, step.target)):
        return False  # skipped loads could not read the first element instead
    written = {o.buffer.id for o in nest.outputs}
    return bool(loads) and not any(nest.inputs[x.value.operand].buffer.id in written for x in loads)


def _unrolled_points(nest: Nest, function: Function, s: Scalars, order: list[int], width: int, workgroup: str) -> int:
    """Emit points such that a thread has several of them, so that more loads are in flight: apart along a dim that can
    be divided, or by the size of a workgroup. All stores follow the last load."""
    (step,), out = nest.steps, function.lines
    assert step.target is not None
    count, outer = nest.points(order) // width, _divided_dim(nest, order, step.value, width)
    threads = blocks(count, POINTS_PER_THREAD * THREADS) * THREADS if outer is None else count // POINTS_PER_THREAD
    vector = f"Vec<{dtypes.DTYPES[step.target.dtype].ctype}, {width}>"
    point = f"((uint){workgroup} * {POINTS_PER_THREAD}u + (uint)slot) * {THREADS}u + (uint)tid"
    if outer is not None:
        order = [outer, *(d for d in order if d != outer)]
        out.add(f"const uint f = (uint){workgroup} * {THREADS}u + (uint)tid;")
        if threads % THREADS:
            out.add(f"if (f >= {threads}u) return;")
        decode(s, nest, order, "f", width)
        out.add(f"const int first = i{outer};")
    out.add(f"{vector} made0[{POINTS_PER_THREAD}];", f"int64_t place0[{POINTS_PER_THREAD}];", "#pragma unroll")
    s.straight = True
    with s.scope(f"for (int slot = 0; slot < {POINTS_PER_THREAD}; slot++) {{"):
        if outer is not None:
            out.add(f"const int i{outer} = first + slot * {nest.size[outer] // POINTS_PER_THREAD};")
        else:  # the last threads compute the last point again
            out.let("uint", "f", f"{point} < {count}u ? {point} : {count - 1}u")
            decode(s, nest, order, "f", width)
        Points(s, nest, order[-1], width).run(nest.steps, slot="slot")
    out.add("#pragma unroll")
    pointer = s.pointers[~step.output]
    store = f"*(DEVICE {vector}*)({pointer} + place0[slot]) = made0[slot];"
    store = f"if ({point} < {count}u) {store}" if outer is None else store
    out.add(f"for (int slot = 0; slot < {POINTS_PER_THREAD}; slot++) {store}")
    function.checks |= s.checks
    return blocks(threads, THREADS)


def _divided_dim(nest: Nest, order: list[int], value: expr.Expr, width: int) -> int | None:
    """Return the dim along which a thread's points have most in common, so that the compiler computes it once. A
    subgroup still stores neighbours."""

    def usable(n: int) -> bool:
        inner = order[n + 1 :]
        return bool(inner) and nest.points(inner) >= SUBGROUP * width and nest.size[order[n]] % POINTS_PER_THREAD == 0

    def differs(d: int) -> int:
        found: set[expr.Expr] = set()
        for x in expr.walk(value):  # arguments come before their users
            if x is expr.index(d) or not found.isdisjoint(x.args):
                found.add(x)
        return len(found)

    return min((d for n, d in enumerate(order) if usable(n)), key=differs, default=None)


def is_pointwise(kernel: Loops) -> bool:
    """Whether all points of a ``loops`` kernel are independent."""
    if kernel.body.axes:
        return False
    nest = build_nest(kernel)
    return not nest.serial or nest.empty or is_elementwise(nest)


def shares_launch(kernel: Loops) -> bool:
    """Whether :func:`emit_fused` supports ``kernel``: it is pointwise, or a scatter with a subgroup per update."""
    if is_pointwise(kernel):
        return True
    if kernel.body.axes:
        return False
    nest = build_nest(kernel)
    fold_single_points(nest)
    return stores_rows(nest) and update_threads(nest, kernel) == SUBGROUP


def emit_fused(kernel: FusedLoops, dialect: Dialect) -> Emission:
    """Return one function for kernels that :func:`shares_launch`. Each has its own workgroups."""
    function, first, inputs, outputs = Function(kernel, dialect, explicit_wait=True), 0, 0, 0
    for part in kernel.parts:
        numbers = {n: inputs + n for n in range(len(part.inputs))}
        numbers |= {~n: ~(outputs + n) for n in range(len(part.outputs))}
        inputs, outputs = inputs + len(part.inputs), outputs + len(part.outputs)
        nest = build_nest(part)
        if nest.empty:
            continue
        fold_single_points(nest)
        s = scalars_for(nest, function, nest.steps, numbers)
        mark = len(function.lines.text)
        function.lines.depth += 1
        if nest.serial and not is_elementwise(nest):
            workgroups = emit_updates(nest, function, part, s, f"(workgroup - {first})", numbers)
        else:
            function.lines.add("pdl_wait();")
            workgroups = _points_of(nest, function, part, s, f"(workgroup - {first})")
        function.lines.depth -= 1
        function.lines.text.insert(mark, f"  if (workgroup >= {first} && workgroup < {first + workgroups}) {{")
        function.lines.add("}")
        first += workgroups
    return function.finish(first, THREADS)


# -- reductions -----------------------------------------------------------------------------------------------------
MAX_UNROLL = 8  # the most iterations of a thread's loop over a row that is unrolled
VECTOR_ROWS = 1 << 15  # the fewest vectors of rows that occupy the device with one thread per vector
VECTOR_REDUCTION = 64  # the longest reduction that a thread computes for a vector of rows
SHORT_RUN = 8  # neighbouring elements, of fewer of which lanes read little at once


def across_dim(nest: Nest) -> int | None:
    """Return a row dim along which more of what is loaded is contiguous than along any reduced dim, or None."""
    scores = dict.fromkeys(nest.order, 0)
    for x, per_row in accesses(nest):
        if per_row or x.value.operand < 0:
            continue
        form = affine.affine(x.args[0])
        used = nest.order if form.opaque() else [d for d in nest.order if form.coefficient(d)]
        if not set(used).isdisjoint(nest.reduction_dims):
            for d in used:
                scores[d] += nest.points(used) * (abs(form.coefficient(d)) == 1)
    best_fold = max((scores[d] * (nest.size[d] > 1) for d in nest.reduction_dims), default=0)
    rows = [d for d in nest.rows if scores[d] > best_fold and nest.size[d] >= 8]
    return max(rows, key=lambda d: scores[d]) if rows else None


def columns_at_once(kernel: Loops) -> int:
    """Return the number of neighbouring rows that a thread can reduce together, because its loads are contiguous along
    rows; 0 if they are not."""
    nest = build_nest(kernel)
    lane = across_dim(nest)
    return 0 if lane is None else vector_width(nest, kernel, nest.steps, lane)


class _Reduction:
    def __init__(self, nest: Nest, function: Function):
        self.nest, self.function, self.out = nest, function, function.lines
        self.row: Row = make_row(nest, 1, scratch=0)
        self.s = scalars_for(nest, function, self.row.steps)
        self.rows, self.count = nest.points(nest.rows), nest.points(nest.reduction_dims)

    def emit(self) -> Emission:
        across = across_dim(self.nest)
        if across is not None and (width := self._width(across)) > 1:
            return self._vectors(across, width)
        return self._across(across) if across is not None or self._by_threads() else self._along()

    def _by_threads(self) -> bool:
        """Whether a thread reduces a row: in a subgroup many lanes would be idle, or read short runs of elements, such
        as those of a pool's windows in three dims."""
        if self.count <= THREAD_REDUCTION:
            return True
        run = self.nest.size[memory_order(self.nest, self.nest.reduction_dims, loads=True)[-1]]
        return self.count <= VECTOR_REDUCTION and self.rows >= VECTOR_ROWS and run < SHORT_RUN

    def _width(self, lane: int) -> int:
        """Return the number of neighbouring rows along ``lane`` that a thread computes, if enough threads remain."""
        passes, kernel = self.row.passes, self.function.kernel
        if len(passes) != 1 or passes[0].stores or any(st.reduce.startswith("arg") for st in passes[0].reductions):
            return 1
        width = vector_width(self.nest, kernel, [*passes[0].reductions, *self.row.stores], lane)
        return width if self.rows // width >= VECTOR_ROWS and self.count <= VECTOR_REDUCTION else 1

    def _vectors(self, lane: int, width: int) -> Emission:
        """Emit a reduction in which a thread computes ``width`` neighbouring rows, each with its own accumulator."""
        nest, out, s = self.nest, self.out, self.s
        order = [d for d in memory_order(nest, nest.rows) if d != lane] + [lane]
        count = self.rows // width
        out.add(f"const uint r = (uint)workgroup * {THREADS}u + (uint)tid;")
        if count % THREADS:
            out.add(f"if (r >= {count}u) return;")
        decode(s, nest, order, "r", width)
        (p,) = self.row.passes
        points = Points(s, nest, lane, width, apart=True)
        for st in p.reductions:
            kind = kind_of(st.value.dtype)
            out.add(f"{kind} f{st.number}[{width}];", "#pragma unroll")
            out.add(f"for (int i = 0; i < {width}; i++) f{st.number}[i] = {accumulator(st.reduce, st.value.dtype)};")
        if self.count <= THREAD_REDUCTION:
            out.add("#pragma unroll")
        with s.scope(f"for (uint p = 0; p < {self.count}u; p++) {{"):
            decode(s, nest, nest.reduction_dims, "p")
            points.run(p.reductions)
        for st in p.reductions:
            name = f"f{st.number}[i{points.inner}]"
            s.bound[expr.stage(st.number, st.value.dtype)] = Value(name, kind_of(st.value.dtype))
        points.run(self.row.stores)
        self.function.checks = s.checks
        return self.function.finish(blocks(count, THREADS), THREADS)

    def _across(self, lane: int | None) -> Emission:
        """Emit a reduction in which neighbouring lanes compute neighbouring rows. The subgroups of a workgroup share
        the reduced points if there are few rows."""
        nest, out, s = self.nest, self.out, self.s
        order = memory_order(nest, nest.rows)
        if lane is not None:
            order = [d for d in order if d != lane] + [lane]
        parts = 1
        while parts < 16 and self.rows * parts < 32 * THREADS * 4 and self.count // (2 * parts) >= 8:
            parts *= 2
        threads = 128 if parts == 1 else SUBGROUP * parts
        per_group = threads // parts
        out.add(f"const uint r = (uint)workgroup * {per_group}u + (uint){'tid' if parts == 1 else 'lane'};")
        if parts == 1:
            if self.rows % per_group:
                out.add(f"if (r >= {self.rows}u) return;")
            row, active = "r", ""
        else:
            out.add(f"const uint row = r < {self.rows}u ? r : {self.rows - 1}u;")
            row, active = "row", f"r < {self.rows}u" if self.rows % per_group else ""
        decode(s, nest, order, row)
        points, reduction = Points(s, nest, -1, 1), RowReduction(s, self.function)
        for p in self.row.passes:
            s.define_row_values(st.value for st in p.steps)
            reduction.begin(p)
            first = "0" if parts == 1 else "(uint)subgroup"
            with s.scope(f"for (uint p = {first}; p < {self.count}u; p += {parts}u) {{"):
                decode(s, nest, nest.reduction_dims, "p")
                points.run(p.reductions, position=nest.position)
                self._guarded(p.stores, active)
            reduction.combine_across(p, parts)
        conditions = ([f"subgroup == {0}"] if parts > 1 else []) + ([active] if active else [])
        self._guarded(self.row.stores, " && ".join(conditions))
        self.function.checks = s.checks
        return self.function.finish(blocks(self.rows, per_group), threads)

    def _along(self) -> Emission:
        """Emit a reduction in which the lanes of a subgroup, or all threads of a workgroup, share a row."""
        nest, out, s = self.nest, self.out, self.s
        folds = memory_order(nest, nest.reduction_dims, loads=True)
        steps = [st for p in self.row.passes for st in p.steps]
        width = vector_width(nest, self.function.kernel, steps, folds[-1])
        iterations = self.count // width  # of all threads of a row together
        few = self.rows <= 64 if iterations < 2 * SUBGROUP else self.rows <= 1024
        threads_per_row = SUBGROUP if self.count <= SUBGROUP_REDUCTION and (not few or self.count <= 256) else 256
        if iterations >= 16384:
            threads_per_row = 1024
        elif threads_per_row > SUBGROUP and iterations % threads_per_row and not iterations % SUBGROUP:
            threads_per_row = next(n for n in range(threads_per_row, 0, -SUBGROUP) if not iterations % n)
        per_group = 4 if threads_per_row == SUBGROUP else 1
        threads = threads_per_row * per_group
        if threads_per_row == SUBGROUP:
            out.add(f"const uint r = (uint)workgroup * {per_group}u + (uint)subgroup;", "const int me = lane;")
            if self.rows % per_group:
                out.add(f"if (r >= {self.rows}u) return;")
        else:
            out.add("const uint r = (uint)workgroup;", "const int me = tid;")
        decode(s, nest, nest.rows, "r")
        unrolled = iterations // threads_per_row if iterations % threads_per_row == 0 else 0
        unrolled = unrolled if unrolled <= MAX_UNROLL else 0
        points, reduction = Points(s, nest, folds[-1], width), RowReduction(s, self.function)
        if unrolled:
            points.keep([p.steps for p in self.row.passes], unrolled)
        for p in self.row.passes:
            s.define_row_values(st.value for st in p.steps)
            reduction.begin(p)
            loop = f"for (uint p = (uint)me; p < {iterations}u; p += {threads_per_row}u) {{"
            if unrolled:
                out.add("#pragma unroll")
                loop = f"for (uint step = 0; step < {unrolled}u; step++) {{"
            with s.scope(loop):
                if unrolled:
                    out.add(f"const uint p = (uint)me + step * {threads_per_row}u;")
                decode(s, nest, folds, "p", width)
                points.run(p.steps, position=nest.position)
            reduction.combine_along(p, threads_per_row)
        self._guarded(self.row.stores, "me == 0")
        self.function.checks = s.checks
        return self.function.finish(blocks(self.rows, per_group), threads)

    def _guarded(self, stores: list[Step], condition: str) -> None:
        if not stores:
            return
        plain = Points(self.s, self.nest, -1, 1)
        if condition:
            with self.s.scope(f"if ({condition}) {{"):
                plain.run(stores)
        else:
            plain.run(stores)
