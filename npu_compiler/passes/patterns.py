"""Pattern matching over the core graph, and rewrites as data.

A pattern is a function from a node to captured values or None, built from the helpers below. A :class:`Rewrite` pairs
it with a replacement, with example graphs that must match and counter-examples that must not. The legality rules are
here, once: inner values have no other user; casts between float types and views that only add size-1 dims are ignored;
commutative operands are tried in both orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from ..support import dtypes


@dataclass(frozen=True)
class Match:
    """A match: captured ``values``, scalar ``numbers``, and the ``inner`` nodes that the rewrite removes."""

    values: dict[str, Value | None]
    numbers: dict[str, float]
    inner: frozenset[Node]
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rewrite:
    """``find(graph, node)`` matches with ``node`` as the root; ``build(graph, node, match)`` returns the replacement of
    ``node.out``. Each of the ``examples`` must match, none of the ``counter_examples`` may."""

    name: str
    root: str
    find: Callable[[Graph, Node], Match | None]
    build: Callable[[Graph, Node, Match], Value]
    examples: Sequence[Callable[[], Graph]]
    counter_examples: Sequence[Callable[[], Graph]] = ()


def apply(graph: Graph, rewrites: Sequence[Rewrite]) -> int:
    """Apply each rewrite wherever it matches and is legal; returns the number of replacements."""
    fired = 0
    for rewrite in rewrites:
        outputs = set(graph.results())
        new: dict[Value, Value] = {}
        users = graph.users()
        gone: set[Node] = set()
        for node in list(graph.nodes):
            if node.op != rewrite.root or node in gone:
                continue
            match = rewrite.find(graph, node)
            if match is None or gone & match.inner or not _legal(match, node, users, outputs):
                continue
            graph.sources = tuple(
                dict.fromkeys(s for n in (*sorted(match.inner, key=lambda n: n.id), node) for s in n.sources)
            )
            new[node.out] = rewrite.build(graph, node, match)
            graph.sources = ()
            gone |= match.inner | {node}
            fired += 1
        graph.replace(new)
    return fired


def _legal(match: Match, root: Node, users: dict[Value, list[Node]], outputs: set[Value]) -> bool:
    """Whether every inner value is read inside the match only and is not a result of the graph."""
    members = match.inner | {root}
    return all(v not in outputs and all(u in members for u in users.get(v, ())) for n in match.inner for v in n.outputs)


# -- building blocks of patterns --------------------------------------------------------------------------------------
def see_through(v: Value, inner: set[Node]) -> Value:
    """Skip float casts and views that only add or drop size-1 dims; the skipped nodes become inner."""
    while True:
        node = v.node
        cast = node.op == "pointwise" and is_float_cast(node)
        if not cast and not (node.op in ("reshape", "expand") and _dims(node.inputs[0]) == _dims(v)):
            return v
        inner.add(node)
        v = node.inputs[0]


def _dims(v: Value) -> list[int]:
    """Return the shape without dims of size 1."""
    return [n for n in v.shape if n != 1]


def is_float_cast(node: Node) -> bool:
    """Whether ``node`` only casts its input from one float dtype to another. A cast to float8 quantises."""
    e = node.attrs["expr"]
    return (
        e.op == "cast" and _rounds(e.dtype) and e.args[0].op == "load" and dtypes.is_float(e.args[0].dtype)
        and e.args[0].args == expr.identity_index(node.out.shape)
    )  # fmt: skip


def _rounds(dtype: str) -> bool:
    """Whether a cast to ``dtype`` is at most a rounding of what kernels compute in float32."""
    return dtypes.is_float(dtype) and dtype != dtypes.FLOAT8


def strip(e: Expr) -> Expr:
    """Return an expression without its outer float casts."""
    while e.op == "cast" and _rounds(e.dtype) and dtypes.is_float(e.args[0].dtype):
        e = e.args[0]
    return e


def loaded(node: Node, e: Expr) -> Value | None:
    """Return the input if ``e`` is a load (under casts) that reads it element by element, broadcast as in numpy."""
    e = strip(e)
    if e.op != "load":
        return None
    v, domain = node.inputs[e.value], node.domain
    fits = v.rank <= len(domain) and all(n in (1, m) for n, m in zip(v.shape[::-1], domain[::-1], strict=False))
    return v if fits and e.args == expr.broadcast_index(v.shape, len(domain)) else None


def sides(e: Expr, op: str, commutative: bool = True) -> list[tuple[Expr, Expr]]:
    """Return the operand pairs of a binary expression; both orders if it is commutative."""
    e = strip(e)
    if e.op != op:
        return []
    a, b = e.args
    return [(a, b), (b, a)] if commutative else [(a, b)]


def number(node: Node, e: Expr) -> float | None:
    """Return the number if ``e`` is one, as a constant or as a constant tensor of one element, else None."""
    e = strip(e)
    if e.op == "const":
        return float(e.value)
    if e.op == "load" and node.inputs[e.value].op == "const" and node.inputs[e.value].numel == 1:
        return float(node.inputs[e.value].node.attrs["data"].reshape(()))
    return None


def only_in_loads(node: Node, leaf: Expr) -> bool:
    """Whether an index occurs only as the index of a load, never as an operand of arithmetic."""
    return all(x.op == "load" for x in expr.walk(node.attrs["expr"]) if leaf in x.args)
