"""The epilogue of an anchor (a matmul, a convolution) as a loop nest over its output, with the accumulator as one more
input: what every target needs to write it as code."""

from __future__ import annotations

import math
from dataclasses import replace

from ...graph import affine, expr
from ...graph.expr import Expr
from ...schedule.kernel import Anchor, Buffer, Contraction, LoopBody, Loops, Operand, Stage
from .nest import Nest, build_nest


def epilogue_nest(kernel: Anchor) -> tuple[Nest, int, int]:
    """The epilogue as a loop nest whose extra input, number ``acc``, is the accumulator with rows ``pitch`` apart. (A
    second accumulator, ``acc`` with value 1, is the input after it.) Its steps are the epilogue and the kernel's
    ``extra_stages``, which reduce over columns.

    The pitch is longer than a row, so columns never merge with rows, while rows that every operand visits evenly do.
    """
    out = kernel.outputs[0]
    acc, pitch = len(kernel.inputs), out.shape[-1] + 1
    strides = [1] * len(out.shape)
    for d in range(len(out.shape) - 2, -1, -1):
        strides[d] = pitch * math.prod(out.shape[d + 1 : -1])
    register = Operand(Buffer(-1, "arena", "float32", out.shape, "acc"), out.shape, tuple(strides))
    index = expr.identity_index(out.shape)

    def bind(x: Expr) -> Expr | None:
        return expr.load(acc + x.value, "float32", index) if x.op == "acc" else None

    first = Stage("store", kernel.epilogue, output=0, index=index)
    extra = kernel.extra_stages if isinstance(kernel, Contraction) else ()
    stages = tuple(replace(s, expr=expr.rewrite(s.expr, bind)) for s in (first, *extra))
    body = LoopBody(out.shape, (len(out.shape) - 1,) if extra else (), stages)
    inputs = (*kernel.inputs, register, register)
    return build_nest(Loops(label=kernel.label, inputs=inputs, outputs=kernel.outputs, body=body)), acc, pitch


def row_digits(nest: Nest, value: Expr, acc: int, pitch: int, lane: int | None) -> list[tuple[int, int, int]]:
    """How the row dims follow from the flat row number, in units that the accumulator's own address states.

    ``(dim, unit, wrap)``: index = row // unit, modulo ``wrap`` unless that is 0.
    """
    form = next(affine.affine(x.args[0]) for x in expr.walk(value) if x.op == "load" and x.value.operand >= acc)
    rows = [d for d in nest.order if d != lane]
    digits = []
    for d in rows:
        unit = form.coefficient(d) // pitch
        outermost = unit * nest.size[d] == nest.points(rows)
        digits.append((d, unit, 0 if outermost else nest.size[d]))
    return digits
