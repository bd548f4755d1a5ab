"""Products of some rows decode their weights themselves, if the target has a kernel for that, instead of reading
elements that another kernel decoded to memory."""

from __future__ import annotations

from dataclasses import replace

from ....schedule.anchors import Gemm
from ....schedule.kernel import Kernel, Unpack
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def decode_in_products(schedule: Schedule, dialect: Dialect) -> None:
    """Let each product read the weights that an ``unpack`` kernel decodes, unless other kernels also read the
    elements."""
    for unpack in [k for k in schedule.kernels if isinstance(k, Unpack)]:
        readers = [k for k in schedule.kernels if any(o.buffer.id == unpack.outputs[0].buffer.id for o in k.inputs)]
        decoding = [_decoding(k, unpack, dialect) for k in readers]
        if decoding and None not in decoding:
            new: dict[Kernel, Kernel | None] = {unpack: None, **dict(zip(readers, decoding, strict=True))}
            schedule.kernels = [r for k in schedule.kernels if (r := new.get(k, k)) is not None]


REWRITE = DialectRewrite(
    "decode_in_products",
    "products of a medium number of rows decode their weights themselves",
    decode_in_products,
)


def _decoding(k: Kernel, unpack: Unpack, dialect: Dialect) -> Gemm | None:
    """Return ``k`` as a product that decodes its weights; None if the target has no kernel for that."""
    if (
        not isinstance(k, Gemm)
        or k.weight != unpack.outputs[0]
        or k.weight in (*k.inputs[: k.rhs], *k.inputs[k.rhs + 1 :])
    ):
        return None
    made = replace(k, inputs=(*k.inputs[: k.rhs], *unpack.inputs, *k.inputs[k.rhs + 1 :]))
    return made if dialect.special_for(made) is not None else None
