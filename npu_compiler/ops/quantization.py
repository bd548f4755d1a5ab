"""Ops of quantised models: ``quantized_decomposed.*``, of which PT2E's graphs consist, and the integer product of
torchao's tensors.

``affine_quantization.py`` says what they compute.
"""

from __future__ import annotations

import math

from ..graph.expr import Expr, fn, maximum, minimum, where
from ..graph.graph import Value
from ..support import dtypes as dt
from .affine_quantization import along, clamped, dequantized, inverse, one, quantized, quantized_with_offset, rounded
from .registry import lowers
from .samples import S, T, t

FLOATS = ("float32", "bfloat16")
IMAGE, MATRIX = t(2, 3, 4), t(3, 8, layout="transposed")
UNSIGNED, SIGNED = t(2, 3, 4, dtype="uint8", high=256), t(3, 8, dtype="int8", low=-128, high=128)
STORED = {"uint8": UNSIGNED, "int8": SIGNED}
RANGES = ((0.02, 3, 0, 255, "uint8"), (0.013, -7, -128, 127, "int8"), (0.05, 0, -7, 7, "int8"))


def numbers(scale: float, zero_point: int, *bounds: int | T) -> tuple[object, ...]:
    """Return sample arguments for the overloads that take scale, zero point (and the range) as tensors."""
    return t(1, dtype="float64", values=(scale,)), t(1, dtype="int64", values=(zero_point,)), *bounds


def whole(n: int) -> T:
    """Return a sample argument: a whole number as a tensor."""
    return t(1, dtype="int64", values=(n,))


def per_row(zero: float = 5) -> tuple[T, T]:
    """Return sample arguments: three scales, and three zero points of up to ``zero`` in magnitude."""
    return t(3, dtype="float32", low=0.01, high=0.03), t(3, dtype="int64", low=-zero, high=zero)


# -- one scale for a tensor -------------------------------------------------------------------------------------------
@lowers(
    "quantized_decomposed.quantize_per_tensor.default",
    samples=(*(S(IMAGE, *r) for r in RANGES), S(MATRIX, 1e-4, 9, -32768, 32767, "int16")),
    dtypes=FLOATS,
)
def quantize_per_tensor(
    input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: str
) -> Value:
    """clamp(round(input / scale) + zero_point), with numbers for the whole tensor."""
    return quantized(input, 1.0 / scale, zero_point, quant_min, quant_max, dtype)


@lowers(
    "quantized_decomposed.quantize_per_tensor.tensor",
    samples=[S(MATRIX, *numbers(*r[:2]), *r[2:]) for r in RANGES],
    dtypes=FLOATS,
)
def quantize_per_tensor_tensor(
    input: Value, scale: Value, zero_point: Value, quant_min: int, quant_max: int, dtype: str
) -> Value:
    """clamp(round(input / scale) + zero_point), with tensors of one element."""
    return quantized(input, inverse(one(scale)), one(zero_point), quant_min, quant_max, dtype)


@lowers(
    "quantized_decomposed.dequantize_per_tensor.default",
    samples=(*(S(STORED[r[4]], *r) for r in RANGES), S(UNSIGNED, *RANGES[0], out_dtype="bfloat16")),
    dtypes=("float32",),
)
def dequantize_per_tensor(
    input: Value,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: str,
    *,
    out_dtype: str | None = None,
) -> Value:
    """(input - zero_point) * scale, with numbers for the whole tensor."""
    return dequantized(input, scale, zero_point, out_dtype)


@lowers(
    "quantized_decomposed.dequantize_per_tensor.tensor",
    samples=[S(STORED[r[4]], *numbers(*r[:2]), *r[2:]) for r in RANGES],
    dtypes=("float32",),
)
def dequantize_per_tensor_tensor(
    input: Value,
    scale: Value,
    zero_point: Value,
    quant_min: int,
    quant_max: int,
    dtype: str,
    *,
    out_dtype: str | None = None,
) -> Value:
    """(input - zero_point) * scale, with tensors of one element."""
    return dequantized(input, one(scale), one(zero_point), out_dtype)


@lowers(
    "quantized_decomposed.dequantize_per_tensor.tensor2",
    samples=[S(STORED[r[4]], *numbers(*r[:2], whole(r[2]), whole(r[3])), r[4]) for r in RANGES],
    dtypes=("float32",),
)
def dequantize_per_tensor_tensor2(
    input: Value,
    scale: Value,
    zero_point: Value,
    quant_min: Value,
    quant_max: Value,
    dtype: str,
    *,
    out_dtype: str | None = None,
) -> Value:
    """(input - zero_point) * scale, with tensors of one element; the range does not matter."""
    return dequantized(input, one(scale), one(zero_point), out_dtype)


@lowers(
    "quantized_decomposed.choose_qparams.tensor",
    samples=[S(x, 0, 255, 1e-4, "uint8") for x in (IMAGE, MATRIX, t(5, low=1))] + [S(IMAGE, -128, 127, 9.0, "int8")],
    dtypes=("float32",),
)
def choose_qparams(input: Value, quant_min: int, quant_max: int, eps: float, dtype: str) -> tuple[Value, Value]:
    """Scale float64 [1] and zero point int64 [1] for the range of the values, which includes zero."""
    low, high = extremes(input, range(input.rank))
    g = input.graph
    scale = g.pointwise(maximum, (high - low).cast(low.dtype) / float(quant_max - quant_min), eps)
    zero = clamped(quant_min - rounded((low / scale).cast(low.dtype)), quant_min, quant_max, "int32")
    return scale.cast("float64").reshape(1), zero.cast("int64").reshape(1)


@lowers(
    "quantized_decomposed.choose_qparams_symmetric.tensor",
    samples=[S(x, -128, 127, 1e-4, "int8") for x in (IMAGE, MATRIX)] + [S(t(5, high=-1), 0, 255, 9.0, "uint8")],
    dtypes=("float32",),
)
def choose_qparams_symmetric(
    input: Value, quant_min: int, quant_max: int, eps: float, dtype: str
) -> tuple[Value, Value]:
    """Scale float64 [1] for the largest magnitude, and the zero point int64 [1]: 0, or 128 for uint8."""
    low, high = extremes(input, range(input.rank))
    g = input.graph
    largest = g.pointwise(maximum, -low, high)
    scale = g.pointwise(maximum, largest / (float(quant_max - quant_min) / 2), eps)
    zero = 128 if dt.parse(dtype) == "uint8" else 0
    return scale.cast("float64").reshape(1), g.const([zero], "int64")


def extremes(x: Value, axes: range) -> tuple[Value, Value]:
    """Return the smallest and the largest value over ``axes``, and zero if it is smaller or larger."""
    if not x.numel:
        raise ValueError("the range of no values")
    g = x.graph
    low = g.pointwise(minimum, x.amin(axes), 0).cast(x.dtype)
    return low, g.pointwise(maximum, x.amax(axes), 0).cast(x.dtype)


# -- one scale for each channel ---------------------------------------------------------------------------------------
@lowers(
    "quantized_decomposed.quantize_per_channel.default",
    samples=(
        S(MATRIX, *per_row(), 0, -128, 127, "int8"),
        S(IMAGE, *per_row(), 1, 0, 255, "uint8"),
        S(t(4, 3), *per_row(), -1, -7, 7, "int8"),
    ),
    dtypes=("float32",),
)
def quantize_per_channel(
    input: Value, scales: Value, zero_points: Value, axis: int, quant_min: int, quant_max: int, dtype: str
) -> Value:
    """clamp(round(input / scale) + zero_point), with one scale and zero point for each index of ``axis``."""
    scale, zero = along(scales, axis, input.rank), along(zero_points, axis, input.rank)
    return quantized(input, inverse(scale), zero, quant_min, quant_max, dtype)


@lowers(
    "quantized_decomposed.dequantize_per_channel.default",
    samples=(
        S(SIGNED, *per_row(), 0, -128, 127, "int8"),
        S(UNSIGNED, *per_row(), 1, 0, 255, "uint8"),
        S(SIGNED, per_row()[0], None, 0, -128, 127, "int8", out_dtype="bfloat16"),
    ),
    dtypes=("float32",),
)
def dequantize_per_channel(
    input: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: str,
    *,
    out_dtype: str | None = None,
) -> Value:
    """(input - zero_point) * scale, with one scale and zero point for each index of ``axis``."""
    scale = along(scales, axis, input.rank)
    zero = 0 if zero_points is None else along(zero_points, axis, input.rank)
    return dequantized(input, scale, zero, "float32").cast(dt.parse(out_dtype or "float32"))


@lowers(
    "quantized_decomposed.fake_quant_per_channel.default",
    samples=(S(MATRIX, *per_row(), 0, -128, 127), S(IMAGE, *per_row(), 1, 0, 255), S(t(4, 3), *per_row(), 1, -7, 7)),
    dtypes=("float32",),
)
def fake_quant_per_channel(
    input: Value, scales: Value, zero_points: Value, axis: int, quant_min: int, quant_max: int
) -> Value:
    """The values after quantisation and dequantisation, with one scale for each index of ``axis``."""
    scale, zero = along(scales, axis, input.rank), along(zero_points, axis, input.rank)
    q = quantized(input, inverse(scale), zero, quant_min, quant_max, "int32")
    return dequantized(q, scale, zero, None)


# -- one scale for each row or group ----------------------------------------------------------------------------------
TOKENS = t(3, 1, dtype="float32", low=0.01, high=0.03), t(3, 1, dtype="float32", low=0, high=1)
WIDE_TOKENS = t(3, 1, dtype="float64", low=0.01, high=0.03), t(3, 1, dtype="int64", low=-9, high=9)


@lowers("quantized_decomposed.choose_qparams_per_token.default", samples=[S(x, "int8") for x in (IMAGE, MATRIX, t(5))])
def choose_qparams_per_token(input: Value, dtype: str) -> tuple[Value, Value]:
    """Scale for the largest magnitude of each row, and zero points of 0; for int8."""
    if dt.parse(dtype) != "int8":
        raise ValueError(f"rows are quantised to int8, not to {dtype}")
    largest = input.graph.pointwise(fn("abs"), input).amax([input.rank - 1])
    kept = "float32" if input.dtype == "float16" else input.dtype
    scale = (input.graph.pointwise(maximum, largest, 1e-5).cast(kept) / 127.0).cast(kept)
    return scale, scale.graph.pointwise(lambda s: s * 0.0, scale).cast(kept)


@lowers(
    "quantized_decomposed.choose_qparams_per_token_asymmetric.default",
    "quantized_decomposed._choose_qparams_per_token_asymmetric_impl.default",
    samples=[S(x, "int8") for x in (IMAGE, MATRIX, t(4, 5, low=1))],
    dtypes=("float32",),
)
def choose_qparams_per_token_asymmetric(input: Value, dtype: str) -> tuple[Value, Value]:
    """Scale float64 and zero point int64 for the range of each row, which includes zero; for int8."""
    g, kept = input.graph, input.dtype
    low, high = extremes(input, range(input.rank - 1, input.rank))
    width = ((high - low).cast(kept) / 255.0).cast(kept)
    scale = g.pointwise(maximum, width, 2.0**-23).cast(kept)
    below, above = (low / scale).cast(kept), (high / scale).cast(kept)

    def nearest(a: Expr, b: Expr) -> Expr:
        return where((a - 128) + (b + 127) > 0, -128 - a, 127 - b)

    zero = rounded(g.pointwise(lambda v: minimum(maximum(v, -128), 127), g.pointwise(nearest, below, above)))
    return scale.cast("float64"), zero.cast("int64")


def per_group(x: Value, v: Value) -> Value:
    """Return scales or zero points, one for each row of ``x``, with a dim of size 1 at the end. Raises
    ``ValueError``."""
    rows = math.prod(x.shape[:-1])
    if v.numel != rows:
        raise ValueError(f"{v.numel} scales or zero points for {rows} rows")
    return v.reshape(*x.shape[:-1], 1)


@lowers(
    "quantized_decomposed.quantize_per_token.default",
    samples=(
        S(MATRIX, *TOKENS, -128, 127, "int8"),
        S(MATRIX, *WIDE_TOKENS, -128, 127, "int8"),
        S(t(3, 5), *TOKENS, 0, 255, "uint8"),
    ),
    dtypes=("float32",),
)
def quantize_per_token(
    input: Value, scales: Value, zero_points: Value, quant_min: int, quant_max: int, dtype: str
) -> Value:
    """clamp(round(input / scale + zero_point)), with one scale and zero point for each row."""
    scale, zero = per_group(input, scales), per_group(input, zero_points)
    return quantized_with_offset(input, scale, zero, quant_min, quant_max, dtype)


@lowers(
    "quantized_decomposed.dequantize_per_token.default",
    samples=(
        S(SIGNED, *TOKENS, -128, 127, "int8", "float32"),
        S(SIGNED, *WIDE_TOKENS, -128, 127, "int8", "float32"),
        S(SIGNED, *WIDE_TOKENS, -128, 127, "int8", "bfloat16"),
    ),
    dtypes=("float32",),
)
def dequantize_per_token(
    input: Value,
    scales: Value,
    zero_points: Value,
    quant_min: int,
    quant_max: int,
    dtype: str,
    output_dtype: str,
) -> Value:
    """(input - zero_point) * scale, with one scale and zero point for each row."""
    scale, zero = per_group(input, scales), per_group(input, zero_points)
    return ((input - zero) * scale).cast(dt.parse(output_dtype))


GROUPS = t(3, 2, dtype="float32", low=0.01, high=0.03), t(3, 2, dtype="int32", low=-3, high=3)


def grouped(x: Value, scales: Value, group_size: int) -> Value:
    """Return a matrix as one row for each group. Raises ``ValueError``."""
    if x.rank != 2 or group_size <= 1:
        raise ValueError(f"groups of {group_size} elements of a tensor of {x.rank} dims")
    size = x.shape[1] if group_size > x.shape[1] and scales.shape[-1] == 1 else group_size
    if x.shape[1] % size:
        raise ValueError(f"rows of {x.shape[1]} elements do not consist of groups of {size}")
    return x.reshape(-1, size)


@lowers(
    "quantized_decomposed.quantize_per_channel_group.default",
    samples=(
        S(MATRIX, *GROUPS, -8, 7, "int8", 4),
        S(t(3, 8), *GROUPS, 0, 15, "uint8", 4),
        S(t(6, 4), GROUPS[0], GROUPS[1], -8, 7, "int8", 4),
    ),
    dtypes=("float32",),
)
def quantize_per_channel_group(
    input: Value, scales: Value, zero_points: Value, quant_min: int, quant_max: int, dtype: str, group_size: int = 128
) -> Value:
    """clamp(round(input / scale + zero_point)), with one scale and zero point for each group of a row."""
    x = grouped(input, scales, group_size)
    scale, zero = per_group(x, scales), per_group(x, zero_points)
    return quantized_with_offset(x, scale, zero, quant_min, quant_max, dtype).reshape(*input.shape)


@lowers(
    "quantized_decomposed.dequantize_per_channel_group.default",
    samples=(
        S(SIGNED, *GROUPS, -8, 7, "int8", 4, "float32"),
        S(SIGNED, GROUPS[0], None, -8, 7, "int8", 4, "float32"),
        S(SIGNED, *GROUPS, -8, 7, "int8", 4, "bfloat16"),
    ),
    dtypes=("float32",),
)
def dequantize_per_channel_group(
    input: Value,
    scales: Value,
    zero_points: Value | None,
    quant_min: int,
    quant_max: int,
    dtype: str,
    group_size: int = 128,
    output_dtype: str = "float32",
) -> Value:
    """(input - zero_point) * scale, with one scale and zero point for each group of a row."""
    q = grouped(input, scales, group_size)
    zero = 0 if zero_points is None else per_group(q, zero_points)
    y = dequantized(q, per_group(q, scales), zero, None)
    return y.cast(dt.parse(output_dtype)).reshape(*input.shape)


# -- other ------------------------------------------------------------------------------------------------------------
@lowers(
    "quantized_decomposed.convert_element_type.no_fuse",
    samples=[S(t(2, 3), d) for d in ("float32", "bfloat16", "int8")],
    dtypes=("float32",),
)
def convert_element_type(input: Value, dtype: str) -> Value:
    """Another dtype."""
    return input.cast(dt.parse(dtype))


@lowers(
    "aten._int_mm.default",
    samples=(
        S(t(17, 8, dtype="int8", low=-128, high=128), t(8, 16, dtype="int8", low=-128, high=128)),
        S(t(18, 16, dtype="uint8", high=256), t(16, 8, dtype="int8", low=-128, high=128)),
        S(t(20, 8, dtype="int8", low=-9, high=9), t(8, 8, dtype="int8", low=-9, high=9, layout="transposed")),
        S(t(33, 70, dtype="int8", low=-128, high=128), t(70, 45, dtype="int8", low=-128, high=128)),
    ),
    dtypes=("float32",),
)
def int_mm(self: Value, mat2: Value) -> Value:
    """Matrix product [M, K] @ [K, N] of 8-bit integers, summed in int32."""
    if {self.dtype, mat2.dtype} - {"int8", "uint8"}:
        raise ValueError(f"a product of {self.dtype} and {mat2.dtype}")
    return self.matmul(mat2)
