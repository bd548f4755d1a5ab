"""What depends on weights and constants alone: computed once when weights are loaded, never at run time."""

from __future__ import annotations

from ..graph.graph import Graph, Value

_LOAD_TIME = frozenset(
    (
        "pointwise",
        "reduce",
        "reshape",
        "permute",
        "slice",
        "concat",
        "matmul",
        "conv2d",
        "pack",
        "scan",
        "sort",
        "scatter",
    )
)


def static_values(graph: Graph) -> set[Value]:
    """Values of load-time subgraphs. ``expand`` is excluded: repeating data costs memory and saves nothing."""
    static: set[Value] = set()
    for node in graph.nodes:
        if node.op in ("weight", "const") or (
            node.op in _LOAD_TIME and node.inputs and all(v in static for v in node.inputs)
        ):
            static.update(node.outputs)
    return static
