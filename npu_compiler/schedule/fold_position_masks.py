"""A mask that only compares keys with the query's position is computed in the attention kernel instead of read."""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import expr
from ..graph.expr import Expr
from .anchors import Attention
from .kernel import Loops, Operand
from .rewrite import ScheduleRewrite
from .schedule import Schedule


def fold_position_masks(schedule: Schedule) -> None:
    """Replace such masks by the positions in attention kernels, and remove kernels whose results are no longer read."""
    made = {o.buffer.id: p for k in schedule.kernels for p in k.members for o in p.outputs}
    for k in schedule.kernels:
        if isinstance(k, Attention) and k.limited and not k.by_position:
            mask, positions = k.inputs[3], k.inputs[4]
            producer = made.get(mask.buffer.id)
            if isinstance(producer, Loops) and _compares_positions(producer, mask, positions):
                schedule.rewrite({k: (replace(k, inputs=(*k.inputs[:3], positions, *k.inputs[5:]), by_position=True),)})
    schedule.remove_unused()


def _compares_positions(k: Loops, mask: Operand, positions: Operand) -> bool:
    """Whether ``k`` fills ``mask`` [.., SQ, SK] with ``key <= positions[query]``."""
    if k.body.axes or len(k.body.stages) != 1 or positions not in k.inputs:
        return False
    (out,), (stage,) = k.outputs, k.body.stages
    rank = len(out.shape)
    dims = [n for n in out.shape if n != 1]
    same = (out.buffer, out.offset, out.contiguous, mask.contiguous) == (mask.buffer, mask.offset, True, True)
    if (
        not same
        or rank < 2
        or math.prod(mask.shape) != math.prod(out.shape)
        or dims != [n for n in mask.shape if n != 1]
    ):
        return False
    row = expr.identity_index(out.shape)[rank - 2]
    seen = expr.load(k.inputs.index(positions), "int64", (row,))
    whole = out.shape[-2:] == mask.shape[-2:] and stage.index == expr.identity_index(out.shape)
    return whole and stage.expr in (
        Expr("le", "bool", (expr.index(rank - 1), seen)),
        Expr("ge", "bool", (seen, expr.index(rank - 1))),
    )


FOLD_POSITION_MASKS = ScheduleRewrite(
    "fold_position_masks",
    "attention compares positions itself if its mask is such a comparison",
    fold_position_masks,
)
