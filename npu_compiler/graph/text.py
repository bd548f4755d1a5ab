"""A graph as text, a line for each node."""

from __future__ import annotations

from . import expr
from .graph import Graph, Node, Value


def graph_text(graph: Graph) -> str:
    """Return one line per node: its results, its op and inputs, and after ``#`` the IR nodes that it implements."""
    lines = [_line(n) for n in graph.nodes]
    lines += [f"output {name} = {_name(v)}" for name, v in graph.outputs]
    return "\n".join([*lines, *(f"state {key} = {_name(v)}" for key, v in graph.updates)])


def _name(v: Value) -> str:
    return f"%{v.node.id}{f'.{v.index}' if v.index else ''}"


def _line(node: Node) -> str:
    results = ", ".join(f"{_name(v)}: {v.dtype}{list(v.shape)}" for v in node.outputs)
    attrs = [
        f"{k}={list(v) if isinstance(v, tuple) else v}"
        for k, v in node.attrs.items()
        if k not in ("expr", "data", "shape")
    ]
    call = f"{node.op}({', '.join([*map(_name, node.inputs), *attrs])})"
    body = f"  {expr.render(node.attrs['expr'])}" if "expr" in node.attrs else ""
    return f"{results} = {call}{body}" + (f"  # {', '.join(node.sources)}" if node.sources else "")
