"""Products of one row with weights in block formats: four rows at a time, decoded in registers (``block_rows.py``)."""

from __future__ import annotations

import re
from dataclasses import replace

from ....schedule.anchors import Gemm
from ....weights.block_rows import PIECE, QUAD, ROWS, BlockRows
from ....weights.format import WeightFormat, find_layout
from ..lang.device import GPU
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import blocks, subgroups
from .gemv import OTHER_REGISTERS, Reader, Shape, instantiate
from .gemv_bf16c12 import occupancy

FEW_GROUPS = 4  # of rows for each compute unit
SMALL_PIECE = 8  # registers; workgroups for such pieces have at least 96 threads
SHARING_PIECE = 6  # registers; for such pieces more subgroups share the norm in front of a product
PREFETCHED = 56  # the most registers of a thread for weights that are loaded before it waits
DECODED = 2  # pieces that are decoded before that, which takes the registers of as many others
LEFT_PIECES, QUADS = 8, 8  # of a thread, and in a subgroup, if quads have different rows
_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)


def reads_blocks(layout: str) -> bool:
    """Whether there is a reader for the layout of that name."""
    return bool(layout) and isinstance(find_layout(layout)[1], BlockRows)


def format_text(format: WeightFormat, layout: BlockRows) -> str:
    """Return the text that defines a format's type, which has its name: a header of this package, or the reader of a
    format from outside."""
    if layout.reader is None:
        return f'#include "{format.name}.h"\n'
    return _ONCE.sub("", layout.reader.read_text(encoding="utf-8"))


def emit_gemv_blocks(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a product of one row with weights in a block format."""
    format, layout = find_layout(kernel.weight.format)
    assert isinstance(layout, BlockRows)
    device, row_groups = dialect.device, blocks(kernel.n * (1 + kernel.dual), ROWS)
    shape = choose_shape(kernel.k, row_groups, layout, device)
    left = kernel.left.dtype
    fragments, exact = dialect.fragment_access and left == "bfloat16", left == "float32"
    if fragments and shape.resident:
        shape = choose_rows_shape(kernel.k, row_groups, layout, device) or shape

    def reader(persistent: int) -> Reader:
        resident, ahead = shape.resident if persistent else 0, shape.vectors
        if not persistent and device.registers:
            resident = min(blocks(row_groups, device.compute_units), _fit(shape, layout, 1, device))
            nbytes = layout.nbytes(kernel.k) // ahead * max(1, resident)
            ahead = min(ahead, max(1, min(device.prefetch_bytes // nbytes, PREFETCHED // _registers(layout))))
        decoded = 0 if persistent else min(ahead, DECODED)
        sizes = {"AHEAD": ahead, "EXACT": exact, "HALVES": persistent > 0, "DECODED": decoded}
        arrays: list[tuple[str, str, int]] = []
        if shape.left:
            name, made, header = "RowFragments", "{0}, {1}, {2}", "gemv_blocks_rows_mma.h"
            scales = 2 * subgroups(shape.threads) * _runs(layout)
            arrays = [("uint8_t", "digits", 2 * kernel.k), ("float", "scales_of_x", scales)]
        elif fragments:
            name, made, header = "BlockFragments", "{{{0}}}", "gemv_blocks_mma.h"
        else:
            name, made, header = "BlockWeights", "{{{0}}}", "gemv_blocks.h"
        return Reader(
            name, made, header, sizes, resident, types={"F": format.name}, text=format_text(format, layout),
            shares=fragments and not shape.left and _registers(layout) <= SHARING_PIECE, settles=True, arrays=arrays,
        )  # fmt: skip

    return instantiate(kernel, dialect, shape, reader)


def choose_shape(k: int, row_groups: int, layout: BlockRows, device: GPU) -> Shape:
    """Choose a shape for ``row_groups`` groups of four rows of ``k`` columns. Few groups are divided among many
    threads. For many, workgroups are small, and persistent if the groups do not fit on the device at once."""
    pieces, few = k // PIECE, row_groups <= FEW_GROUPS * device.compute_units
    least = 96 if not few and _registers(layout) <= SMALL_PIECE and pieces >= 96 else SUBGROUP
    threads_of = range(160 if few else 256, least - 1, -SUBGROUP)
    shapes = [Shape(threads, blocks(pieces, threads), ROWS) for threads in threads_of]

    def cost(s: Shape) -> tuple[bool, int, bool, int]:
        idle = max(8 * (s.threads * s.vectors - pieces) - pieces, 0)  # beyond an eighth
        return s.vectors > (8 if few else 4), idle, s.vectors < 2, -s.threads if few else s.threads

    shape = min(shapes, key=cost)
    if few or not device.registers or blocks(row_groups, device.compute_units) <= _fit(shape, layout, 1, device):
        return shape
    in_flight = device.gemv_blocks_bytes // (2 * layout.nbytes(k))
    return replace(shape, resident=min(in_flight, _fit(shape, layout, 2, device)))


def choose_rows_shape(k: int, row_groups: int, layout: BlockRows, device: GPU) -> Shape | None:
    """Choose a shape of persistent workgroups in which each quad of lanes has its own rows, or None for formats and
    sizes that it does not support or is slower for.

    Codes of bytes are stored row by row, so that a quad loads few neighbours (a step with fp8 takes 1.14 of the time).
    A workgroup waits for its slowest subgroup at every tile, which another workgroup of the compute unit has to hide.
    Some workgroups compute one tile more than others, so there must be many tiles."""
    f, columns = layout.format, LEFT_PIECES * QUAD
    if f.bits != 4 or 0 < f.sub_block < QUAD or (f.head_fields and f.block < columns) or k % columns:
        return None
    threads, rows = k // columns * SUBGROUP, QUADS * ROWS
    runs = _runs(layout)
    scales = sum(f.scale_fields) * (runs if runs <= 2 else runs // 4)
    weights = LEFT_PIECES * f.bits + scales + sum(f.head_fields)
    fit = occupancy(threads, 2 * weights + LEFT_PIECES * 4 + OTHER_REGISTERS, device)
    resident = min(fit, device.gemv_blocks_bytes // (2 * QUADS * layout.nbytes(k)))
    if resident < 2 or row_groups < FEW_GROUPS * QUADS * device.compute_units:
        return None
    return Shape(threads, LEFT_PIECES, rows, resident, left=1)


def _runs(layout: BlockRows) -> int:
    """Return the number of sub-blocks in the columns of a subgroup, if quads have different rows."""
    columns = LEFT_PIECES * QUAD
    return columns // min(columns, layout.format.sub_block or columns)


def _fit(shape: Shape, layout: BlockRows, tiles: int, device: GPU) -> int:
    """Return how many workgroups fit on a compute unit if each has the weights of ``tiles`` tiles in registers."""
    other = 32 if tiles > 1 else 20  # registers besides weights and left operand
    return occupancy(shape.threads, shape.vectors * (tiles * _registers(layout) + 5) + other, device)


def _registers(layout: BlockRows) -> int:
    """Return the registers of a piece with its scales."""
    f = layout.format
    scales = sum(f.scale_fields) * max(1, QUAD // f.sub_block) if f.sub_block else 0
    return f.bits + scales + sum(f.head_fields)
