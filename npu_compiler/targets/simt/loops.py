"""``loops`` kernels: one thread an element or a vector, reductions along a simd, a group, or across the lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ... import affine, dtypes, expr
from ...expr import Expr
from ...kernel import Kernel
from ..nest import Nest, Step, accesses, build_nest, fold_single_points, use_counts
from ..row_passes import Row, make_row
from .dialect import SIMD, Dialect
from .folds import RowFold
from .function import Emission, Function, Pointers, blocks
from .scalar import Scalars, Value, accumulator, combine, kind_of, storage, stored

THREADS = 256
SMALL_FOLD = 16  # a thread folds so few points alone
GATHERED = 8  # so many neighbours a thread collects for one store
SIMD_FOLD = 2048  # a simd folds so many; beyond, a whole group


def emit_loops(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of a ``loops`` kernel."""
    nest = build_nest(kernel)
    function = Function(kernel, dialect)
    if nest.empty:
        return function.finish(0, THREADS)
    if not nest.reduced:
        fold_single_points(nest)
        return _serial(nest, function) if nest.serial else _pointwise(nest, function)
    return _Reduction(nest, function).emit()


def scalars_for(
    nest: Nest, function: Function, steps: Sequence[Step], numbers: dict[int, int] | None = None
) -> Scalars:
    """``numbers``: the function's operand for each of the nest's, if they differ."""
    uses = use_counts([e for s in steps for e in s.exprs()])
    return Scalars(nest, Pointers(function, numbers), function.lines, uses)


# -- vectors ------------------------------------------------------------------------------------------------------
def vector_width(
    nest: Nest, kernel: Kernel, steps: Sequence[Step], lane: int, registers: int = 2**31, most: int = 0
) -> int:
    """Neighbours along ``lane`` that every access can take at once, or 1: in up to 16 bytes, or ``most`` if given.
    Operands from number ``registers`` on are not in memory. A few neighbours may also be gathered from anywhere."""
    widest = most or 8
    found: set[Expr] = {x for s in steps for e in s.exprs() for x in expr.walk(e) if x.op == "load"}
    found = {x for x in found if x.value.operand < registers}
    for x in found:
        form = affine.affine(x.args[0])
        inside = [t for t in (*form.opaque(), *x.args[1:]) if any(y is expr.index(lane) for y in expr.walk(t))]
        c = form.coefficient(lane)
        if not inside and c not in (0, 1) and x.value.operand >= 0 and nest.size[lane] <= GATHERED:
            continue
        if inside or c not in (0, 1):
            return 1
        if c and x.value.guarded:
            found_condition = condition_of(steps, x)
            widest = min(widest, same_for(found_condition[0], lane)) if found_condition else 1
        if c:
            op = kernel.inputs[x.value.operand] if x.value.operand >= 0 else kernel.outputs[~x.value.operand]
            beside = (k for t, k in form.terms.items() if t is not expr.index(lane))
            step = math.gcd(*beside, form.const, op.offset, *(k for _, k in x.value.checks)) or 16
            widest = min(widest, most or 16 // dtypes.DTYPES[x.dtype].size, step & -step)
    n = nest.size[lane]
    while n % widest:
        widest //= 2
    return max(widest, 1) if any(affine.affine(x.args[0]).coefficient(lane) for x in found) else 1


def condition_of(steps: Sequence[Step], x: Expr) -> tuple[Expr, bool] | None:
    """(condition, its value) under which ``x`` is read, if a single ``where`` states it."""
    around = {y for s in steps for e in s.exprs() for y in expr.walk(e) if any(a is x for a in expr.walk(y))}
    wheres = [y for y in around if y.op == "where"]
    if len(wheres) != 1:
        return None
    inside = [any(a is x for a in expr.walk(arm)) for arm in wheres[0].args]
    return None if inside not in ([False, True, False], [False, False, True]) else (wheres[0].args[0], inside[1])


def same_for(condition: Expr, lane: int) -> int:
    """For how many neighbours along ``lane``, from a multiple of as many on, ``condition`` is the same."""
    if not any(y is expr.index(lane) for y in expr.walk(condition)):
        return 1 << 30
    if condition.op == "and":
        return min(same_for(a, lane) for a in condition.args)
    if condition.op in ("lt", "ge") and condition.args[0].dtype == "int64":
        form = affine.affine(condition.args[0] - condition.args[1])
        if form.coefficient(lane) == 1 and len(form.terms) == 1 and form.const:
            return form.const & -form.const
    return 1


class Points:
    """What a thread does at ``width`` neighbouring points along ``lane``; ``i{lane}`` is the first. With ``apart``,
    reductions fold every neighbour into a variable of its own, ``f{number}[..]``."""

    def __init__(self, s: Scalars, nest: Nest, lane: int, width: int, apart: bool = False):
        self.s, self.nest, self.lane, self.width, self.apart = s, nest, lane, width, apart
        self.inner = max(nest.size, default=0) + 1  # the position inside the vector, as a dim of its own
        s.ranges = {**s.ranges, self.inner: (0, width - 1)}

    @property
    def shift(self) -> dict[int, Expr]:
        """From the first point to the one at ``inner``."""
        return {self.lane: expr.index(self.lane) + expr.index(self.inner)} if self.width > 1 else {}

    def run(self, steps: Sequence[Step], position: Expr | None = None, sink: str = "") -> None:
        """Stores are made, and reductions folded into the variables ``f{number}``. With ``sink``, what would be stored
        goes into that float array instead."""
        s, width = self.s, self.width
        if width == 1:
            for step in steps:
                if sink:
                    s.out.add(f"{sink}[0] = {s.text(step.value, 'float')};")
                else:
                    self._one(step, step.value, step.target, position)
            return
        stores: list[tuple[str, Step]] = []
        bound = dict(s.bound)
        shift = self.shift
        for x in {x: None for st in steps for x in expr.walk(st.value) if x.op == "load"}:
            known = x in s.bound or expr.substitute(x, shift) in s.bound
            if affine.affine(x.args[0]).coefficient(self.lane) == 1 and not known:
                s.bound[expr.substitute(x, shift)] = stored(f"{self._vector(steps, x)}.v[i{self.inner}]", x.dtype)
        for st in steps:
            if st.target is not None and not sink:
                name = s.name()
                s.out.add(f"Vec<{dtypes.DTYPES[st.target.dtype].ctype}, {width}> {name};")
                stores.append((name, st))
        s.out.add("#pragma unroll")
        with s.scope(f"for (int i{self.inner} = 0; i{self.inner} < {width}; i{self.inner}++) {{"):
            for st in steps:
                value = expr.substitute(st.value, shift)
                if sink:
                    s.out.add(f"{sink}[i{self.inner}] = {s.text(value, 'float')};")
                elif st.target is None:
                    self._one(st, value, None, expr.substitute(position, shift) if position is not None else None)
                else:
                    name = next(n for n, other in stores if other is st)
                    text = storage(s.text(value, kind_of(st.target.dtype)), st.target.dtype)
                    s.out.add(f"{name}.v[i{self.inner}] = {text};")
        for name, st in stores:
            assert st.target is not None
            ctype = dtypes.DTYPES[st.target.dtype].ctype
            s.out.add(f"*(DEVICE Vec<{ctype}, {width}>*)({s.pointers[~st.output]} + {s.address(st.target)}) = {name};")
        s.bound = bound

    def _vector(self, steps: Sequence[Step], x: Expr) -> str:
        """A variable with the neighbours that load ``x`` begins; anything where it is not read."""
        s, name = self.s, self.s.name()
        vector = f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {self.width}>"
        pointer = s.pointers[x.value.operand]
        if not x.value.guarded:
            s.out.add(f"const {vector} {name} = *(DEVICE const {vector}*)({pointer} + {s.address(x)});")
            return name
        found = condition_of(steps, x)
        assert found is not None
        condition, value = found
        s.out.add(f"{vector} {name} = {{}};")
        with s.scope(f"if ({'' if value else '!'}({s.text(condition, 'bool')})) {{"):
            s.out.add(f"{name} = *(DEVICE const {vector}*)({pointer} + {s.address(x)});")
        return name

    def _one(self, step: Step, value: Expr, target: Expr | None, position: Expr | None) -> None:
        s = self.s
        if target is not None:
            s.store(target, value, target.dtype)
            return
        register, name = kind_of(step.value.dtype), f"f{step.number}" + (f"[i{self.inner}]" if self.apart else "")
        text = s.text(value, register)
        if step.reduce.startswith("arg"):
            assert position is not None
            s.out.add(f"{step.reduce}_step({name}, q{step.number}, {text}, {s.text(position, 'int')});")
        else:
            s.out.add(f"{name} = {combine(step.reduce, register, name, text)};")


def decode(s: Scalars, nest: Nest, dims: Sequence[int], flat: str, width: int = 1) -> None:
    """Variables ``i{dim}`` of ``dims``, the last of which varies fastest (in steps of ``width``)."""
    unit = 1
    for d in reversed(dims):
        n = nest.size[d] // (width if d == dims[-1] else 1)
        text = flat if unit == 1 else f"{flat} / {unit}u"
        outermost = d == dims[0]
        text = text if outermost else f"({text}) % {n}u" if unit > 1 else f"{text} % {n}u"
        times = f" * {width}" if d == dims[-1] and width > 1 else ""
        s.out.add(f"const int i{d} = (int)({text}){times};")
        unit *= n


def memory_order(nest: Nest, dims: Sequence[int], loads: bool = False) -> list[int]:
    """``dims`` with those of small strides last: of the stores, or else of the loads."""
    weight = {d: 0.0 for d in dims}
    for x, _ in accesses(nest):
        form = affine.affine(x.args[0])
        if (x.value.operand < 0) != loads:
            for d in dims:
                c = abs(form.coefficient(d))
                weight[d] = max(weight[d], c) if c else weight[d]
    return sorted(dims, key=lambda d: -weight[d])


# -- pointwise ------------------------------------------------------------------------------------------------------
def _pointwise(nest: Nest, function: Function) -> Emission:
    groups = _points_of(nest, function, function.kernel, scalars_for(nest, function, nest.steps), "gid")
    return function.finish(groups, THREADS)


def _points_of(nest: Nest, function: Function, kernel: Kernel, s: Scalars, group: str) -> int:
    """Every point of ``kernel``'s nest, by as many groups as are returned; ``group`` counts them."""
    order = memory_order(nest, nest.order)
    width = vector_width(nest, kernel, nest.steps, order[-1]) if order else 1
    count = nest.points(order) // width
    out = function.lines
    flat = "uint64_t" if count >= 2**31 else "uint"
    out.add(f"const {flat} f = ({flat}){group} * {THREADS}u + (uint)tid;")
    if count % THREADS:
        out.add(f"if (f >= {count}u) return;")
    decode(s, nest, order, "f", width)
    Points(s, nest, order[-1] if order else -1, width).run(nest.steps)
    function.checks |= s.checks
    return blocks(count, THREADS)


def is_pointwise(kernel: Kernel) -> bool:
    """Whether every point of a ``loops`` kernel is a matter of its own."""
    if kernel.body is None or kernel.body.axes:
        return False
    nest = build_nest(kernel)
    return not nest.serial or nest.empty or all(d in nest.private for d in nest.order)


def emit_bundle(kernel: Kernel, dialect: Dialect) -> Emission:
    """The function of a ``bundle`` of pointwise kernels: each has groups of its own."""
    function, first, inputs, outputs = Function(kernel, dialect), 0, 0, 0
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
        groups = _points_of(nest, function, part, s, f"(gid - {first})")
        function.lines.depth -= 1
        function.lines.text.insert(mark, f"  if (gid >= {first} && gid < {first + groups}) {{")
        function.lines.add("}")
        first += groups
    return function.finish(first, THREADS)


# -- scatters whose places come from data ---------------------------------------------------------------------------
def _serial(nest: Nest, function: Function) -> Emission:
    """Of several points that store to one place, the last one counts."""
    s = scalars_for(nest, function, nest.steps)
    own = [d for d in nest.order if d in nest.private]
    turns = [d for d in nest.order if d not in nest.private]
    written = {op.buffer.id for op in nest.outputs}
    reads = any(nest.inputs[x.value.operand].buffer.id in written for x, _ in accesses(nest) if x.value.operand >= 0)
    out = function.lines
    if not turns:
        return _pointwise(nest, function)
    if reads or len(nest.steps) > 1:  # accumulation: one thread takes all turns of a place
        count = nest.points(own)
        out.add(f"const uint f = (uint)gid * {THREADS}u + (uint)tid;", f"if (f >= {count}u) return;")
        decode(s, nest, own, "f")
        with s.scope(f"for (uint turn = 0; turn < {nest.points(turns)}u; turn++) {{"):
            decode(s, nest, turns, "turn")
            Points(s, nest, -1, 1).run(nest.steps)
        function.checks = s.checks
        return function.finish(blocks(count, THREADS), THREADS)
    (step,) = nest.steps
    assert step.target is not None
    count, threads = nest.points(own), min(THREADS, blocks(nest.points(own), SIMD) * SIMD)
    place = expr.substitute(step.target, {d: expr.const(0, "int64") for d in own})
    function.array("int", "hit", threads // SIMD)
    out.add("const uint turn = (uint)gid;", "int again = 0;")
    decode(s, nest, turns, "turn")
    out.add(f"const int64_t mine = {s.address(place)};")
    with s.scope(f"for (uint later = turn + 1u + (uint)tid; later < {nest.points(turns)}u; later += {threads}u) {{"):
        other = {d: max(nest.size) + 1 + d for d in turns}
        s.ranges = {**s.ranges, **{n: s.ranges[d] for d, n in other.items()}}
        unit = 1
        for d in reversed(turns):
            out.add(f"const int i{other[d]} = (int)(later / {unit}u % {nest.size[d]}u);")
            unit *= nest.size[d]
        elsewhere = expr.substitute(place, {d: expr.index(n) for d, n in other.items()})
        out.add(f"if ({s.address(elsewhere)} == mine) again = 1;")
    out.add(f"for (int m = {SIMD // 2}; m > 0; m >>= 1) again |= simd_xor(again, m);")
    out.add("if (lane == 0) hit[sid] = again;", "barrier();")
    out.add(f"for (int i = 0; i < {threads // SIMD}; i++) again |= hit[i];")
    out.add("if (again) return;  // a later one stores there")
    lane = own[-1] if own else -1
    width = vector_width(nest, function.kernel, [step], lane) if own else 1
    with s.scope(f"for (uint f = (uint)tid; f < {count // width}u; f += {threads}u) {{"):
        decode(s, nest, own, "f", width)
        Points(s, nest, lane, width).run([step])
    function.checks = s.checks
    return function.finish(nest.points(turns), threads)


# -- reductions -----------------------------------------------------------------------------------------------------
MOST_TURNS = 8  # of a thread in one row, for which its loop is unrolled
VECTOR_ROWS = 1 << 15  # vectors of rows, from which threads that take a vector each fill the machine
VECTOR_FOLD = 64  # the longest fold of which one thread takes all


class _Reduction:
    def __init__(self, nest: Nest, function: Function):
        self.nest, self.function, self.out = nest, function, function.lines
        self.row: Row = make_row(nest, 1, scratch=0)
        self.s = scalars_for(nest, function, self.row.steps)
        self.rows, self.count = nest.points(nest.rows), nest.points(nest.folds)

    def emit(self) -> Emission:
        across = self._across_dim()
        if across is not None and (width := self._width(across)) > 1:
            return self._vectors(across, width)
        return self._across(across) if across is not None or self.count <= SMALL_FOLD else self._along()

    def _across_dim(self) -> int | None:
        """A row dim along which the loads are contiguous, unless one of the reduced dims is."""
        inner = [affine.affine(x.args[0]) for x, per_row in accesses(self.nest) if not per_row and x.value.operand >= 0]
        scores = {d: sum(abs(f.coefficient(d)) == 1 for f in inner) for d in self.nest.order}
        best_fold = max((scores[d] * (self.nest.size[d] > 1) for d in self.nest.folds), default=0)
        rows = [d for d in self.nest.rows if scores[d] > best_fold and self.nest.size[d] >= 8]
        return max(rows, key=lambda d: scores[d]) if rows else None

    def _width(self, lane: int) -> int:
        """How many neighbours along ``lane`` a thread can take, where rows are enough to fill the machine so."""
        passes, kernel = self.row.passes, self.function.kernel
        if len(passes) != 1 or passes[0].stores or any(st.reduce.startswith("arg") for st in passes[0].folds):
            return 1
        width = vector_width(self.nest, kernel, [*passes[0].folds, *self.row.stores], lane)
        return width if self.rows // width >= VECTOR_ROWS and self.count <= VECTOR_FOLD else 1

    def _vectors(self, lane: int, width: int) -> Emission:
        """A thread folds ``width`` neighbouring rows, each into a variable of its own."""
        nest, out, s = self.nest, self.out, self.s
        order = [d for d in memory_order(nest, nest.rows) if d != lane] + [lane]
        count = self.rows // width
        out.add(f"const uint r = (uint)gid * {THREADS}u + (uint)tid;")
        if count % THREADS:
            out.add(f"if (r >= {count}u) return;")
        decode(s, nest, order, "r", width)
        (p,) = self.row.passes
        points = Points(s, nest, lane, width, apart=True)
        for st in p.folds:
            kind = kind_of(st.value.dtype)
            out.add(f"{kind} f{st.number}[{width}];", "#pragma unroll")
            out.add(f"for (int i = 0; i < {width}; i++) f{st.number}[i] = {accumulator(st.reduce, st.value.dtype)};")
        if self.count <= SMALL_FOLD:
            out.add("#pragma unroll")
        with s.scope(f"for (uint p = 0; p < {self.count}u; p++) {{"):
            decode(s, nest, nest.folds, "p")
            points.run(p.folds)
        for st in p.folds:
            name = f"f{st.number}[i{points.inner}]"
            s.bound[expr.stage(st.number, st.value.dtype)] = Value(name, kind_of(st.value.dtype))
        points.run(self.row.stores)
        self.function.checks = s.checks
        return self.function.finish(blocks(count, THREADS), THREADS)

    def _across(self, lane: int | None) -> Emission:
        """Neighbouring lanes take neighbouring rows; the simds of a group share the fold if rows are few."""
        nest, out, s = self.nest, self.out, self.s
        order = memory_order(nest, nest.rows)
        if lane is not None:
            order = [d for d in order if d != lane] + [lane]
        parts = 1
        while parts < 16 and self.rows * parts < 32 * THREADS * 4 and self.count // (2 * parts) >= 8:
            parts *= 2
        threads = 128 if parts == 1 else SIMD * parts
        per_group = threads // parts
        out.add(f"const uint r = (uint)gid * {per_group}u + (uint){'tid' if parts == 1 else 'lane'};")
        if parts == 1:
            if self.rows % per_group:
                out.add(f"if (r >= {self.rows}u) return;")
            row, active = "r", ""
        else:
            out.add(f"const uint row = r < {self.rows}u ? r : {self.rows - 1}u;")
            row, active = "row", f"r < {self.rows}u" if self.rows % per_group else ""
        decode(s, nest, order, row)
        points, fold = Points(s, nest, -1, 1), RowFold(s, self.function)
        for p in self.row.passes:
            fold.begin(p)
            with s.scope(f"for (uint p = {'0' if parts == 1 else '(uint)sid'}; p < {self.count}u; p += {parts}u) {{"):
                decode(s, nest, nest.folds, "p")
                points.run(p.folds, position=nest.position)
                self._guarded(points, p.stores, active)
            fold.meet_across(p, parts)
        conditions = ([f"sid == {0}"] if parts > 1 else []) + ([active] if active else [])
        self._guarded(points, self.row.stores, " && ".join(conditions))
        self.function.checks = s.checks
        return self.function.finish(blocks(self.rows, per_group), threads)

    def _along(self) -> Emission:
        """The lanes of a simd, or all threads of a group, share a row."""
        nest, out, s = self.nest, self.out, self.s
        folds = memory_order(nest, nest.folds, loads=True)
        steps = [st for p in self.row.passes for st in p.steps]
        width = vector_width(nest, self.function.kernel, steps, folds[-1])
        turns = self.count // width  # for all threads of a row together
        few = self.rows <= 64 if turns < 2 * SIMD else self.rows <= 1024
        team = SIMD if self.count <= SIMD_FOLD and (not few or self.count <= 256) else 256
        if turns >= 16384:
            team = 1024
        elif team > SIMD and turns % team and not turns % SIMD:
            team = next(n for n in range(team, 0, -SIMD) if not turns % n)
        per_group = 4 if team == SIMD else 1
        threads = team * per_group
        if team == SIMD:
            out.add(f"const uint r = (uint)gid * {per_group}u + (uint)sid;", "const int me = lane;")
            if self.rows % per_group:
                out.add(f"if (r >= {self.rows}u) return;")
        else:
            out.add("const uint r = (uint)gid;", "const int me = tid;")
        decode(s, nest, nest.rows, "r")
        points, fold = Points(s, nest, folds[-1], width), RowFold(s, self.function)
        for p in self.row.passes:
            fold.begin(p)
            loop = f"for (uint p = (uint)me; p < {turns}u; p += {team}u) {{"
            if turns % team == 0 and turns // team <= MOST_TURNS:  # so that loads of all turns are under way at once
                out.add("#pragma unroll")
                loop = f"for (uint turn = 0; turn < {turns // team}u; turn++) {{"
            with s.scope(loop):
                if "turn" in loop:
                    out.add(f"const uint p = (uint)me + turn * {team}u;")
                decode(s, nest, folds, "p", width)
                points.run(p.steps, position=nest.position)
            fold.meet_along(p, team)
        self._guarded(points, self.row.stores, "me == 0")
        self.function.checks = s.checks
        return self.function.finish(blocks(self.rows, per_group), threads)

    def _guarded(self, points: Points, stores: list[Step], condition: str) -> None:
        if not stores:
            return
        plain = Points(self.s, self.nest, -1, 1)
        if condition:
            with self.s.scope(f"if ({condition}) {{"):
                plain.run(stores)
        else:
            plain.run(stores)
