"""Decides whether TMA can store the results of a kernel and load their residual (``kernels/tma_epilogue.h``)."""

from __future__ import annotations

import math

from ...graph import expr
from ...schedule.anchors import Conv2d, Gemm
from ...schedule.kernel import Operand
from ...support import dtypes
from ..simt.kernels.gemm import product_of
from ..simt.kernels.operand_types import LIMBS, operand_type
from ..simt.lang.function import Members


def row_pitch(o: Operand) -> int:
    """Return the elements between neighbouring rows, if all rows are dense, evenly spaced and at multiples of 16 bytes;
    else 0."""
    dims = [(n, s) for n, s in zip(o.shape[:-1], o.strides[:-1], strict=True) if n > 1]
    pitch = step = dims[-1][1] if dims else o.shape[-1]
    for n, stride in reversed(dims):
        if stride != step:
            return 0
        step *= n
    dense, each = o.strides[-1] == 1 and pitch >= o.shape[-1], 16 // dtypes.DTYPES[o.dtype].size
    return pitch if dense and pitch % each == 0 and o.offset % each == 0 else 0


def residual_of(kernel: Gemm | Conv2d) -> int | None:
    """Return the number of the input of which the epilogue reads one element for every result, or -1 if there is none.

    Returns None if the epilogue also reads other operands than that and vectors along the columns.
    """
    assert kernel.epilogue is not None
    out, found, values = kernel.outputs[0], -1, [kernel.epilogue, *(s.expr for s in kernel.extra_stages)]
    last, identity = expr.index(len(out.shape) - 1), expr.identity_index(out.shape)
    for x in (x for value in values for x in expr.walk(value) if x.op == "load"):
        o = kernel.inputs[x.value]
        along = [i for i in x.args if i.op != "const"]
        if x.args == identity and o.shape == out.shape and o.dtype == out.dtype and row_pitch(o):
            if found not in (-1, x.value):
                return None
            found = x.value
        elif along != [last] or o.strides[x.args.index(last)] != 1:
            return None
    return found


def vectors(kernel: Gemm | Conv2d) -> list[int]:
    """Return the inputs that are constant vectors along the columns, of which the epilogue reads whole elements."""
    first = kernel.rhs + 1
    return [
        n for n, o in enumerate(kernel.inputs[first:], first)
        if o.buffer.constant and o.contiguous and math.prod(o.shape) == kernel.outputs[0].shape[-1]
    ]  # fmt: skip


def vector_bytes(kernel: Gemm | Conv2d) -> int:
    """Return the bytes of all :func:`vectors`, each a multiple of 16."""
    sizes = (math.prod(o.shape) * dtypes.DTYPES[o.dtype].size for o in (kernel.inputs[n] for n in vectors(kernel)))
    return sum(-(-size // 16) * 16 for size in sizes)


def hold_vectors(kernel: Gemm | Conv2d, members: Members, threads: int, at: int = 0) -> None:
    """Let a function keep the vectors of an epilogue in shared memory. ``at``: what is added to operand numbers. The
    threads have to meet before the epilogue."""
    f = members.function
    for n in vectors(kernel):
        o = kernel.inputs[n]
        count, name = math.prod(o.shape), f"vector{at + n}"
        f.array(dtypes.DTYPES[o.dtype].ctype, name, count)
        f.lines.add(f"hold({name}, {f.pointer(at + n)}, {count}, tid, {threads});")
        members.held[at + n] = name


def supports_tma_store(kernel: Gemm | Conv2d) -> bool:
    """Whether TMA can store the results: evenly spaced rows of a type of one or two bytes, of a product whose stages
    are free for them, unlike those of floats that are split."""
    p, out = product_of(kernel), kernel.outputs[0]
    fits = p.batch == p.splits == p.products == 1 and (math.prod(out.shape[:-1]), out.shape[-1]) == (p.m, p.n)
    stored = out.dtype in ("float16", "bfloat16", "uint8")
    stored = stored and operand_type(kernel) is not LIMBS
    return fits and stored and row_pitch(out) > 0 and residual_of(kernel) is not None
