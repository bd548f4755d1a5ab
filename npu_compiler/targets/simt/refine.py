"""Kernels as the scheduler made them -> kernels that suit a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

from ...kernel import Buffer, Kernel, Operand, Schedule, contiguous_strides
from .attention import MOST_ROWS
from .dialect import Dialect

KEYS_OF_A_SPLIT = 32
MOST_SPLITS = 64


def refine(schedule: Schedule, dialect: Dialect) -> None:
    """Cut long sums that would leave most cores idle."""
    kernels: list[Kernel] = []
    for k in schedule.kernels:
        kernels += _split_attention(schedule, k, dialect) if k.kind == "attention" else [k]
    schedule.kernels = kernels


def new_buffer(schedule: Schedule, dtype: str, shape: tuple[int, ...], name: str) -> Operand:
    """A block of the arena."""
    number = max((b.id for b in schedule.buffers), default=-1) + 1
    buffer = Buffer(number, "arena", dtype, shape, name)
    schedule.buffers.append(buffer)
    return Operand(buffer, shape, contiguous_strides(shape))


def _split_attention(schedule: Schedule, k: Kernel, dialect: Dialect) -> list[Kernel]:
    """Few queries of many keys: groups share the keys, and a second kernel brings their parts together."""
    q, keys, out = k.inputs[0], k.inputs[1], k.outputs[0]
    b, h, sq, _ = q.shape
    groups = b * keys.shape[1] * -(-(h // keys.shape[1] * sq) // MOST_ROWS)
    splits = min(MOST_SPLITS, keys.shape[2] // KEYS_OF_A_SPLIT, dialect.cores * 2 // groups)
    if splits < 2 or math.prod(out.shape) == 0:
        return [k]
    parts = new_buffer(schedule, "float32", (splits, b, h, sq, out.shape[3] + 2), "parts")
    first = replace(k, outputs=[parts], attrs={**k.attrs, "splits": splits})
    merge = Kernel(f"{k.name}_merge", "attention_merge", [parts], [out], epilogue=k.epilogue, sources=k.sources)
    return [first, merge]
