"""Scatters with data-dependent places: ``loops`` kernels in which several *updates* may have the same place.

Updates that only store rows run in parallel, and the last one for a place wins; others are made in order.
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
MAX_COMPARED = 4096  # the most updates that are compared pairwise
AT_ONCE = 1 << 20  # places that all threads can read in the time of one update
MIN_UPDATES = 16  # of a share
SOUGHT = 16  # updates whose places are loaded together
MAX_SUBGROUPS = 8  # of an update, with one vector per lane; a workgroup makes a longer update


def is_elementwise(nest: Nest) -> bool:
    """Whether all iterations of a serial nest access different places."""
    return all(d in nest.parallel for d in nest.order)


def stores_rows(nest: Nest) -> bool:
    """Whether the updates of a scatter only store rows, so that the last update of a place determines the result."""
    written = {op.buffer.id for op in nest.outputs}
    reads = any(nest.inputs[x.value.operand].buffer.id in written for x, _ in accesses(nest) if x.value.operand >= 0)
    few = count_updates(nest) <= MAX_COMPARED
    return few and not reads and len(nest.steps) == 1 and nest.unindexed == nest.parallel


def accumulate(nest: Nest, function: Function) -> Emission:
    """Return the function of a scatter whose updates are made in order. A thread makes all updates of a place. If a
    column has many updates, several threads share it, each with its own places."""
    s = scalars_for(nest, function, nest.steps)
    own, updates = own_and_updates(nest)
    count, total, out = nest.points(own), nest.points(updates), function.lines
    # searching all updates takes time proportional to the number of shares, making the updates of one share the inverse
    shares = min(math.isqrt(AT_ONCE // count), total // MIN_UPDATES)
    if shares < 2 or not _one_place(nest):
        shares = 1
    out.let("uint", "all", f"(uint)workgroup * {THREADS}u + (uint)tid")
    out.let("uint", "f", f"all % {count}u")
    out.let("uint", "share", f"all / {count}u")
    out.return_if(f"share >= {shares}u")
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
    """Whether an update accesses a single place of its output."""
    written = {op.buffer.id for op in nest.outputs}
    target = nest.steps[0].target
    assert target is not None
    places = [x for x, _ in accesses(nest) if x.value.operand < 0 or nest.inputs[x.value.operand].buffer.id in written]
    return len(nest.steps) == 1 and all((x.args, x.value.checks) == (target.args, target.value.checks) for x in places)


def _unchecked(s: Scalars, target: Expr) -> str:
    """Return the place without a check of its indices."""
    place = target.args[0]
    for index, (_, step) in zip(target.args[1:], target.value.checks, strict=True):
        place = place + index * step
    return s.text(place, "int64_t")


def _address(s: Scalars, target: Expr) -> str:
    """Return the place, or the index from memory that alone determines it."""
    index = sole_index(target)
    return s.address(target) if index is None else s.text(index, "int64_t")


def sole_index(target: Expr) -> Expr | None:
    """Return the index from memory that alone determines a place, or None."""
    offset, *indices = target.args
    return indices[0] if offset.op == "const" and len(indices) == 1 and indices[0].op == "load" else None


def _places(
    nest: Nest, function: Function, place: Callable[[Scalars, Expr], str], zero: Collection[int],
    numbers: dict[int, int] | None = None,
) -> str:  # fmt: skip
    """Define the functor of ``scatter.h`` and return the expression that instantiates it: the place of each update, as
    ``place`` renders it, with dims ``zero`` at 0. Other dims of an update are variables of the function."""
    (step,) = nest.steps
    assert step.target is not None
    function.include("scatter.h")
    members = Members(function, f"@NAME@_places{len(function.before)}")
    s = scalars_for(nest, members, nest.steps, numbers)
    own, updates = own_and_updates(nest)
    target = expr.substitute(step.target, {d: expr.const(0, "int64") for d in zero})
    for d in own:
        if d not in zero:
            members.capture("int", f"i{d}")
    with members.lines.method("int64_t of(uint update) const"):
        decode(s, nest, updates, "update")
        members.lines.return_value(place(s, target))
    members.checks |= s.checks
    return members.finish()


def count_updates(nest: Nest) -> int:
    """Return how many updates of all elements follow each other."""
    return nest.points(own_and_updates(nest)[1])


def own_and_updates(nest: Nest) -> tuple[list[int], list[int]]:
    """Return (dims of an update's elements, dims along which updates follow each other)."""
    return [d for d in nest.order if d in nest.parallel], [d for d in nest.order if d not in nest.parallel]


def _width(nest: Nest, kernel: Kernel) -> int:
    own, _ = own_and_updates(nest)
    return store_width(nest, kernel, own[-1]) if own else 1


def update_threads(nest: Nest, kernel: Kernel) -> int:
    """Return the number of threads that make an update: those of a subgroup or of a workgroup."""
    vectors = nest.points(own_and_updates(nest)[0]) // _width(nest, kernel)
    return SUBGROUP if vectors <= MAX_SUBGROUPS * SUBGROUP else THREADS


def emit_updates(
    nest: Nest, function: Function, kernel: Kernel, s: Scalars, workgroup: str, numbers: dict[int, int] | None = None
) -> int:
    """Emit all updates of a scatter that :func:`stores_rows`, and return the number of workgroups.

    ``workgroup``: the C++ expression of a workgroup's number among them. An update that a later one overwrites is
    skipped. Places that are inputs are compared before the kernel waits for its predecessor. ``numbers``: maps the
    nest's operands to those of the function, if they differ.
    """
    (step,) = nest.steps
    assert step.target is not None
    own, updates = own_and_updates(nest)
    out, width, threads = function.lines, _width(nest, kernel), update_threads(nest, kernel)
    total = nest.points(updates)
    vectors = nest.points(own) // width
    place = expr.substitute(step.target, {d: expr.const(0, "int64") for d in own})
    loads = (x.value.operand for x in expr.walk(place) if x.op == "load")
    is_input = all(nest.inputs[n].buffer.is_input for n in loads if n >= 0)
    if not is_input:
        out.call("pdl_wait")
    parts, hit = 1, "nullptr"
    if threads == SUBGROUP:
        parts = blocks(vectors, SUBGROUP)
        out.let("uint", "worker", f"(uint){workgroup} * {THREADS // SUBGROUP}u + (uint)subgroup")
        out.let("uint", "update", f"worker / {parts}u")
        if total * parts % (THREADS // SUBGROUP):
            out.return_if(f"update >= {total}u")
    else:
        hit = function.array("int", "hit", THREADS // SUBGROUP)
        out.let("uint", "update", f"(uint){workgroup}")
    places = _places(nest, function, _address, own, numbers)
    out.declare("const auto", "places", places)
    out.let("int64_t", "mine", "places.of(update)")
    arguments = f"places, mine, update, {hit}, Thread{{workgroup, tid, lane, subgroup}}"
    out.let("bool", "overwritten", f"is_overwritten<{total}u, {threads}>({arguments})")
    if is_input:
        out.call("pdl_wait")
    out.return_if("overwritten")
    me = "(uint)tid" if threads > SUBGROUP else "(uint)lane"
    first = f"{me} + worker % {parts}u * {SUBGROUP}u" if parts > 1 else me
    decode(s, nest, updates, "update")
    index = sole_index(place)
    if index is not None:
        s.bound[index] = Value("mine", "int64_t")
    with s.scope(f"for (uint f = {first}; f < {vectors}u; f += {threads * parts}u) {{"):
        decode(s, nest, own, "f", width)
        Points(s, nest, own[-1] if own else -1, width).run([step])
    function.checks |= s.checks
    return total if threads > SUBGROUP else blocks(total * parts, THREADS // SUBGROUP)
