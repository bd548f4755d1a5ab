"""A convolution whose result is only the residual of another one is computed in that one's kernel.

An example is the 1x1 convolution parallel to the first block of a ResNet stage. Its result is never written to memory.
"""

from __future__ import annotations

from dataclasses import replace

from ....graph import expr
from ....graph.expr import Expr
from ....schedule.anchors import Conv2d, DualConv2d
from ....schedule.kernel import Operand, recast
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite
from .producers import only_producer


def dual_conv(schedule: Schedule, dialect: Dialect) -> None:
    """Replace two convolutions by a :class:`DualConv2d` if the target has a function for it."""
    for k in [k for k in schedule.kernels if isinstance(k, Conv2d)]:
        for number in _residuals(k):
            producer = _convolution_of(schedule, k, k.inputs[number])
            pair = _paired(k, number, producer) if producer is not None else None
            if producer is not None and pair is not None and dialect.special_for(pair) is not None:
                schedule.kernels = [pair if x is k else x for x in schedule.kernels if x is not producer]
                break


REWRITE = DialectRewrite(
    "dual_conv",
    "a convolution joins the kernel of another one if its result is only the residual of that one",
    dual_conv,
)


def _residuals(k: Conv2d) -> list[int]:
    """Return the inputs of which the epilogue reads exactly one element for every result."""
    identity = expr.identity_index(k.outputs[0].shape)
    loads = [x for x in expr.walk(k.epilogue) if x.op == "load"]
    numbers = sorted({x.value for x in loads})
    return [n for n in numbers if all(x.args == identity for x in loads if x.value == n)]


def _convolution_of(schedule: Schedule, k: Conv2d, op: Operand) -> Conv2d | None:
    """Return the convolution that computes ``op``, if only ``k`` reads it, and as only one input; else None."""
    found = only_producer(schedule, k, op)
    once = op.buffer.kind == "arena" and sum(o.buffer.id == op.buffer.id for o in k.inputs) == 1
    producer = found[0] if once and found is not None else None
    return producer if isinstance(producer, Conv2d) and producer.outputs == (op,) else None


def _paired(k: Conv2d, number: int, producer: Conv2d) -> DualConv2d | None:
    """Return ``k`` with the result of ``producer`` as ``acc1`` instead of input ``number``, or None if the epilogue
    also reads that input in another way."""

    sums = next((x.dtype for x in expr.walk(k.epilogue) if x.op == "acc"), "float32")

    def through(x: Expr) -> Expr | None:
        if x.op == "cast" and x.dtype == "float32" and x.args[0].op == "load" and x.args[0].value == number:
            return expr.acc(sums, 1).cast("float32")
        return None

    epilogue = expr.rewrite(k.epilogue, through)
    if number in expr.operands(epilogue):
        return None
    epilogue = expr.substitute(epilogue, loads=lambda x: expr.load(x.value - (x.value > number), x.dtype, x.args))
    (out,) = producer.outputs
    residual = replace(producer, outputs=(replace(out, buffer=replace(out.buffer, id=-1, kind="scratch")),))
    return recast(
        k, DualConv2d, inputs=(*k.inputs[:number], *k.inputs[number + 1 :], *producer.inputs), epilogue=epilogue,
        residual=residual, sources=tuple(dict.fromkeys((*producer.sources, *k.sources))),
        flops=k.flops + producer.flops,
    )  # fmt: skip
