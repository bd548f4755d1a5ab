"""Attention of few queries to many keys: workgroups share the keys, and a second kernel combines their parts (flash
decoding)."""

from __future__ import annotations

import math
from dataclasses import replace

from ....schedule.anchors import Attention, CombineAttention
from ....schedule.kernel import Kernel
from ....schedule.schedule import Schedule
from ..kernels.attention import MAX_ROWS, MAX_SPLIT_SIZE
from ..kernels.flash import KEYS, flash_tiles, is_flash, on_matrix_unit
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite

MIN_KEYS = 32  # of a part
MANY_KEYS = 256  # of a part of a kernel of many queries: its products take longer than the parts
MAX_SPLITS = 128


def split_attention(schedule: Schedule, dialect: Dialect) -> None:
    """Split the keys into parts if the queries alone would leave most compute units idle."""
    kernels = [k for k in schedule.kernels if isinstance(k, Attention)]
    schedule.rewrite({k: _split(schedule, k, splits) for k in kernels if (splits := _splits(k, dialect)) > 1})


REWRITE = DialectRewrite(
    "split_attention",
    "workgroups share the keys if there are few queries (flash decoding)",
    split_attention,
)


def _splits(k: Attention, dialect: Dialect) -> int:
    q, keys = k.inputs[:2]
    size = k.outputs[0].shape[3]
    if math.prod(k.outputs[0].shape) == 0 or size > MAX_SPLIT_SIZE:
        return 1
    b, h, sq, _ = q.shape
    units, least = dialect.device.compute_units, MIN_KEYS
    if on_matrix_unit(k, dialect):
        # the keys of a limited kernel may be few
        if k.limited or not is_flash(k, dialect):
            return 1
        workgroups, least = flash_tiles(q, keys) * 2, MANY_KEYS
    elif is_flash(k, dialect):
        workgroups, least = flash_tiles(q, keys), KEYS
    else:
        workgroups = b * keys.shape[1] * -(-(h // keys.shape[1] * sq) // MAX_ROWS)
    return min(MAX_SPLITS, keys.shape[2] // least, units * 2 // workgroups)


def _split(schedule: Schedule, k: Attention, splits: int) -> tuple[Kernel, Kernel]:
    (b, h, sq, _), out = k.inputs[0].shape, k.outputs[0]
    parts = schedule.memory("float32", (splits, b, h, sq, out.shape[3] + 2), "parts")
    second = CombineAttention(
        label=f"{k.label}_combine",
        number=k.number,
        inputs=(parts,),
        outputs=(out,),
        epilogue=k.epilogue,
        sources=k.sources,
    )
    return replace(k, outputs=(parts,), splits=splits), second
