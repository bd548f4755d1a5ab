"""Load-time values: those that depend on weights and constants alone are computed once, when weights are loaded."""

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
        "quantize",
        "dequantize",
        "pack",
        "scan",
        "sort",
        "scatter",
    )
)


def static_values(graph: Graph) -> set[Value]:
    """Return the values of load-time subgraphs, ``expand`` excluded: repeated data costs memory and saves nothing."""
    static: set[Value] = set()
    for node in graph.nodes:
        if node.op in ("weight", "const") or (
            node.op in _LOAD_TIME and node.inputs and all(v in static for v in node.inputs)
        ):
            static.update(node.outputs)
    return static
