"""A convolution whose results are only pooled is computed in the kernel that pools them.

An example is the first convolution of a ResNet. Its result, the network's largest, is never written to memory.
"""

from __future__ import annotations

from dataclasses import replace

from ....schedule.anchors import Conv2d, PooledConv2d
from ....schedule.kernel import Loops
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite
from .producers import only_producer


def pooled_conv(schedule: Schedule, dialect: Dialect) -> None:
    """Replace a convolution and the loop nest that reads its result by a :class:`PooledConv2d` if the target has a
    function for it."""
    for pool in [k for k in schedule.kernels if isinstance(k, Loops)]:
        fused = _fused(schedule, pool)
        if fused is not None and dialect.special_for(fused[1]) is not None:
            conv, kernel = fused
            schedule.kernels = [kernel if x is pool else x for x in schedule.kernels if x is not conv]


REWRITE = DialectRewrite(
    "pooled_conv",
    "a convolution joins the kernel that pools its result, if nothing else reads it",
    pooled_conv,
)


def _fused(schedule: Schedule, pool: Loops) -> tuple[Conv2d, PooledConv2d] | None:
    """Return (the convolution whose result is the only input of ``pool``, both as one kernel), or None."""
    if len(pool.inputs) != 1 or len(pool.outputs) != 1 or pool.inputs[0].buffer.kind != "arena":
        return None
    found = only_producer(schedule, pool, pool.inputs[0])
    conv = found[0] if found is not None else None
    if not isinstance(conv, Conv2d) or conv.outputs != pool.inputs:
        return None
    (result,) = conv.outputs
    scratch = (replace(result, buffer=replace(result.buffer, id=-1, kind="scratch")),)
    return conv, PooledConv2d(
        label=conv.label, number=conv.number, inputs=conv.inputs, outputs=pool.outputs, flops=conv.flops + pool.flops,
        sources=tuple(dict.fromkeys((*conv.sources, *pool.sources))), conv=replace(conv, outputs=scratch),
        pool=replace(pool, inputs=scratch),
    )  # fmt: skip
