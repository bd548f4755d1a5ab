"""What surrounds a decode step's attention joins it: rotary embeddings of the queries, new rows of the caches, and the
merge of its parts."""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....schedule.horizontal_fusion import bundled
from ....schedule.kernel import Kernel, Operand, Schedule
from ..kernels.attention_decode import LEAST_KEYS, PAD, PER_CORE, STATE, takes_step
from ..kernels.loops import is_pointwise
from ..lang.dialect import Dialect
from .producers import only_maker

MEETINGS = "meetings"  # of groups: zero before a program's first run


def join_attention(schedule: Schedule, dialect: Dialect) -> None:
    """Make ``attention_step`` kernels of the attention kernels of decode steps."""
    meetings: Operand | None = None
    for k in [k for k in schedule.kernels if k.kind == "attention" and takes_step(k, dialect)]:
        before = schedule.kernels[: schedule.kernels.index(k)]
        if any(o.buffer.id == k.inputs[3].buffer.id for other in before for o in other.outputs):
            continue  # its kernel looks at the position before it waits
        heads = k.inputs[1].shape[1]
        if meetings is None or meetings.shape[0] < heads:
            meetings = schedule.memory("int32", (heads, STATE), MEETINGS, lasting=True)
        _join(schedule, k, meetings, dialect)


def _join(schedule: Schedule, k: Kernel, meetings: Operand, dialect: Dialect) -> None:
    q, keys, values, position = k.inputs[:4]
    out = k.outputs[0]
    queries, *rows = (_pointwise_maker(schedule, k, o) for o in (q, keys, values))
    if queries is None or not _makes_queries(queries, q):
        return
    if not all(r is not None and _makes_row(r, o, position) for r, o in zip(rows, (keys, values), strict=True)):
        return
    joined = [p for p in (queries, *rows) if p is not None]
    most = min(PER_CORE * dialect.cores // keys.shape[1], 32 * (STATE - 1))
    splits = max(1, min(most, -(-keys.shape[2] // LEAST_KEYS)))
    parts = schedule.memory("float32", (splits, out.shape[1], out.shape[3] + PAD), "parts")
    scratch = replace(queries.outputs[0].buffer, id=-1, kind="scratch")
    step = replace(
        k, kind="attention_step", inputs=[keys, values, position, *(o for p in joined for o in p.inputs)],
        outputs=[out, keys, values, parts, meetings], attrs={"scale": k.attrs["scale"]},
        parts=(replace(queries, outputs=[replace(queries.outputs[0], buffer=scratch)]), *joined[1:]),
        sources=tuple(dict.fromkeys(s for p in (*joined, k) for s in p.sources)),
    )  # fmt: skip
    kernels: list[Kernel] = []
    for other in schedule.kernels:
        if other is k:
            kernels.append(step)
        elif any(other is p for p in joined):
            continue
        elif any(part is p for part in other.parts for p in joined):
            rest = [part for part in other.parts if not any(part is p for p in joined)]
            kernels += [bundled(rest)] if len(rest) > 1 else rest
        else:
            kernels.append(other)
    schedule.kernels = kernels


def _pointwise_maker(schedule: Schedule, k: Kernel, op: Operand) -> Kernel | None:
    """The pointwise kernel that makes ``op`` for ``k`` alone."""
    found = only_maker(schedule, k, op)
    if found is None:
        return None
    kernel, made = found
    return made if kernel.kind in ("loops", "bundle") and is_pointwise(made) and len(made.outputs) == 1 else None


def _makes_queries(made: Kernel, q: Operand) -> bool:
    """Whether point n of ``made`` is element n of the queries."""
    body, out = made.body, made.outputs[0]
    return (
        body is not None and len(body.stages) == 1 and out.contiguous and out.offset == 0
        and out.shape == q.shape == body.domain and body.stages[0].index == expr.identity_index(out.shape)
    )  # fmt: skip


def _makes_row(made: Kernel, cache: Operand, position: Operand) -> bool:
    """Whether ``made`` fills row ``position`` of all heads of ``cache`` [1, HK, SK, D], and nothing else."""
    body, out = made.body, made.outputs[0]
    if body is None or len(body.stages) != 1 or (out.shape, out.strides) != (cache.shape, cache.strides):
        return False
    row = body.stages[0].index[2]
    at = made.inputs[row.value] if row.op == "load" else None
    if body.domain != (1, cache.shape[1], 1, cache.shape[3]) or at is None or at.buffer.id != position.buffer.id:
        return False
    same = [e is expr.index(n) or (body.domain[n] == 1 and e.op == "const") for n, e in enumerate(body.stages[0].index)]
    return all(same[n] for n in (0, 1, 3))
