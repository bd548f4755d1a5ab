"""The epilogue of an anchor (a matmul, a convolution) as a loop nest over its output, with the accumulator as one more
input. Every target renders this nest."""

from __future__ import annotations

import math
from dataclasses import replace

from ...graph import affine, expr
from ...graph.expr import Expr
from ...schedule.anchors import Anchor, Contraction
from ...schedule.kernel import Buffer, LoopBody, Loops, Operand, Stage
from .nest import Nest, build_nest


def epilogue_nest(kernel: Anchor) -> tuple[Nest, int, int]:
    """Return (nest, acc, pitch): the epilogue as a loop nest over the output.

    Input number ``acc`` of the nest is the accumulator, whose rows are ``pitch`` elements apart; input ``acc`` + 1 is
    the second accumulator of a dual product. The steps are the epilogue and the kernel's ``extra_stages``, which reduce
    over columns. The pitch is longer than a row, so that :func:`build_nest` never collapses columns with rows.
    """
    out = kernel.outputs[0]
    acc, pitch = len(kernel.inputs), out.shape[-1] + 1
    strides = [1] * len(out.shape)
    for d in range(len(out.shape) - 2, -1, -1):
        strides[d] = pitch * math.prod(out.shape[d + 1 : -1])
    dtype = next((x.dtype for x in expr.walk(kernel.epilogue) if x.op == "acc"), "float32")
    register = Operand(Buffer(-1, "arena", dtype, out.shape, "acc"), out.shape, tuple(strides))
    index = expr.identity_index(out.shape)

    def bind(x: Expr) -> Expr | None:
        return expr.load(acc + x.value, dtype, index) if x.op == "acc" else None

    first = Stage("store", kernel.epilogue, output=0, index=index)
    extra = kernel.extra_stages if isinstance(kernel, Contraction) else ()
    stages = tuple(replace(s, expr=expr.rewrite(s.expr, bind)) for s in (first, *extra))
    body = LoopBody(out.shape, (len(out.shape) - 1,) if extra else (), stages)
    inputs = (*kernel.inputs, register, register)
    return build_nest(Loops(label=kernel.label, inputs=inputs, outputs=kernel.outputs, body=body)), acc, pitch


def row_digits(nest: Nest, value: Expr, acc: int, pitch: int, lane: int | None) -> list[tuple[int, int, int]]:
    """Return how the row dims follow from the flat row number: (dim, divisor, wrap) for each, where the index
    is row // divisor, modulo ``wrap`` unless that is 0. The divisors are the coefficients of the accumulator's address
    in ``value``; ``lane`` is the column dim."""
    form = next(affine.affine(x.args[0]) for x in expr.walk(value) if x.op == "load" and x.value.operand >= acc)
    rows = [d for d in nest.order if d != lane]
    digits = []
    for d in rows:
        divisor = form.coefficient(d) // pitch
        outermost = divisor * nest.size[d] == nest.points(rows)
        digits.append((d, divisor, 0 if outermost else nest.size[d]))
    return digits
