"""A 1x1 convolution is computed in the kernel of the convolution whose results it reads, which are also stored.

An example is the last convolution of a ResNet's bottleneck block: the first one of the next block reads its results,
and the last one of the next block adds them.
"""

from __future__ import annotations

from ....schedule.anchors import B2bConv2d, Conv2d, DualConv2d
from ....schedule.kernel import Kernel
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def b2b_conv(schedule: Schedule, dialect: Dialect) -> None:
    """Replace two convolutions by a :class:`B2bConv2d` if the target has a function for it."""
    for first in [k for k in schedule.kernels if isinstance(k, Conv2d | DualConv2d)]:
        for second in _readers(schedule, first):
            fused = B2bConv2d(
                label=first.label, number=first.number, inputs=(*first.inputs, *second.inputs[1:]),
                outputs=(*first.outputs, *second.outputs), flops=first.flops + second.flops,
                sources=tuple(dict.fromkeys((*first.sources, *second.sources))), first=first, second=second,
            )  # fmt: skip
            if dialect.special_for(fused) is not None:
                schedule.kernels = [fused if x is first else x for x in schedule.kernels if x is not second]
                break


REWRITE = DialectRewrite(
    "b2b_conv",
    "a 1x1 convolution joins the kernel of the convolution whose results it reads",
    b2b_conv,
)


def _readers(schedule: Schedule, first: Kernel) -> list[Conv2d]:
    """Return the convolutions of the whole result of ``first`` that can run as soon as it is known: their other inputs
    are constants."""
    if first not in schedule.kernels or len(first.outputs) != 1:
        return []
    written = [o.buffer.id for k in schedule.kernels for o in k.outputs]
    return [
        k for k in schedule.kernels
        if isinstance(k, Conv2d) and k.inputs[0] == first.outputs[0] and len(k.outputs) == 1
        and all(o.buffer.constant for o in k.inputs[1:])
        and written.count(k.outputs[0].buffer.id) == 1
    ]  # fmt: skip
