"""Fusion: epilogues join their matmul or convolution, pointwise chains collapse, reductions over one row merge.

No rule names an op. Softmax, layer norm, RMS norm and their masked, scaled or residual variants all follow from three
rules: inline a producer that is cheap or used once, give each anchor its epilogue, merge loop nodes over one domain.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import LEAVES, LOOPS, VIEWS, Graph, Node, Value
from ..support import dtypes
from ..support.ordering import depth_first
from .absorb_views import dedupe
from .load_time import static_values

MAX_OPERANDS = 12
MAX_COST = 400
CHEAP = 4  # scalar operations that may be recomputed per use instead of stored
DECODING = 16  # scalar operations that look up an element of a table in blocks, at least

ANCHORS_WITH_EPILOGUE = frozenset(("matmul", "conv2d"))

Claims = dict[Node, list[Node]]  # from a node that is not a loop nest to the pointwise nodes that join its kernel


@dataclass(eq=False)
class Group:
    """Nodes that become one kernel: the anchor (or both matmuls of a dual GEMM), then its epilogue nodes in order."""

    nodes: list[Node] = field(default_factory=list)
    domain: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    first: int = 0  # positions in the graph
    last: int = 0

    @property
    def anchor(self) -> Node:
        """The first node: the matmul or convolution that the epilogue belongs to."""
        return self.nodes[0]

    @property
    def anchors(self) -> list[Node]:
        """The anchor; both matmuls of a dual GEMM."""
        return [n for n in self.nodes if n.op == self.anchor.op] if self.anchor.op == "matmul" else self.nodes[:1]

    @property
    def sources(self) -> tuple[str, ...]:
        """The IR nodes that the kernel implements."""
        return tuple(dict.fromkeys(s for n in self.nodes for s in n.sources))

    @property
    def loops(self) -> bool:
        """Whether the kernel is a generated loop nest."""
        return self.anchor.op in LOOPS


def inline_pointwise(graph: Graph, claimed: Claims) -> None:
    """Substitute pointwise producers into their pointwise and reduce consumers if they are used once or cheap.

    Producers that another kernel has claimed stay separate nodes.
    """
    keep = _claimed_nodes(claimed)
    static = static_values(graph)
    outputs = set(graph.results())
    users = graph.users()
    for node in graph.nodes:
        if node.op not in LOOPS or node.out in static:
            continue
        while (
            v := next((v for v in node.inputs if _can_inline(node, v, users, keep, static, outputs)), None)
        ) is not None:
            before = node.inputs
            _inline(node, v)
            for x in node.inputs:
                users[x].append(node)
            _forget(node, before, users, outputs)
    graph.clean()


def _forget(node: Node, inputs: Collection[Value], users: dict[Value, list[Node]], outputs: set[Value]) -> None:
    """Remove ``node`` as a user of ``inputs``, and then every producer that has no user left."""
    for v in inputs:
        users[v].remove(node)
        if not any(users.get(x) or x in outputs for x in v.node.outputs):
            _forget(v.node, v.node.inputs, users, outputs)


def _can_inline(
    node: Node,
    v: Value,
    users: dict[Value, list[Node]],
    keep: Collection[Node],
    static: set[Value],
    outputs: set[Value],
) -> bool:
    p = v.node
    if p.op != "pointwise" or p in keep or v in static or v in outputs:
        return False
    cost = expr.cost(p.attrs["expr"])
    if _decodes(p):
        cost += DECODING
    loads = sum(x.op == "load" and x.value == node.inputs.index(v) for x in expr.walk(node.attrs["expr"]))
    repeats = math.prod(node.domain) > v.numel or loads > 1
    many = len(set(users[v])) > 1
    if node in keep and (many or cost > CHEAP or not _has_epilogue_types(p.attrs["expr"])):
        return False
    if (repeats or many) and (cost > CHEAP or len(p.inputs) > 2):
        return False
    if many and any(u.op not in LOOPS for u in users[v]):
        return False  # another kernel reads it from memory anyway
    merged = {*node.inputs, *p.inputs} - {v}
    return len(merged) <= MAX_OPERANDS and expr.cost(node.attrs["expr"]) + cost <= MAX_COST


def _decodes(node: Node) -> bool:
    """Whether ``node`` looks up elements of a table in blocks, which it decodes."""
    return any(x.op == "dequantize" for x in node.inputs)


def _inline(node: Node, v: Value) -> None:
    p = v.node
    base = len(node.inputs)
    which = node.inputs.index(v)
    inner = expr.substitute(p.attrs["expr"], loads=lambda x: expr.load(base + x.value, x.dtype, x.args))

    def through(load: Expr) -> Expr | None:
        return expr.substitute(inner, dict(enumerate(load.args))) if load.value == which else None

    node.attrs["expr"] = expr.drop_roundings(expr.substitute(node.attrs["expr"], loads=through))
    node.inputs = [*node.inputs, *p.inputs]
    node.sources = tuple(dict.fromkeys((*p.sources, *node.sources)))
    dedupe(node)


def _claimed_nodes(claimed: Claims) -> set[Node]:
    return {n for chain in claimed.values() for n in chain}


def claim_epilogues(graph: Graph, claimed: Claims) -> None:
    """Replace ``claimed`` by every anchor with the pointwise nodes that can run on its accumulator before it is
    stored."""
    claimed.clear()
    users = graph.users()
    outputs = set(graph.results())
    static = static_values(graph)
    taken: set[Node] = set()
    for anchor in graph.nodes:
        if anchor.op not in ANCHORS_WITH_EPILOGUE or anchor.out in static:
            continue
        chain: list[Node] = []
        value = anchor.out
        while value not in outputs and len(set(users.get(value, ()))) == 1:
            node = users[value][0]
            if node in taken or not _is_epilogue(node, value):
                break
            chain.append(node)
            taken.add(node)
            value = node.out
        if chain and value not in outputs and _widens_bytes(chain[-1]) and _inlines(chain[-1], users[value]):
            taken.remove(chain.pop())
        claimed[anchor] = chain


def _widens_bytes(node: Node) -> bool:
    """Whether a node only converts 8-bit integers, for example dequantises them."""
    bytes_only = len(node.inputs) == 1 and node.inputs[0].dtype in ("int8", "uint8")
    return bytes_only and dtypes.DTYPES[node.out.dtype].size > 1


def _inlines(node: Node, readers: Collection[Node]) -> bool:
    """Whether loop nodes, which are all of its ``readers``, can compute ``node``: storing its input takes less memory
    than storing its result."""
    return expr.cost(node.attrs["expr"]) <= CHEAP and all(r.op in LOOPS for r in readers)


def _is_epilogue(node: Node, value: Value) -> bool:
    if node.op != "pointwise" or node.out.shape != value.shape or len(node.inputs) > MAX_OPERANDS:
        return False
    identity = expr.identity_index(value.shape)
    which = node.inputs.index(value)
    for x in expr.walk(node.attrs["expr"]):
        if x.op == "load":
            if x.value == which and x.args != identity:
                return False
            if any(y.op == "load" for a in x.args for y in expr.walk(a)):
                return False  # data-dependent reads belong in a loops kernel, which checks them
    return _has_epilogue_types(node.attrs["expr"])


def _has_epilogue_types(e: Expr) -> bool:
    """Whether all values that vary have the types of an epilogue. Positions are int64."""
    wide = (x for x in expr.walk(e) if x.dtype in ("float64", "int64"))
    return all(x.op in ("const", "index", "add", "mul", "sub") for x in wide)


def claim_sources(graph: Graph, claimed: Claims) -> None:
    """Add every scatter with the pointwise node that computes its source, if the scatter is the only reader. Sources
    that are combined with elements must be cheap, because a target may compute them twice."""
    taken = _claimed_nodes(claimed)
    users = graph.users()
    outputs = set(graph.results())
    static = static_values(graph)
    for node in graph.nodes:
        if node.op == "scatter" and node.out not in static:
            source = node.inputs[1]
            alone = len(users[source]) == 1 and source not in outputs and source not in static
            if alone and source.op == "pointwise" and source.node not in taken:
                cheap = expr.cost(source.node.attrs["expr"]) <= CHEAP
                if node.attrs["mode"] == "set" or cheap:
                    claimed[node] = [source.node]


def form_groups(graph: Graph, claimed: Claims) -> list[Group]:
    """Return a group for each node that runs, with the nodes that it has claimed, in graph order."""
    static, taken = static_values(graph), _claimed_nodes(claimed)
    position = _positions(graph)
    groups = []
    for node in graph.nodes:
        if node.op in LEAVES or node.op in VIEWS or node in taken or node.outputs[0] in static:
            continue
        group = Group([node, *claimed.get(node, [])])
        if group.loops:
            group.domain, group.axes = node.domain, node.attrs.get("axes", ())
        group.first, group.last = min(position[n] for n in group.nodes), max(position[n] for n in group.nodes)
        groups.append(group)
    return groups


def merge_loops(graph: Graph, groups: list[Group]) -> None:
    """Merge groups of loop nodes, which are removed from ``groups`` when they join another one.

    Loop nodes over one domain merge if the consumer reads the producer point by point (or row by row) and no path
    leaves the merged group and enters it again. Reductions of the same rows also merge if both read the same
    elements, which would otherwise be read twice.
    """
    left, group_of, position = dict.fromkeys(groups), _groups_by_node(groups), _positions(graph)
    for node in graph.nodes:
        if node not in group_of or not group_of[node].loops:
            continue
        for v in node.inputs:
            producer, consumer = group_of.get(v.node), group_of[node]
            if producer is None or producer is consumer or not producer.loops:
                continue
            if _compatible(producer, consumer) and not _path_around(producer, consumer, group_of, position):
                _merge(producer, consumer, group_of)
                del left[consumer]
    _merge_siblings(left, group_of, position)
    groups[:] = left


def _groups_by_node(groups: Collection[Group]) -> dict[Node, Group]:
    return {n: g for g in groups for n in g.nodes}


def _positions(graph: Graph) -> dict[Node, int]:
    return {n: i for i, n in enumerate(graph.nodes)}


def _row_shape(domain: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in axes else n for d, n in enumerate(domain))


def _compatible(a: Group, b: Group) -> bool:
    """Whether one kernel can compute ``a`` and then ``b``, which reads values of ``a``."""
    axes = a.axes or b.axes
    if a.axes and b.axes and a.axes != b.axes:
        return False
    if b.axes and any(_decodes(n) for n in a.nodes):
        return False  # each pass over a row would decode it again
    domain = a.domain if a.axes else b.domain if b.axes else a.domain
    row = _row_shape(domain, axes)
    if any(g.domain not in (domain, row) or (g.axes and g.domain != domain) for g in (a, b)):
        return False
    if sum(len(n.inputs) for n in (*a.nodes, *b.nodes)) > 2 * MAX_OPERANDS or _recomputes_rows(a, b):
        return False
    for other in b.nodes:  # every read of the producer's values must be point by point
        for i, x in enumerate(other.inputs):
            if x.node in a.nodes:
                want = expr.identity_index(x.shape)
                if any(y.op == "load" and y.value == i and y.args != want for y in expr.walk(other.attrs["expr"])):
                    return False
    return True


def _recomputes_rows(a: Group, b: Group) -> bool:
    """Whether merging would recompute rows: one group covers rows, the other the full domain, and neither reduces."""
    return not (a.axes or b.axes) and a.domain != b.domain


def _path_around(a: Group, b: Group, group_of: dict[Node, Group], position: dict[Node, int]) -> bool:
    """Whether some value leaves ``a``, passes through a third group, and enters ``b``."""
    seen: set[Node] = set()
    stack = [v.node for n in b.nodes for v in n.inputs if v.node not in a.nodes and v.node not in b.nodes]
    while stack:
        node = stack.pop()
        group = group_of.get(node)
        if group is a:
            return True
        if node in seen or (group.last if group is not None else position[node]) < a.first:
            continue  # everything it depends on precedes a
        members = group.nodes if group is not None else [node]
        seen.update(members)
        stack.extend(v.node for m in members for v in m.inputs)
    return False


def _merge(a: Group, b: Group, group_of: dict[Node, Group]) -> None:
    if not a.axes and b.axes:
        a.domain, a.axes = b.domain, b.axes
    a.nodes.extend(b.nodes)
    a.first, a.last = min(a.first, b.first), max(a.last, b.last)
    group_of.update(dict.fromkeys(b.nodes, a))


def _merge_siblings(groups: dict[Group, None], group_of: dict[Node, Group], position: dict[Node, int]) -> None:
    """Merge reductions of the same rows that read the same elements, and do not depend on each other."""
    readers: dict[tuple[Value, Expr, tuple[int, ...], tuple[int, ...]], list[Group]] = {}
    for g in groups:
        for v, load in _reduced_loads(g):
            readers.setdefault((v, load, g.domain, g.axes), []).append(g)
    for found in readers.values():
        for at, a in enumerate(found):
            for b in found[at + 1 :]:
                if a in groups and b in groups and _are_siblings(a, b, group_of, position):
                    _merge(a, b, group_of)
                    del groups[b]


def _reduced_loads(g: Group) -> set[tuple[Value, Expr]]:
    """Return what the reductions of a group read along their rows: values, and loads of operand 0 in their place."""
    found = set()
    for n in g.nodes:
        for x in expr.walk(n.attrs["expr"]) if n.op == "reduce" else ():
            if x.op == "load" and any(y.op == "index" and y.value in g.axes for y in expr.walk(x)):
                found.add((n.inputs[x.value], expr.load(0, x.dtype, x.args)))
    return found


def _are_siblings(a: Group, b: Group, group_of: dict[Node, Group], position: dict[Node, int]) -> bool:
    """Whether neither of two groups depends on the other, and one kernel can compute both."""
    direct = any(v.node in b.nodes for n in a.nodes for v in n.inputs)
    direct = direct or any(v.node in a.nodes for n in b.nodes for v in n.inputs)
    around = _path_around(a, b, group_of, position) or _path_around(b, a, group_of, position)
    return not direct and not around and _compatible(a, b) and _compatible(b, a)


def launch_order(graph: Graph, groups: Collection[Group]) -> list[Group]:
    """Return the groups depth first from the results, in graph order, which keeps lifetimes short."""
    group_of, position = _groups_by_node(groups), _positions(graph)
    for g in groups:
        anchors = len(g.anchors)
        g.nodes[anchors:] = sorted(g.nodes[anchors:], key=position.__getitem__) if not g.loops else g.nodes[anchors:]
        if g.loops:
            g.nodes.sort(key=position.__getitem__)

    def before(g: Group) -> list[Group]:
        return [p for n in g.nodes for v in n.inputs for p in _producers(v, group_of) if p is not g]

    return depth_first((group_of[n] for n in graph.nodes if n in group_of), before)


def _producers(v: Value, group_of: dict[Node, Group]) -> list[Group]:
    while v.op in VIEWS:
        v = v.node.inputs[0]
    group = group_of.get(v.node)
    return [group] if group is not None else []
