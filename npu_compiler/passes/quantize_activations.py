"""Rows of activations are rounded to 8-bit floats if the caller asks for it: ``compile(activations="fp8")``.

In front of a matrix in an fp8 format, ``x @ w`` becomes ``(q @ w) * s``. The scale s of a row is its largest magnitude
divided by 448, and q is the row divided by s and rounded to float8_e4m3fn, as llm-compressor and vLLM quantise
activations per token. Products of one row, whose time is that of reading the matrix, keep their activations.

A target that multiplies float8 operands (``TargetConfig.matrix_dtypes``) gets q as it is. For all others it is cast to
the dtype of x, which has every float8 number: their products are those of any other row.
"""

from __future__ import annotations

from ..graph.expr import fn, maximum
from ..graph.graph import Graph, Value
from ..support.dtypes import FLOAT8
from ..target_config import TargetConfig
from ..weights.format import block_format
from .load_time import static_values
from .quantize import dequantize_of

TOP = 448.0  # the largest number of float8_e4m3fn
SMALLEST = 2.0**-100  # largest magnitude of a row whose factor is finite
MIN_ROWS = 17  # of a product of float8 operands: tiles of the matrix unit have 64


def quantize_activations(graph: Graph, config: TargetConfig) -> None:
    """Quantise the left operands of products of several rows by matrices in fp8 formats."""
    static = static_values(graph)
    made: dict[Value, tuple[Value, Value]] = {}
    new: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op != "matmul" or node.inputs[0] in static or node.inputs[1].rank != 2:
            continue
        x, w = node.inputs
        blocks, rows = dequantize_of(w), x.numel // max(1, x.shape[-1])
        format = block_format(blocks.attrs["format"]) if blocks is not None else None
        if format is None or format.activations is None or rows < 2:
            continue
        graph.sources = node.sources
        if x not in made:
            made[x] = quantized_rows(x)
        q, scale = made[x]
        k, n = w.shape
        codes = format.code_dtype == FLOAT8 and FLOAT8 in config.matrix_dtypes
        tiles = codes and rows >= MIN_ROWS and n % 4 == k % 32 == 0
        sums = graph.matmul(q if tiles else q.cast(x.dtype), w)
        new[node.out] = graph.pointwise(lambda a, s: a * s, sums, scale, promote=False)
    graph.sources = ()
    graph.replace(new)


def quantized_rows(x: Value) -> tuple[Value, Value]:
    """Return the rows of ``x`` [..., K] as float8_e4m3fn, and their scales float32 [..., 1]."""
    top = x.graph.pointwise(maximum, x.graph.pointwise(fn("abs"), x).amax([x.rank - 1]), SMALLEST)
    q = x.graph.pointwise(lambda v, t: (v * (TOP / t)).cast(FLOAT8), x, top, promote=False)
    return q, top * (1 / TOP)
