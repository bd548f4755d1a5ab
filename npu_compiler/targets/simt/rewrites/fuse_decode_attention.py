"""One kernel for a decode step's attention together with the rotary embedding of the queries, the new rows of the
caches, and the combination of its parts."""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....schedule.anchors import Attention, DecodeAttention
from ....schedule.kernel import Loops, Operand, recast
from ....schedule.schedule import Schedule
from ..kernels.attention_decode import PAD, STATE, splits_of, supports_step
from ..kernels.loops import is_pointwise
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite
from .producers import only_producer

GRID_BARRIERS = "grid_barriers"  # the buffer of the grid barriers' states, zero before a program's first run


def fuse_decode_attention(schedule: Schedule, dialect: Dialect) -> None:
    """Replace the attention kernels of decode steps by :class:`DecodeAttention`."""
    grid_barriers: Operand | None = None
    for k in [k for k in schedule.kernels if isinstance(k, Attention) and supports_step(k, dialect)]:
        before = schedule.kernels[: schedule.kernels.index(k)]
        if any(o.buffer.id == k.inputs[3].buffer.id for other in before for o in other.outputs):
            continue  # the fused kernel reads the position before it waits for its predecessor
        heads = k.inputs[1].shape[1]
        if grid_barriers is None or grid_barriers.shape[0] < heads:
            grid_barriers = schedule.memory("int32", (heads, STATE), GRID_BARRIERS, persistent=True)
        _fuse(schedule, k, grid_barriers, dialect)


REWRITE = DialectRewrite(
    "fuse_decode_attention",
    "rotary embeddings, cache updates and the combination of partial results join a decode step's attention",
    fuse_decode_attention,
)


def _fuse(schedule: Schedule, k: Attention, grid_barriers: Operand, dialect: Dialect) -> None:
    q, keys, values, position = k.inputs[:4]
    out = k.outputs[0]
    joined = [p for o in (q, keys, values) if (p := _pointwise_producer(schedule, k, o)) is not None]
    if len(joined) < 3:
        return
    queries, new_key, new_value = joined
    if not _makes_queries(queries, q):
        return
    if not (_makes_row(new_key, keys, position) and _makes_row(new_value, values, position)):
        return
    splits = splits_of(out.shape[1], keys, values, dialect)
    parts = schedule.memory("float32", (splits, out.shape[1], out.shape[3] + PAD), "parts")
    scratch = replace(queries.outputs[0].buffer, id=-1, kind="scratch")
    step = recast(
        k, DecodeAttention, inputs=(keys, values, position, *(o for p in joined for o in p.inputs)),
        outputs=(out, keys, values, parts, grid_barriers),
        queries=replace(queries, outputs=(replace(queries.outputs[0], buffer=scratch),)),
        new_rows=(new_key, new_value),
        sources=tuple(dict.fromkeys(s for p in (*joined, k) for s in p.sources)),
    )  # fmt: skip
    schedule.rewrite({k: (step,), **{p: () for p in joined}})


def _pointwise_producer(schedule: Schedule, k: Attention, op: Operand) -> Loops | None:
    """Return the pointwise kernel that computes ``op``, if only ``k`` reads it; else None."""
    found = only_producer(schedule, k, op)
    if found is None:
        return None
    _, made = found
    return made if isinstance(made, Loops) and is_pointwise(made) and len(made.outputs) == 1 else None


def _makes_queries(made: Loops, q: Operand) -> bool:
    """Whether point n of ``made`` is element n of the queries."""
    body, out = made.body, made.outputs[0]
    return (
        len(body.stages) == 1 and out.contiguous and out.offset == 0
        and out.shape == q.shape == body.domain and body.stages[0].index == expr.identity_index(out.shape)
    )  # fmt: skip


def _makes_row(made: Loops, cache: Operand, position: Operand) -> bool:
    """Whether ``made`` writes exactly row ``position`` of all heads of ``cache`` [1, HK, SK, D]."""
    body, out = made.body, made.outputs[0]
    if len(body.stages) != 1 or (out.shape, out.strides) != (cache.shape, cache.strides):
        return False
    row = body.stages[0].index[2]
    at = made.inputs[row.value] if row.op == "load" else None
    if body.domain != (1, cache.shape[1], 1, cache.shape[3]) or at is None or at.buffer.id != position.buffer.id:
        return False
    same = [e is expr.index(n) or (body.domain[n] == 1 and e.op == "const") for n, e in enumerate(body.stages[0].index)]
    return all(same[n] for n in (0, 1, 3))
