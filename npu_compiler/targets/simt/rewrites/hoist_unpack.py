"""Weights are decoded to elements while an earlier product runs, which leaves memory bandwidth unused.

A kernel that decodes weights depends on no other one, so it may run beside its predecessor instead of after it.
"""

from __future__ import annotations

from dataclasses import replace

from ....schedule.kernel import Kernel, Unpack
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite

WINDOW = 3  # products back at most: decoded weights take memory until they are used


def hoist_unpack(schedule: Schedule, dialect: Dialect) -> None:
    """Move each kernel that decodes weights behind the start of an earlier product, if kernels of the target can
    overlap. Each product hides one of them; the largest weights choose first, and take the product with the most
    operations."""
    if not dialect.overlaps:
        return
    kernels = schedule.kernels
    unpacks = [k for k in kernels if isinstance(k, Unpack)]
    products = [k for k in kernels if any(_reads(k, u) for u in unpacks)]
    behind: dict[Kernel, Unpack] = {}
    for unpack in sorted(unpacks, key=lambda u: -u.outputs[0].buffer.nbytes):
        consumer = next(n for n, k in enumerate(products) if _reads(k, unpack))
        free = [k for k in products[max(0, consumer - WINDOW) : consumer] if k not in behind]
        if free:  # the last one of equal products: memory is in use for a shorter time
            behind[max(reversed(free), key=lambda k: k.flops)] = unpack
    hoisted = set(behind.values())
    schedule.kernels = []
    for k in kernels:
        if k not in hoisted:
            schedule.kernels.append(k)
        if k in behind:
            schedule.kernels.append(replace(behind[k], early=True))


REWRITE = DialectRewrite(
    "hoist_unpack",
    "a kernel decodes weights to elements while an earlier product runs",
    hoist_unpack,
)


def _reads(kernel: Kernel, unpack: Unpack) -> bool:
    return any(o.buffer.id == unpack.outputs[0].buffer.id for o in kernel.inputs)
