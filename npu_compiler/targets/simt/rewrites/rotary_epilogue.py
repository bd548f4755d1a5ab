"""The rotary embeddings of a prompt and the updates of its caches are computed in the epilogue of the product that
makes queries, keys and values, whose results are then never in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ....graph import affine, expr
from ....graph.expr import Expr
from ....schedule.anchors import Gemm, GemmWithLoops
from ....schedule.kernel import Buffer, Kernel, Loops, Operand
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def rotary_epilogue(schedule: Schedule, dialect: Dialect) -> None:
    """Replace a product and the loop nests that read its results by a :class:`GemmWithLoops` if the target has a
    function for it."""
    for product in [k for k in schedule.kernels if isinstance(k, Gemm)]:
        kernel = _fused(schedule, product)
        if kernel is not None and dialect.special_for(kernel) is not None:
            readers = {p: () for k in schedule.kernels for p in k.members if _touches(p.inputs, product.outputs)}
            schedule.rewrite({product: (kernel,), **readers})


REWRITE = DialectRewrite(
    "rotary_epilogue",
    "rotary embeddings and cache updates of a prompt join the product that makes queries, keys and values",
    rotary_epilogue,
)


def _fused(schedule: Schedule, product: Gemm) -> GemmWithLoops | None:
    """Return ``product`` and all readers of its results as one kernel that can run in its place, or None."""
    result, at = product.outputs[0], schedule.kernels.index(product)
    flat = [(n, p) for n, k in enumerate(schedule.kernels) for p in k.members]
    readers = [(n, p) for n, p in flat if _touches(p.inputs, (result,))]
    loops = [p for _, p in readers if isinstance(p, Loops) and not p.body.axes]
    if len(product.outputs) > 1 or not readers or len(loops) < len(readers) or product.prologue is not None:
        return None
    written_once = sum(_touches(p.outputs, (result,)) for _, p in flat) == 1
    if result.buffer.kind != "arena" or not written_once or any(b.id == result.buffer.id for _, b in schedule.outputs):
        return None
    if not all(at < n and _can_move(p, [q for m, q in flat if at < m < n and q not in loops]) for n, p in readers):
        return None
    scratch = replace(result.buffer, id=-1, kind="scratch")
    consumers = tuple(replace(p, inputs=tuple(_moved(o, result, scratch) for o in p.inputs)) for p in loops)
    read = [o for p in consumers for o in p.inputs if o.buffer is not scratch and o not in product.inputs]
    inputs, outputs = (*product.inputs, *dict.fromkeys(read)), tuple(o for p in consumers for o in p.outputs)
    if _touches(inputs, outputs) or len({o.buffer.id for o in outputs}) < len(outputs):
        return None
    return GemmWithLoops(
        label="_".join(dict.fromkeys(k.label for k in (product, *loops))), number=product.number, inputs=inputs,
        outputs=outputs, flops=product.flops + sum(p.flops for p in loops),
        sources=tuple(dict.fromkeys(s for k in (product, *loops) for s in k.sources)),
        product=replace(product, outputs=(replace(result, buffer=scratch),)), consumers=consumers,
        halves=tuple(n for n, o in enumerate(inputs) if o in read and _has_equal_halves(schedule, o)),
    )  # fmt: skip


def _moved(o: Operand, result: Operand, scratch: Buffer) -> Operand:
    return replace(o, buffer=scratch) if o.buffer.id == result.buffer.id else o


def _can_move(reader: Kernel, before: Iterable[Kernel]) -> bool:
    """Whether ``reader`` may run before the kernels ``before``, none of which is a reader."""
    return not any(
        _touches(k.outputs, (*reader.inputs, *reader.outputs)) or _touches(k.inputs, reader.outputs) for k in before
    )


def _touches(some: Iterable[Operand], others: Iterable[Operand]) -> bool:
    """Whether two groups of operands have a buffer in common."""
    ids = {o.buffer.id for o in others}
    return any(o.buffer.id in ids for o in some)


def _has_equal_halves(schedule: Schedule, table: Operand) -> bool:
    """Whether one loop nest computes ``table``, and the same values in both halves of each row."""
    writers = [p for k in schedule.kernels for p in k.members if _touches(p.outputs, (table,))]
    writer, shape = writers[0] if len(writers) == 1 else None, table.shape
    if not isinstance(writer, Loops) or table not in writer.outputs:
        return False
    body, number = writer.body, writer.outputs.index(table)
    stores = [s for s in body.stages if s.kind == "store" and s.output == number]
    if len(stores) != 1 or body.domain != shape or body.axes or stores[0].index != expr.identity_index(shape):
        return False
    made: dict[Expr, Expr] = {}
    for n, s in enumerate(body.stages):
        if s.kind == "temp":
            made[expr.stage(n, s.expr.dtype)] = expr.rewrite(s.expr, made.get)
    value, last, half = expr.rewrite(stores[0].expr, made.get), len(shape) - 1, shape[-1] // 2
    ranges = {d: (0, n - 1) for d, n in enumerate(shape)} | {last: (0, half - 1)}
    other = expr.substitute(value, {last: expr.index(last) + half})
    return shape[-1] % 2 == 0 and affine.simplify(value, ranges) is affine.simplify(other, ranges)
