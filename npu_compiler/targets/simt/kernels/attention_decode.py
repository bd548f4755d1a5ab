"""Attention of one query position to a cache, in one launch: sizes and functors for ``attention_decode.h``."""

from __future__ import annotations

import math

from ....schedule.anchors import Attention, DecodeAttention
from ....schedule.kernel import Operand
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype
from .attention_decode_float import emit_float_decode_attention, float_splits, supports_float
from .point_functor import point_functor

SUBGROUPS = 16
THREADS = SUBGROUPS * SUBGROUP
RESIDENT = 1  # workgroups of a compute unit
HEADS = 8  # columns of the matrix unit
KEYS = 16  # of a subgroup in a tile
PADDING = 8  # elements after a row in shared memory
MIN_KEYS = 256  # of a workgroup; splitting fewer costs more than the grid barrier saves
STATE = 8  # words of a grid barrier's state, for up to 224 workgroups
PAD = 4  # elements after the values of a part: maximum, sum, and two that align the next part
SIZES = (64, 128)  # supported head sizes


def emit_decode_attention(kernel: DecodeAttention, dialect: Dialect) -> Emission:
    """Return the function of a ``decode_attention`` kernel.

    Its inputs are keys and values [1, HK, SK, D], the position int64[1], and those of its producers: loops kernels that
    compute the queries [1, H, 1, D], and the rows of keys and of values at the position. Its outputs are the result,
    keys, values, float32 parts [S, H, D + 4] (values, maximum, sum), and the int32 states of grid barriers [HK, STATE],
    zero before the first run.
    """
    (keys, values), out = kernel.inputs[:2], kernel.outputs[0]
    if not _supports_fragments(out.shape[1], keys, values, dialect):
        return emit_float_decode_attention(kernel, dialect)
    f = Function(kernel, dialect, explicit_wait=True, launch_dependents=False)
    (hk, sk, d), splits = keys.shape[1:], kernel.outputs[3].shape[0]
    f.resident = RESIDENT
    sizes = dict(
        HK=hk, SK=sk, D=d, HEADS_PER_KV=out.shape[1] // hk, SPLITS=splits, SUBGROUPS=SUBGROUPS, MIN_KEYS=MIN_KEYS,
        STATE=STATE,
        K_H=keys.strides[1], K_S=keys.strides[2], V_H=values.strides[1], V_S=values.strides[2], O_H=out.strides[1],
        O_D=out.strides[3], SCALE=float(kernel.scale * math.log2(math.e)),
    )  # fmt: skip
    operands = [f.pointer(n) for n in (0, 1, 2, ~0, ~1, ~2)]
    operands += [f.pointer(~3), f.pointer(~4)] if splits > 1 else ["nullptr", "nullptr"]
    rounds, first = (blocks(HEADS * d, THREADS), 1, 1), 3
    for n, (part, count) in enumerate(zip(kernel.producers, rounds, strict=True)):
        operands.append(point_functor(f, part, f"@NAME@_part{n}", first, count))
        first += len(part.inputs)
    element, size = ctype(keys.dtype), dtypes.DTYPES[keys.dtype].size
    slices = d // 32
    sums = (SUBGROUPS // slices - 1) * slices * (8 * SUBGROUP + HEADS)
    rows = HEADS * (d + SUBGROUPS * KEYS + PADDING) * size // 4
    arrays = [f.array(element, "new_rows", 2 * d), f.array("float", "maxima", SUBGROUPS * HEADS)]
    arrays.append(f.array("float", "partials", max(sums, rows)))
    arrays.append(f.array("int", "outcome", 1) if splits > 1 else "nullptr")
    f.template("attention_decode", "attention_decode.h", {"T": element}, sizes, *operands, *arrays)
    return f.finish(splits * hk, THREADS)


def supports_step(k: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_decode_attention` supports the operands of attention kernel ``k``: one query position, and a
    cache in a layout that it reads."""
    q, keys, values = k.inputs[:3]
    (b, h, sq, _), out = q.shape, k.outputs[0]
    position = k.inputs[3].buffer if k.by_position else None
    return (
        (b, sq) == (1, 1) and all(o.dtype == q.dtype for o in (keys, values, out)) and not k.causal
        and position is not None and position.kind in ("input", "state")
        and q.contiguous and q.offset == 0
        and (_supports_fragments(h, keys, values, dialect) or supports_float(h, keys, values, dialect))
    )  # fmt: skip


def splits_of(heads: int, keys: Operand, values: Operand, dialect: Dialect) -> int:
    """Return the number of workgroups that share the keys of a head."""
    if not _supports_fragments(heads, keys, values, dialect):
        return float_splits(keys, dialect)
    most = min(RESIDENT * dialect.device.compute_units // keys.shape[1], 32 * (STATE - 1))
    return max(1, min(most, blocks(keys.shape[2], MIN_KEYS)))


def _supports_fragments(heads: int, keys: Operand, values: Operand, dialect: Dialect) -> bool:
    """Whether ``attention_decode.h`` supports ``heads`` query heads and these caches [1, HK, SK, D]."""
    return (
        dialect.fragment_access and dialect.grid_barrier and keys.dtype in dialect.matrix_types
        and keys.shape == values.shape and keys.shape[3] in SIZES and heads // keys.shape[1] <= HEADS
        and all(_dense_rows(o) for o in (keys, values))
    )  # fmt: skip


def _dense_rows(op: Operand) -> bool:
    return op.strides[3] == 1 and op.offset % 8 == 0 and op.strides[2] % 8 == 0 and (op.strides[1] % 8 == 0)
