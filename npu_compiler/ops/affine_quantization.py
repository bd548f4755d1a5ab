"""What quantising and dequantising mean: PyTorch's definition, operation by operation.

An element is quantised as ``clamp(round(x * (1 / scale)) + zero_point)``, where round is half to even; with a scale for
each token or group as ``clamp(round(x * (1 / scale) + zero_point))``. A number is dequantised as
``(q - zero_point) * scale``. See ``torch/ao/quantization/fx/_decomposed.py``.
"""

from __future__ import annotations

from ..graph.expr import Expr, fn, maximum, minimum
from ..graph.graph import Value
from ..support import dtypes as dt

BOUNDS = {
    name: (-(1 << bits - 1), (1 << bits - 1) - 1) for name, bits in (("int8", 8), ("int16", 16), ("int32", 32))
} | {"uint8": (0, 255)}


FAR = 2.0**40  # beyond every range, also after a zero point was added


def in_range(quant_min: int, quant_max: int, dtype: str) -> str:
    """Return the IR name of an integer dtype that holds the range; raises ``ValueError`` for any other."""
    name = dt.parse(dtype)
    if name not in BOUNDS:
        raise ValueError(f"values are quantised to {', '.join(BOUNDS)}, not to {name}")
    low, high = BOUNDS[name]
    if not low <= quant_min <= quant_max <= high:
        raise ValueError(f"{name} does not hold the range {quant_min} .. {quant_max}")
    return name


def clamped(x: Value, quant_min: int, quant_max: int, dtype: str) -> Value:
    """Return whole numbers in the range, as ``dtype``."""
    name = in_range(quant_min, quant_max, dtype)
    return x.graph.pointwise(lambda v: minimum(maximum(v, quant_min), quant_max).cast(name), x)


def rounded(x: Value) -> Value:
    """Round half to even, in the same dtype."""
    return x.graph.pointwise(fn("round"), x).cast(x.dtype)


def quantized_with_offset(x: Value, scale: Value, zero: Value, quant_min: int, quant_max: int, dtype: str) -> Value:
    """Return ``clamp(round(x * (1 / scale) + zero))`` in float32, where the product is rounded before the sum.

    The bound of the product changes no result, but it keeps compilers from fusing the multiplication and the addition.
    """
    product = x.graph.pointwise(lambda v: minimum(v, FAR), x * (1.0 / scale))
    return clamped(rounded(product + zero), quant_min, quant_max, dtype)


def quantized(x: Value, inverse: Value | float, zero: Value | int, quant_min: int, quant_max: int, dtype: str) -> Value:
    """Return ``clamp(round(x * inverse) + zero)``, computed in float32; ``inverse`` and ``zero`` broadcast to ``x``."""
    name = in_range(quant_min, quant_max, dtype)

    def f(v: Expr, factor: Expr | float, offset: Expr | int) -> Expr:
        whole_numbers = fn("round")(v * factor)
        if isinstance(offset, Expr) or offset:
            whole_numbers = whole_numbers + offset
        return minimum(maximum(whole_numbers, quant_min), quant_max).cast(name)

    offset = zero.cast("float32") if isinstance(zero, Value) else zero
    return x.graph.pointwise(f, x.cast("float32"), inverse, offset, promote=False)


def dequantized(q: Value, scale: Value | float, zero: Value | int, out_dtype: str | None) -> Value:
    """Return ``(q - zero) * scale`` in ``out_dtype`` (None: float32)."""
    if not dt.is_int(q.dtype):
        raise ValueError(f"quantised values are integers, not {q.dtype}")
    out = dt.parse(out_dtype or "float32")
    wide = dt.opmath(out)

    def f(v: Expr, factor: Expr | float, shift: Expr | int) -> Expr:
        shifted = v.cast(out).cast(wide)
        if isinstance(shift, Expr) or shift:
            offset = shift.cast(wide) if isinstance(shift, Expr) else shift
            shifted = (shifted - offset).cast(out).cast(wide)
        return (shifted * (factor.cast(wide) if isinstance(factor, Expr) else factor)).cast(out)

    return q.graph.pointwise(f, q, scale, zero, promote=False, opmath=False)


def inverse(scale: Value) -> Value:
    """Return 1 / scale, rounded to float32 once."""
    return (1.0 / scale).cast("float32")


def one(v: Value) -> Value:
    """Return the only element of a tensor, without dims. Raises ``ValueError`` if it has others."""
    if v.numel != 1:
        raise ValueError(f"a whole tensor has one scale and one zero point, not {v.numel}")
    return v.reshape()


def along(v: Value, axis: int, rank: int) -> Value:
    """Return a vector, one value for each channel, in a shape that broadcasts along ``axis``. Raises ``ValueError``."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of {rank} dims")
    return v.reshape(*(-1 if d == axis % rank else 1 for d in range(rank)))
