"""Attention of one query position to a cache, in one launch and in float arithmetic: sizes and functors for
``attention_decode_float.h``."""

from __future__ import annotations

from ....schedule.anchors import DecodeAttention
from ....schedule.kernel import Operand
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype
from .attention import CHUNK, MAX_ROWS, tile_for
from .flash import strides
from .point_functor import point_functor

RESIDENT = 2  # workgroups that should run on a compute unit
MIN_KEYS = 128  # of a workgroup; fewer take less time than combining the parts


def supports_float(heads: int, keys: Operand, values: Operand, dialect: Dialect) -> bool:
    """Whether :func:`emit_float_decode_attention` supports ``heads`` query heads and these caches [1, HK, SK, D]."""
    return dialect.arrival_counters and keys.shape == values.shape and heads // keys.shape[1] <= MAX_ROWS


def float_splits(keys: Operand, dialect: Dialect) -> int:
    """Return the number of workgroups that share the keys of a head."""
    return max(1, min(RESIDENT * dialect.device.compute_units // keys.shape[1], blocks(keys.shape[2], MIN_KEYS), CHUNK))


def emit_float_decode_attention(kernel: DecodeAttention, dialect: Dialect) -> Emission:
    """Return the function of a ``decode_attention`` kernel (see :func:`.attention_decode.emit_decode_attention`)."""
    f = Function(kernel, dialect)
    (keys, values), out, parts, counters = kernel.inputs[:2], *kernel.outputs[:1], *kernel.outputs[3:]
    (hk, sk, d), heads, splits = keys.shape[1:], out.shape[1], parts.shape[0]
    tile = tile_for(heads // hk, keys, values, dialect.device)
    element = ctype(keys.dtype)
    types = {"Q": element, "K": element, "V": element, "Out": ctype(out.dtype), "Mask": "bool8"}
    sizes = dict(
        B=1, H=heads, HK=hk, SQ=1, SK=sk, D=d, DV=d, SPLITS=splits, **tile.sizes(keys, values), **strides("O", out),
        **strides("M", None), LIMIT=0, MASKED=False, BY_POSITION=True, CAUSAL=False, LIMITED=False, SCALED=False,
        SCALE=float(kernel.scale), MIN_KEYS=MIN_KEYS, PART=parts.shape[2], COUNTER=counters.shape[1],
    )  # fmt: skip
    operands = [f.pointer(n) for n in (~1, ~2, 2, ~0)]
    operands += [f.coherent(~3), f.pointer(~4)] if splits > 1 else ["nullptr", "nullptr"]
    first = 3
    for n, part in enumerate(kernel.producers):
        operands.append(point_functor(f, part, f"@NAME@_part{n}", first, 1))
        first += len(part.inputs)
    arrays = [*tile.arrays(f), f.array("int", "last", 1) if splits > 1 else "nullptr"]
    f.template("attention_decode_float", "attention_decode_float.h", types, sizes, *operands, *arrays)
    return f.finish(splits * hk, tile.threads)
