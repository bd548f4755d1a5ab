"""The types of operands that matrix units multiply, viewed as elements of 16 bits.

A b16 element (PTX's ``.b16``) is one element of 16 bits, two of 8 bits that are neighbours along K, or half of a
float32 element of which the matrix unit reads the first 19 bits (TF32). Loads, swizzles, fragments and tiles of 8-bit
operands are therefore those of 16-bit operands with half as many terms, and those of float32 operands with twice as
many; only the instruction differs. Float32 operands that are not rounded are loaded like those of TF32, and then split
into limbs, bfloat16 numbers, whose products are those of 16-bit operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....schedule.anchors import Conv2d, Gemm
from ....schedule.kernel import Operand
from ....support.dtypes import FLOAT8
from ....weights.format import find_layout


@dataclass(frozen=True)
class OperandType:
    """``left``, ``right``: dtypes of the operands. ``ctype``: the C++ type of a b16 element. ``elements``: in one b16
    element. ``halves``: b16 elements of one element. ``sums``: the dtype of accumulators. ``columns``: widths of wgmma
    are multiples of it. ``stored``: the right operand is a matrix in a weight format, of which ``right`` is the dtype
    of the codes."""

    left: str
    right: str
    ctype: str
    elements: int = 1
    halves: int = 1
    sums: str = "float32"
    columns: int = 8
    stored: bool = False

    @property
    def sum_ctype(self) -> str:
        """The C++ type of an accumulator."""
        return "int" if self.sums == "int32" else "float"

    @property
    def fragment(self) -> str:
        """The C++ type of a fragment of accumulators."""
        return "FragI" if self.sums == "int32" else "FragC"


TYPES = (
    OperandType("float16", "float16", "f16"),
    OperandType("bfloat16", "bfloat16", "bf16"),
    OperandType("uint8", "int8", "u8s8", elements=2, sums="int32", columns=16),
    OperandType(FLOAT8, FLOAT8, "e4m3x2", elements=2, stored=True),
)
TF32 = OperandType("float32", "float32", "tf32_half", halves=2)
LIMBS = OperandType("float32", "float32", "tf32_half", halves=2, columns=16)  # sums of three bfloat16 numbers
FLOATS = OperandType("float32", "float32", "float")  # in float arithmetic
SPLIT_FLOATS = OperandType("float32", "float32", "tf32x2")  # sums of two TF32 numbers, or the first of these
_B16 = "int16"  # the dtype of operands that are viewed as b16


def operand_type(kernel: Gemm | Conv2d) -> OperandType | None:
    """Return the type of a kernel's operands, or None if no matrix unit multiplies them as b16 elements. Those of TF32
    are rounded: the right one is stored so, and the left one is rounded in registers. Those of limbs are split."""
    w = kernel.weight
    right = find_layout(w.format)[0].code_dtype if w.format else w.dtype
    found = kernel.left.dtype, right, bool(w.format)
    if found == (TF32.left, TF32.right, False) and (kernel.rounded or not kernel.tf32):
        return TF32 if kernel.rounded else LIMBS
    return next((t for t in TYPES if (t.left, t.right, t.stored) == found), None)


def as_b16(kernel: Gemm | Conv2d) -> Gemm | Conv2d | None:
    """Return ``kernel`` with its operands viewed as b16: those of 8 bits with half as many terms, those of 32 bits with
    twice as many. None if neighbours in memory are not terms of a sum, or not in whole b16 elements."""
    t = operand_type(kernel)
    if t is None or t.elements == t.halves:
        return kernel if t is not None or kernel.inputs[0].dtype == _B16 else None
    if isinstance(kernel, Gemm) and kernel.prologue is not None:
        return None
    n, h = t.elements, t.halves
    left, right = (_view(o, n, h) for o in (kernel.inputs[0], kernel.weight))
    if left is None or right is None:
        return None
    inputs = (left, *kernel.inputs[1 : kernel.rhs], right, *kernel.inputs[kernel.rhs + 1 :])
    if isinstance(kernel, Gemm):
        if kernel.k % n or kernel.lda % n or kernel.batch_stride % n:
            return None
        k, lda, batch_stride = (x * h // n for x in (kernel.k, kernel.lda, kernel.batch_stride))
        return replace(kernel, inputs=inputs, k=k, lda=lda, batch_stride=batch_stride)
    channels, results = kernel.channels
    if channels % (kernel.groups * n):
        return None
    return replace(kernel, inputs=inputs, channels=(channels * h // n, results))


def _view(o: Operand, n: int, halves: int) -> Operand | None:
    """Return an operand whose elements are ``n`` neighbours of ``o``, or ``halves`` of one; None if there is none."""
    others = [s for size, s in zip(o.shape[:-1], o.strides[:-1], strict=True) if size > 1]
    if o.strides[-1] != 1 or o.shape[-1] % n or o.offset % n or any(s % n for s in others):
        return None
    strides = (*(s * halves // n for s in o.strides[:-1]), 1)
    shape = (*o.shape[:-1], o.shape[-1] * halves // n)
    return Operand(replace(o.buffer, dtype=_B16), shape, strides, o.offset * halves // n)
