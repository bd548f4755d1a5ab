"""Destination passing: kernels write results where they are needed, so that no copy is made: to a graph output, to a
part of a concatenation, or in the dim order of the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..graph.graph import LEAVES, LOOPS, VIEWS, Graph, Node, Value
from ..graph.structure import looks_up
from ..passes.fuse import Group
from .kernel import Operand
from .strides import reshape_strides


@dataclass(frozen=True)
class Destination:
    """Where a value is needed: through the views ``path`` (reshape, permute) as the output named ``output``, or as the
    part of ``concat`` that has ``shape`` and begins at ``start`` along its axis."""

    path: tuple[Node, ...]
    output: str = ""
    concat: Node | None = None
    shape: tuple[int, ...] = ()
    start: int = 0


def destinations(graph: Graph, static: set[Value]) -> dict[Value, Destination]:
    """Return the destinations of values that a kernel computes: the first graph output that is a view of the value,
    else the first concatenation of which it is a part.

    The other readers of a part of a concatenation must be able to read it through strides.
    """
    users = graph.users()
    results = set(graph.results())
    found: dict[Value, Destination] = {}
    for name, v in graph.outputs:
        base, path = _base(v)
        if base.op not in LEAVES and base.op not in VIEWS and base not in static:
            found.setdefault(base, Destination(path, output=name))
    for node in graph.nodes:
        if node.op != "concat" or node.out in static:
            continue
        for v, start in parts(node):
            base, path = _base(v)
            if base.op in LEAVES or base.op in VIEWS or base in static or base in found or node.inputs.count(v) > 1:
                continue
            along = {base, *(n.out for n in path)}
            if not along & results and all(u in path or u is node or u.op in LOOPS for x in along for u in users[x]):
                found[base] = Destination(path, concat=node, shape=v.shape, start=start)
    return found


def _base(v: Value) -> tuple[Value, tuple[Node, ...]]:
    path: list[Node] = []
    while v.op in ("reshape", "permute"):
        path.append(v.node)
        v = v.node.inputs[0]
    return v, tuple(path[::-1])


def parts(concat: Node) -> Iterator[tuple[Value, int]]:
    """Yield the inputs of a concatenation, each with the position where it begins along the axis."""
    start = 0
    for v in concat.inputs:
        yield v, start
        start += v.shape[concat.attrs["axis"]]


def part_of(whole: Operand, concat: Node, shape: tuple[int, ...], start: int) -> Operand:
    """Return the window of a concatenation's memory for the input of ``shape`` that begins at ``start``."""
    strides = tuple(0 if n == 1 else s for n, s in zip(shape, whole.strides, strict=True))
    return Operand(whole.buffer, shape, strides, whole.offset + start * whole.strides[concat.attrs["axis"]])


def behind(window: Operand, path: tuple[Node, ...]) -> Operand | None:
    """Return the window that the views of ``path`` turn into ``window``; None if no strides express it."""
    for node in reversed(path):
        shape = node.inputs[0].shape
        if node.op == "permute":
            strides = [0] * len(shape)
            for p, s in zip(node.attrs["perm"], window.strides, strict=True):
                strides[p] = s
        else:
            found = reshape_strides(window.shape, window.strides, shape)
            if found is None:
                return None
            strides = list(found)
        steps = tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        window = replace(window, shape=shape, strides=steps)
    return window


def writable(value: Value, window: Operand, vectors: bool = False) -> bool:
    """Whether the kernel of ``value`` can write to ``window``: micro-kernels store whole vectors along the last dim.
    ``vectors``: so does an epilogue, because a transposing copy is faster than its elements one by one.

    A concatenation always can; its parts are checked one by one.
    """
    flexible = (value.op in LOOPS and not vectors) or value.op == "concat"
    return flexible or not value.rank or value.shape[-1] == 1 or window.strides[-1] == 1


def wanted_order(value: Value, users: list[Node], vectors: bool) -> tuple[int, ...]:
    """Return the dim order of a value in memory. If all readers read it through one permute, that order is used, so
    that the permute costs nothing. Micro-kernels keep the last dim, and so do epilogues with ``vectors``."""
    perms = {u.attrs["perm"] for u in users if u.op == "permute"}
    if len(perms) == 1 and all(u.op == "permute" for u in users):
        perm: tuple[int, ...] = perms.pop()
        if (value.op in LOOPS and not vectors) or perm[-1] == value.rank - 1:
            return perm
    return tuple(range(value.rank))


def shared_tables(graph: Graph, groups: Sequence[Group], static: set[Value], panel: int) -> dict[Value, Value]:
    """Return tables whose rows are looked up and whose transpose is the right operand of a product (a tied embedding),
    each with that operand in panels of ``panel`` columns. Only the packed operand has to be kept: a few rows can be
    read from it as well."""
    found: dict[Value, Value] = {}
    users = graph.users()
    for group in groups:
        matrix = group.anchor.inputs[1] if group.anchor.op == "matmul" and len(group.anchors) == 1 else None
        if matrix is None or matrix not in static or matrix.op != "permute" or matrix.rank != 2:
            continue
        table = matrix.node.inputs[0]
        readers = [n for n in users[table] if n is not matrix.node]
        whole_panels = table.shape[0] % panel == 0 and table.shape[1] % 2 == 0
        if readers and whole_panels and all(looks_up(n, table, static) for n in readers):
            found[table] = matrix
    return found
