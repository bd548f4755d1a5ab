"""Products of one row with weights in bf16c12: four rows at a time, decoded in registers (``bf16c12/rows4.py``)."""

from __future__ import annotations

from ....schedule.anchors import Gemm
from ....weights.block_rows import ROWS
from ....weights.formats.bf16c12.rows4 import FourRows
from ..lang.device import GPU
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import blocks, subgroups
from .gemv import Reader, Shape, instantiate

MAX_PIECES = 10  # the most pieces of a thread


def emit_gemv_bf16c12(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a product of one row with weights in bf16c12."""
    layout, device = FourRows(kernel.k), dialect.device
    row_groups = blocks(kernel.n * (1 + kernel.dual), ROWS)
    shape = choose_shape(layout, row_groups, device)

    def reader(persistent: int) -> Reader:
        resident = shape.resident if persistent else 0
        if not persistent and device.registers:
            fit = occupancy(shape.threads, 12 * shape.vectors + 20, device)
            resident = min(blocks(row_groups, device.compute_units), fit)
        piece = 3 * 16 * shape.threads * max(1, resident)
        ahead = min(shape.vectors, max(1, device.prefetch_bytes // piece))
        sizes = dict(
            PLANES=layout.planes, EXTRAS=layout.extras, MAX_OUTLIERS=layout.max_outliers,
            PLACES=blocks(layout.max_outliers, shape.threads), AHEAD=shape.vectors if persistent else ahead,
        )  # fmt: skip
        name, header = "Rows4Weights", "gemv_bf16c12.h"
        if dialect.fragment_access:
            name, header = "Rows4Fragments", "gemv_bf16c12_mma.h"
        whole = ahead == shape.vectors  # all weights are requested early
        return Reader(
            name, "{{{0}}}", header, sizes, resident, elements=True, shares=dialect.fragment_access, settles=whole
        )

    return instantiate(kernel, dialect, shape, reader)


def choose_shape(layout: FourRows, row_groups: int, device: GPU) -> Shape:
    """Choose a shape with few idle threads, two or more pieces per thread, and many threads. Workgroups are persistent
    if the ``row_groups`` groups of four rows do not fit on the device at once."""
    shapes = [(threads, blocks(layout.pieces, threads)) for threads in range(256, 0, -SUBGROUP)]
    idle = {s: max(8 * (s[0] * s[1] - layout.pieces) - layout.pieces, 0) for s in shapes}  # beyond an eighth
    threads, vectors = min(shapes, key=lambda s: (s[1] > MAX_PIECES, idle[s], s[1] < 2, -s[0]))
    needed = blocks(row_groups, device.compute_units)
    if not device.registers or needed <= occupancy(threads, 12 * vectors + 20, device):
        return Shape(threads, vectors, ROWS)
    count = min(device.gemv_bf16c12_bytes // (2 * layout.nbytes), occupancy(threads, 28 * vectors + 30, device))
    return Shape(threads, vectors, ROWS, count)


def occupancy(threads: int, registers: int, device: GPU) -> int:
    """Return how many workgroups of ``threads`` fit on a compute unit, with ``registers`` per thread. A quarter of
    its registers serves every fourth subgroup."""
    subgroups_per_quarter = device.registers // 4 // (SUBGROUP * registers)
    return min(4 * subgroups_per_quarter // subgroups(threads), device.threads // threads, device.workgroups)
