"""Scatters whose places come from data: a ``loops`` kernel whose *updates* may go to the same place.

Updates that store whole rows run side by side, and the last one for a place counts; others are made in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.kernel import Kernel
from ...codegen.nest import Nest, accesses
from ..lang.dialect import SUBGROUP
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks
from ..lang.scalar import Scalars, Value
from ..lang.vectorize import Points, decode, scalars_for, store_width

THREADS = 256
MAX_COMPARED = 4096  # updates, each of which looks for later ones
AT_ONCE = 1 << 20  # updates that all threads look at while one of them makes an update
MIN_UPDATES = 16  # of a share
SOUGHT = 16  # updates whose places are read together
MAX_SUBGROUPS = 8  # of an update, a vector for each lane; longer updates take a workgroup each


def is_elementwise(nest: Nest) -> bool:
    """Whether no two iterations of a serial nest touch the same place."""
    return all(d in nest.parallel for d in nest.order)


def stores_rows(nest: Nest) -> bool:
    """Whether an update stores a whole row, and of those for one place the last one is all that counts."""
    written = {op.buffer.id for op in nest.outputs}
    reads = any(nest.inputs[x.value.operand].buffer.id in written for x, _ in accesses(nest) if x.value.operand >= 0)
    few = nest.points(_own_and_updates(nest)[1]) <= MAX_COMPARED
    return few and not reads and len(nest.steps) == 1 and nest.unindexed == nest.parallel


def accumulate(nest: Nest, function: Function) -> Emission:
    """The function of updates that are made in order. A thread makes all updates of a place; several threads share a
    column if its updates are many, each with places of its own."""
    s = scalars_for(nest, function, nest.steps)
    own, updates = _own_and_updates(nest)
    count, total, out = nest.points(own), nest.points(updates), function.lines
    # looking through all updates takes time in proportion to the shares, a share's own updates the other way round
    shares = min(math.isqrt(AT_ONCE // count), total // MIN_UPDATES)
    if shares < 2 or not _one_place(nest):
        shares = 1
    out.let("uint", "all", f"(uint)gid * {THREADS}u + (uint)tid")
    out.let("uint", "f", f"all % {count}u")
    out.let("uint", "share", f"all / {count}u")
    out.leave(f"share >= {shares}u")
    decode(s, nest, own, "f")
    if shares == 1:
        with s.scope(f"for (uint update = 0; update < {total}u; update++) {{"):
            decode(s, nest, updates, "update")
            Points(s, nest, -1, 1).run(nest.steps)
    else:
        places = _places(nest, function, _unchecked, nest.unindexed)
        with s.scope(f"for (uint first = 0; first < {total}u; first += {SOUGHT}u) {{"):
            out.declare("uint", "mine", f"updates_of_share<{total}u, {shares}u, {SOUGHT}u>({places}, first, share)")
            with s.scope("for (uint update = first; mine; update++, mine >>= 1) {"):
                out.add("// neighbouring threads make their next updates together")
                out.add("for (; !(mine & 1u); mine >>= 1) update++;")
                decode(s, nest, updates, "update")
                Points(s, nest, -1, 1).run(nest.steps)
    function.checks |= s.checks
    return function.finish(blocks(count * shares, THREADS), THREADS)


def _one_place(nest: Nest) -> bool:
    """Whether an update touches a single place of what it writes."""
    written = {op.buffer.id for op in nest.outputs}
    target = nest.steps[0].target
    assert target is not None
    places = [x for x, _ in accesses(nest) if x.value.operand < 0 or nest.inputs[x.value.operand].buffer.id in written]
    return len(nest.steps) == 1 and all((x.args, x.value.checks) == (target.args, target.value.checks) for x in places)


def _unchecked(s: Scalars, target: Expr) -> str:
    """The place without a check of its indices."""
    place = target.args[0]
    for index, (_, step) in zip(target.args[1:], target.value.checks, strict=True):
        place = place + index * step
    return s.text(place, "int64_t")


def _address(s: Scalars, target: Expr) -> str:
    """The place; if one index from memory alone decides it, that index."""
    index = _sole_index(target)
    return s.address(target) if index is None else s.text(index, "int64_t")


def _sole_index(target: Expr) -> Expr | None:
    """The index from memory that alone decides a place, if there is one."""
    offset, *indices = target.args
    return indices[0] if offset.op == "const" and len(indices) == 1 and indices[0].op == "load" else None


def _places(
    nest: Nest, function: Function, place: Callable[[Scalars, Expr], str], zero: Collection[int],
    numbers: dict[int, int] | None = None,
) -> str:  # fmt: skip
    """The functor of ``scatter.h``: where each update goes, as ``place`` renders it, with dims ``zero`` at 0. The
    function has variables of its own dims otherwise."""
    (step,) = nest.steps
    assert step.target is not None
    function.include("scatter.h")
    members = Members(function, f"@NAME@_places{len(function.before)}")
    s = scalars_for(nest, members, nest.steps, numbers)
    own, updates = _own_and_updates(nest)
    target = expr.substitute(step.target, {d: expr.const(0, "int64") for d in zero})
    for d in own:
        if d not in zero:
            members.capture("int", f"i{d}")
    with members.lines.method("int64_t of(uint update) const"):
        decode(s, nest, updates, "update")
        members.lines.result(place(s, target))
    members.checks |= s.checks
    return members.finish()


def _own_and_updates(nest: Nest) -> tuple[list[int], list[int]]:
    """The dims of an update's own elements, and those along which updates follow each other."""
    return [d for d in nest.order if d in nest.parallel], [d for d in nest.order if d not in nest.parallel]


def _width(nest: Nest, kernel: Kernel) -> int:
    own, _ = _own_and_updates(nest)
    return store_width(nest, kernel, own[-1]) if own else 1


def update_threads(nest: Nest, kernel: Kernel) -> int:
    """Threads that store an update: a subgroup or a workgroup."""
    vectors = nest.points(_own_and_updates(nest)[0]) // _width(nest, kernel)
    return SUBGROUP if vectors <= MAX_SUBGROUPS * SUBGROUP else THREADS


def emit_updates(
    nest: Nest, function: Function, kernel: Kernel, s: Scalars, group: str, numbers: dict[int, int] | None = None
) -> int:
    """Every update of a scatter that :func:`stores_rows`, by as many workgroups as are returned; ``group`` counts them.
    An update that a later one overwrites is not stored. Places that the caller gives do not wait for the kernel before.
    ``numbers``: the function's operand for each of the nest's, if they differ."""
    (step,) = nest.steps
    assert step.target is not None
    own, updates = _own_and_updates(nest)
    out, width, threads = function.lines, _width(nest, kernel), update_threads(nest, kernel)
    total = nest.points(updates)
    vectors = nest.points(own) // width
    place = expr.substitute(step.target, {d: expr.const(0, "int64") for d in own})
    loads = (x.value.operand for x in expr.walk(place) if x.op == "load")
    given = all(nest.inputs[n].buffer.is_input for n in loads if n >= 0)
    if not given:
        out.call("pdl_wait")
    parts, hit = 1, "nullptr"
    if threads == SUBGROUP:
        parts = blocks(vectors, SUBGROUP)
        out.let("uint", "worker", f"(uint){group} * {THREADS // SUBGROUP}u + (uint)sid")
        out.let("uint", "update", f"worker / {parts}u")
        if total * parts % (THREADS // SUBGROUP):
            out.leave(f"update >= {total}u")
    else:
        hit = function.array("int", "hit", THREADS // SUBGROUP)
        out.let("uint", "update", f"(uint){group}")
    places = _places(nest, function, _address, own, numbers)
    out.declare("const auto", "places", places)
    out.let("int64_t", "mine", "places.of(update)")
    arguments = f"places, mine, update, {hit}, Thread{{gid, tid, lane, sid}}"
    out.let("bool", "overwritten", f"is_overwritten<{total}u, {threads}>({arguments})")
    if given:
        out.call("pdl_wait")
    out.leave("overwritten")
    me = "(uint)tid" if threads > SUBGROUP else "(uint)lane"
    first = f"{me} + worker % {parts}u * {SUBGROUP}u" if parts > 1 else me
    decode(s, nest, updates, "update")
    index = _sole_index(place)
    if index is not None:
        s.bound[index] = Value("mine", "int64_t")
    with s.scope(f"for (uint f = {first}; f < {vectors}u; f += {threads * parts}u) {{"):
        decode(s, nest, own, "f", width)
        Points(s, nest, own[-1] if own else -1, width).run([step])
    function.checks |= s.checks
    return total if threads > SUBGROUP else blocks(total * parts, THREADS // SUBGROUP)
