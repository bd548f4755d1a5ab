"""The points of a ``loops`` kernel's nest that a thread computes: one, or neighbours whose accesses are vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....graph import affine, expr
from ....graph.expr import Expr
from ....schedule.kernel import Kernel
from ....support import dtypes
from ...codegen.nest import Nest, Step, accesses, use_counts
from .function import Pointers, Scope
from .scalar import Scalars, before_storage, combine, kind_of, storage, stored

LINE = 128  # bytes of a memory transaction
MAX_KEPT = 64  # registers of vectors that stay in them between passes over a row
GATHERED = 8  # the most elements that a thread gathers for one vector store
# A copy gathers elements that are up to NEAR apart, whose lines neighbouring threads share, NEAR_BYTES a thread.
NEAR, NEAR_BYTES = 4, 8


def scalars_for(nest: Nest, function: Scope, steps: Sequence[Step], numbers: dict[int, int] | None = None) -> Scalars:
    """Return the renderer of ``steps``. ``numbers``: maps the nest's operands to those of the function, if they
    differ."""
    uses = use_counts([e for s in steps for e in s.exprs()])
    return Scalars(nest, Pointers(function, numbers), function.lines, uses)


def vector_width(
    nest: Nest, kernel: Kernel, steps: Sequence[Step], lane: int, registers: int = 2**31, max_width: int = 0
) -> int:
    """Return the number of neighbours along ``lane`` that every access can load or store as one vector, or 1.

    Vectors have up to 16 bytes, or up to ``max_width`` elements if given. Operands from number ``registers`` on are in
    registers. If the dim is short, or a copy's loads are near each other or at constant places, loads may also be
    gathered.
    """
    widest = max_width or 8
    found: set[Expr] = {x for s in steps for e in s.exprs() for x in expr.walk(e) if x.op == "load"}
    found = {x for x in found if x.value.operand < registers}
    for x in found:
        form = affine.affine(x.args[0])
        inside = [t for t in (*form.opaque(), *x.args[1:]) if any(y is expr.index(lane) for y in expr.walk(t))]
        c = form.coefficient(lane)
        if not inside and c not in (0, 1) and x.value.operand >= 0 and nest.size[lane] <= GATHERED:
            continue
        if not inside and 1 < c <= NEAR and len(found) == 2 and x.value.operand >= 0 and not x.value.guarded:
            widest = min(widest, NEAR_BYTES // dtypes.DTYPES[x.dtype].size)
            continue
        if inside and x.value.operand >= 0 and not x.value.guarded and _from_tables(kernel, inside):
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
            widest = min(widest, max_width or 16 // dtypes.DTYPES[x.dtype].size, step & -step)
    n = nest.size[lane]
    while n % widest:
        widest //= 2
    return max(widest, 1) if any(affine.affine(x.args[0]).coefficient(lane) for x in found) else 1


def _from_tables(kernel: Kernel, places: Sequence[Expr]) -> bool:
    """Whether the data in ``places`` are constants, like those of a resized image: neighbours are near each other."""
    loads = [y.value.operand for place in places for y in expr.walk(place) if y.op == "load"]
    return bool(loads) and all(n >= 0 and kernel.inputs[n].buffer.kind in ("const", "weight") for n in loads)


def store_width(nest: Nest, kernel: Kernel, lane: int) -> int:
    """Return the number of neighbours along ``lane`` that a thread computes, so that it stores up to 16 bytes.

    It may load longer vectors of wider types, except from inputs: arrays of the caller are only aligned to 16 bytes.
    """
    sizes = [dtypes.DTYPES[kernel.outputs[s.output].dtype].size for s in nest.steps if s.target is not None]
    max_width = min(8, 16 // max(sizes, default=2))
    read = [nest.inputs[x.value.operand] for x, _ in accesses(nest) if x.value.operand >= 0 and is_along(x, lane)]
    from_inputs = any(o.buffer.kind == "input" and dtypes.DTYPES[o.dtype].size * max_width > 16 for o in read)
    return vector_width(nest, kernel, nest.steps, lane, max_width=0 if from_inputs else max_width)


def condition_of(steps: Sequence[Step], x: Expr) -> tuple[Expr, bool] | None:
    """Return (condition, value of the condition) under which ``x`` is read, if it is in an arm of a single ``where``,
    else None."""
    around = {y for s in steps for e in s.exprs() for y in expr.walk(e) if any(a is x for a in expr.walk(y))}
    wheres = [y for y in around if y.op == "where"]
    if len(wheres) != 1:
        return None
    inside = [any(a is x for a in expr.walk(arm)) for arm in wheres[0].args]
    return None if inside not in ([False, True, False], [False, False, True]) else (wheres[0].args[0], inside[1])


def same_for(condition: Expr, lane: int) -> int:
    """Return the largest n for which ``condition`` is equal for n neighbours along ``lane``, from any multiple of n
    on."""
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
    """Renders the steps of a nest for ``width`` neighbouring points along ``lane``; variable ``i{lane}`` is the first.

    ``apart``: every neighbour has its own accumulator, ``f{number}[..]``; otherwise all of them share ``f{number}``.
    """

    def __init__(self, s: Scalars, nest: Nest, lane: int, width: int, apart: bool = False):
        self.s, self.nest, self.lane, self.width, self.apart = s, nest, lane, width, apart
        self.inner = max(nest.size, default=0) + 1  # a new dim: the position in the vector
        self._kept: dict[Expr, str] = {}  # loads whose vectors stay in registers: the array
        self._loaded: set[Expr] = set()  # those of them that an earlier pass has loaded
        s.ranges = {**s.ranges, self.inner: (0, width - 1)}

    @property
    def shift(self) -> dict[int, Expr]:
        """The substitution from the first point to the one at ``inner``."""
        return {self.lane: expr.index(self.lane) + expr.index(self.inner)} if self.width > 1 else {}

    def keep(self, passes: Sequence[Sequence[Step]], steps: int) -> None:
        """Keep the vectors that several passes over a row load in registers, as far as they fit. ``steps``: iterations
        of the loop over the row, whose variable is ``step``; it must be unrolled."""
        if self.width == 1:
            return
        read = [{x for st in p for x in expr.walk(st.value) if x.op == "load" and self._can_keep(x)} for p in passes]
        registers = 0
        for x in dict.fromkeys(x for p in passes for st in p for x in expr.walk(st.value)):
            if sum(x in loads for loads in read) < 2:
                continue
            each = self.width * dtypes.DTYPES[x.dtype].size * steps // 4
            if registers + each <= MAX_KEPT:
                registers += each
                self._kept[x] = name = self.s.name()
                self.s.out.add(f"{self._vector_type(x)} {name}[{steps}];")

    def _can_keep(self, x: Expr) -> bool:
        """Whether load ``x`` is a vector that no branch guards, of an operand that the kernel does not write."""
        along = affine.affine(x.args[0]).coefficient(self.lane) == 1 and x.value.operand >= 0
        written = {o.buffer.id for o in self.nest.outputs}
        return along and not x.value.guarded and self.nest.inputs[x.value.operand].buffer.id not in written

    def _vector_type(self, x: Expr) -> str:
        return f"Vec<{dtypes.DTYPES[x.dtype].ctype}, {self.width}>"

    def run(self, steps: Sequence[Step], position: Expr | None = None, sink: str = "", slot: str = "") -> None:
        """Emit ``steps``: stores, and reductions into the accumulators ``f{number}``.

        ``position``: the flat position over the reduced dims, for argmax. ``sink``: the name of an array of registers
        that receives the results instead of memory; those of output n > 0 go to the array ``{sink}n``. ``slot``:
        vectors and their offsets go into element ``slot`` of the arrays ``made{n}`` and ``place{n}`` of the n-th step
        instead.
        """
        if self.width == 1:
            self._run_one(steps, position, sink, slot)
            return
        s, bound = self.s, dict(self.s.bound)
        self._load_vectors(steps)
        stores = [] if sink else [(s.name(), st) for st in steps if st.target is not None]
        self._declare(stores)
        names = {id(st): name for name, st in stores}
        place = expr.substitute(position, self.shift) if position is not None else None
        s.out.add("#pragma unroll")
        with s.scope(f"for (int i{self.inner} = 0; i{self.inner} < {self.width}; i{self.inner}++) {{"):
            for st in steps:
                value = expr.substitute(st.value, self.shift)
                if st.target is None:
                    self._one(st, value, None, place)
                elif sink:
                    s.out.add(f"{sink}{st.output or ''}[i{self.inner}] = {s.register(value)};")
                else:
                    self._set_element(names[id(st)], st.target, value)
        self._store_vectors(stores, slot)
        s.bound = bound

    def _run_one(self, steps: Sequence[Step], position: Expr | None, sink: str, slot: str) -> None:
        """Emit ``steps`` for one point: see :meth:`run`."""
        s = self.s
        for n, step in enumerate(steps):
            if slot and step.target is not None:
                s.out.add(f"made{n}[{slot}].v[0] = {s.in_memory(step.value, step.target.dtype)};")
                s.out.add(f"place{n}[{slot}] = {s.address(step.target)};")
            elif sink and step.target is not None:
                s.out.add(f"{sink}{step.output or ''}[0] = {s.register(step.value)};")
            else:
                self._one(step, step.value, step.target, position)

    def _load_vectors(self, steps: Sequence[Step]) -> None:
        """Load the neighbours that ``steps`` read, and bind the loads to their elements."""
        s, shift = self.s, self.shift
        for x in {x: None for st in steps for x in expr.walk(st.value) if x.op == "load"}:
            known = x in s.bound or expr.substitute(x, shift) in s.bound
            if affine.affine(x.args[0]).coefficient(self.lane) == 1 and not known:
                s.bound[expr.substitute(x, shift)] = stored(f"{self._vector(steps, x)}.v[i{self.inner}]", x.dtype)

    def _declare(self, stores: Sequence[tuple[str, Step]]) -> None:
        """Declare the vectors of ``stores``: (name, step)."""
        for name, st in stores:
            assert st.target is not None
            self.s.out.add(f"Vec<{dtypes.DTYPES[st.target.dtype].ctype}, {self.width}> {name};")
            if self._packs(st.target):
                self.s.out.add(f"float {name}f[{self.width}];")

    def _set_element(self, name: str, target: Expr, value: Expr) -> None:
        """Set the element at ``inner`` of vector ``name``, which is stored to ``target``."""
        s = self.s
        value = before_storage(value) if value.dtype == target.dtype else value
        text = s.text(value, kind_of(target.dtype))
        if self._packs(target):
            s.out.add(f"{name}f[i{self.inner}] = {text};")
        else:
            s.out.add(f"{name}.v[i{self.inner}] = {storage(text, target.dtype)};")

    def _store_vectors(self, stores: Sequence[tuple[str, Step]], slot: str) -> None:
        """Store vectors to memory, or into ``slot``: see :meth:`run`."""
        s, width = self.s, self.width
        for n, (name, st) in enumerate(stores):
            assert st.target is not None
            if self._packs(st.target):
                s.out.add(f"{name} = e4m3_vector<{width}>({name}f);")
            if slot:
                s.out.add(f"made{n}[{slot}] = {name};", f"place{n}[{slot}] = {s.address(st.target)};")
                continue
            ctype = dtypes.DTYPES[st.target.dtype].ctype
            s.out.add(f"*(DEVICE Vec<{ctype}, {width}>*)({s.pointers[~st.output]} + {s.address(st.target)}) = {name};")

    def _packs(self, target: Expr) -> bool:
        """Whether elements of the target's type are converted in pairs."""
        return target.dtype == dtypes.FLOAT8 and self.width % 2 == 0

    def _vector(self, steps: Sequence[Step], x: Expr) -> str:
        """Return a variable with the neighbours that begin with load ``x``; zeros where it is not read."""
        s, vector = self.s, self._vector_type(x)
        pointer = s.pointers[x.value.operand]
        if x in self._kept:
            name = f"{self._kept[x]}[step]"
            if x not in self._loaded:
                self._loaded.add(x)
                s.out.add(f"{name} = *(DEVICE const {vector}*)({pointer} + {s.address(x)});")
            return name
        name = s.name()
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
    """Define the variables ``i{dim}`` of ``dims`` from the flat number ``flat``; the last dim varies fastest, in steps
    of ``width``."""
    divisor = 1
    for d in reversed(dims):
        n = nest.size[d] // (width if d == dims[-1] else 1)
        text = flat if divisor == 1 else f"{flat} / {divisor}u"
        outermost = d == dims[0]
        text = text if outermost else f"({text}) % {n}u" if divisor > 1 else f"{text} % {n}u"
        times = f" * {width}" if d == dims[-1] and width > 1 else ""
        s.out.add(f"const int i{d} = (int)({text}){times};")
        divisor *= n


def memory_order(nest: Nest, dims: Sequence[int], loads: bool = False) -> list[int]:
    """Return ``dims`` with those of small strides last: strides of the stores, or of the loads if ``loads``."""
    weight = {d: 0.0 for d in dims}
    for x, _ in accesses(nest):
        form = affine.affine(x.args[0])
        if (x.value.operand < 0) != loads:
            for d in dims:
                c = abs(form.coefficient(d))
                weight[d] = max(weight[d], c) if c else weight[d]
    return sorted(dims, key=lambda d: -weight[d])


def point_order(nest: Nest) -> list[int]:
    """Return the dims in the order in which threads compute the points, innermost last.

    Neighbouring threads store to neighbouring places. If these fill whole cache lines, the order of the lines follows
    the loads.
    """
    order = memory_order(nest, nest.order)
    run = order[-1:]
    stores = [x for x, _ in accesses(nest) if x.value.operand < 0]
    whole = [nest.size[d] * dtypes.DTYPES[x.dtype].size for x in stores for d in run if is_along(x, d)]
    if len(whole) < len(stores) or min(whole, default=0) < LINE:
        return order
    return [*memory_order(nest, order[:-1], loads=True), *run]


def is_along(x: Expr, d: int) -> bool:
    """Whether neighbours along dim ``d`` of access ``x`` are neighbours in memory."""
    return affine.affine(x.args[0]).coefficient(d) == 1
