"""Weights of products are rounded to a block format in the graph, so that it states the numbers that are computed with.

``x @ w`` becomes ``x @ dequantize(quantize(w))``; both are load-time values. If the target has a reader for the blocks
(:mod:`npu_compiler.weights.format`), the program stores the blocks, else the decoded elements. So does a table whose
rows are looked up, if it has a format of its own or products read it, too.
"""

from __future__ import annotations

from ..graph.graph import Graph, Node, Value
from ..graph.structure import looks_up
from ..support.errors import CompileError
from ..weights.format import BlockFormat, WeightFormat, WeightFormats, layout_for
from .fold import unrounded
from .load_time import static_values


def quantize_weights(graph: Graph, formats: WeightFormats, panel: int) -> None:
    """Round the load-time right operands [K, N] of products to their block formats, if these can store them on a target
    with this ``panel``. Raises ``CompileError`` for one that its format cannot store if the format is ``required``."""
    _quantize_tables(graph, formats, panel)
    static = static_values(graph)
    quantized: dict[Value, Value] = {}
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op != "matmul" or node.inputs[1] not in static or node.inputs[1].rank != 2 or node.out in static:
            continue
        w = node.inputs[1]
        if dequantize_of(w) is not None:
            continue
        if w not in quantized:
            k, n = w.shape
            format = chosen_format(w, formats)
            if not isinstance(format, BlockFormat):
                continue
            if layout_for(format, panel, n, k, w.dtype) is not None:
                graph.sources = w.node.sources
                quantized[w] = _rounded(graph, w, format)
            elif format.required:
                what = f"a {w.dtype} matrix of {n} columns and {k} rows, the weight of {', '.join(node.sources)},"
                raise CompileError(f"{what} cannot be stored as {format.name}; compile with weights=None")
        if w in quantized:
            graph.sources = node.sources
            new[node.out] = graph.matmul(node.inputs[0], quantized[w])
    graph.sources = ()
    graph.replace(new)


def chosen_format(w: Value, formats: WeightFormats) -> WeightFormat | None:
    """Return the format of a matrix [K, N]: its weight's own one, or the default. Concatenated weights whose own
    formats differ are stored as elements, and so is a matrix that is computed from a weight with a format of its own:
    to round it would change the numbers that this weight has."""
    keys, exact = set(), True
    seen, stack = set(), [w]
    while stack:
        x = unrounded(stack.pop())
        if x in seen:
            continue
        seen.add(x)
        if x.op == "weight":
            keys.add(x.node.attrs["key"])
        exact = exact and x.op in ("weight", "permute", "concat")
        stack.extend(x.node.inputs)
    own = {formats.own.get(key) for key in keys}
    if own <= {None}:
        return formats.default
    return own.pop() if exact and len(own) == 1 else None


def weight_keys(w: Value) -> set[str]:
    """Return the keys of the weights that a load-time value is computed from."""
    keys, seen, stack = set(), set(), [w]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op == "weight":
            keys.add(x.node.attrs["key"])
        stack.extend(x.node.inputs)
    return keys


def one_row_weights(graph: Graph) -> frozenset[str]:
    """Return the keys of the weights that products of one row read as right operands."""
    static = static_values(graph)
    products = (n for n in graph.nodes if n.op == "matmul" and n.inputs[1] in static)
    return frozenset(key for n in products if n.out.numel == n.out.shape[-1] for key in weight_keys(n.inputs[1]))


def dequantize_of(w: Value) -> Node | None:
    """Return the ``dequantize`` node of a matrix [K, N], whose input is its blocks; None if it is not in blocks."""
    if w.op == "permute" and w.rank == 2 and w.node.inputs[0].op == "dequantize":
        return w.node.inputs[0].node
    return None


def _quantize_tables(graph: Graph, formats: WeightFormats, panel: int) -> None:
    """Round the weights [N, K] that are looked up row by row, if the program can read rows of their blocks: those with
    formats of their own, and those that products read as well (tied embeddings)."""
    static, users = static_values(graph), graph.users()
    outside = set(graph.results())
    for node in [n for n in graph.nodes if n.op == "weight" and n.out.rank == 2 and n.out not in outside]:
        table, readers = node.out, users.get(node.out, [])
        lookups = [n for n in readers if looks_up(n, table, static)]
        products = [n for n in readers if n.op == "permute" and all(u.op == "matmul" for u in users.get(n.out, []))]
        own = formats.own.get(node.attrs["key"])
        format = own or formats.default
        if not lookups or len(lookups) + len(products) < len(readers) or not isinstance(format, BlockFormat):
            continue
        n, k = table.shape
        layout = layout_for(format, panel, n, k, table.dtype)
        if (own is None and not products) or layout is None or not layout.looks_up(n, k):
            continue
        graph.sources = node.sources
        again = graph.add("weight", [], [(table.shape, table.dtype)], **node.attrs).out
        graph.replace({table: _rounded(graph, again.permute(1, 0), format).node.inputs[0]})
    graph.sources = ()


def _rounded(graph: Graph, w: Value, format: BlockFormat) -> Value:
    """Return the matrix [K, N] rounded to the format, in the same dtype."""
    k, n = w.shape
    blocks = _blocks(graph, w, format)
    elements = graph.add("dequantize", [blocks], [((n, k), w.dtype)], format=format.name, k=k, dtype=w.dtype).out
    return elements.permute(1, 0)


def _blocks(graph: Graph, w: Value, format: BlockFormat) -> Value:
    """Return a matrix [K, N] as blocks, uint8 [N, bytes of a row]. Concatenated matrices are quantized one by one,
    because a file may hold the blocks of each."""
    if w.op == "concat" and w.node.attrs["axis"] == 1:
        return graph.concat([_blocks(graph, part, format) for part in w.node.inputs], 0)
    rows = unrounded(w).permute(1, 0)
    n, k = rows.shape
    row_bytes = format.row_bytes(k)
    assert row_bytes is not None
    return graph.add("quantize", [rows], [((n, row_bytes), "uint8")], format=format.name).out
