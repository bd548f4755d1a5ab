"""Products of a batch pack their right operands themselves, instead of reading panels that a kernel before stored.

The matrices of a batch are small. Packed inside the product, they stay in the cache; a kernel of its own writes all of
them to memory, from which the product reads them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..support import dtypes
from .anchors import Gemm
from .kernel import Kernel, Operand, Pack
from .rewrite import ScheduleRewrite
from .schedule import Schedule

MOST_ROW_BYTES = 128 << 10  # of a left matrix: a block of rows, which packs the panels again, is about as large
LEAST_ROWS = 16  # by which a panel is multiplied


def pack_in_products(schedule: Schedule, packs: Callable[[str], bool]) -> None:
    """Let products of many small matrices pack their right operands if ``packs`` says so for the dtype."""
    for k in list(schedule.kernels):
        if not isinstance(k, Pack) or k.batch == 1 or not packs(k.inputs[0].dtype):
            continue
        (source,), (panels,) = k.inputs, k.outputs
        readers = [r for r in schedule.kernels if any(o.buffer is panels.buffer for o in r.inputs)]
        if len(readers) != 1 or not isinstance(readers[0], Gemm) or not _packs_itself(readers[0], panels, source):
            continue
        product = readers[0]
        at = schedule.kernels.index(k)
        between = schedule.kernels[at : schedule.kernels.index(product)]
        if not any(o.buffer is source.buffer for b in between for o in b.outputs):
            schedule.rewrite({k: (), product: (_with_source(product, k),)})


def _packs_itself(product: Gemm, panels: Operand, source: Operand) -> bool:
    """Whether a product of a batch reads ``panels`` as its right operands only, and few rows share one."""
    size = dtypes.DTYPES[source.dtype].size
    small = product.m >= LEAST_ROWS and product.m * product.k * size <= MOST_ROW_BYTES
    once = [o.buffer is panels.buffer for o in product.inputs].count(True) == 1
    plain = not product.shared and not product.dual and product.prologue is None and product.splits == 1
    dense = min(source.strides[1:]) == 1 and 0 < source.strides[0] * size < 1 << 31
    return small and once and plain and dense and product.weight.buffer is panels.buffer


def _with_source(product: Gemm, pack: Pack) -> Kernel:
    inputs = tuple(pack.inputs[0] if i == product.rhs else o for i, o in enumerate(product.inputs))
    sources = tuple(dict.fromkeys((*pack.sources, *product.sources)))
    return replace(product, inputs=inputs, sources=sources, packs=True)


def pack_in_products_if(packs: Callable[[str], bool]) -> ScheduleRewrite:
    """Return the rewrite for a target whose products pack right operands of the dtypes for which ``packs`` is true."""
    summary = "products of many small matrices pack their right operands themselves"
    return ScheduleRewrite("pack_in_products", summary, lambda schedule: pack_in_products(schedule, packs))
