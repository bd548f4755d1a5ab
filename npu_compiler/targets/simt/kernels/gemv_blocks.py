"""Products of one row with weights in block formats: four rows at a time, decoded in registers (``block_rows.py``)."""

from __future__ import annotations

import re

from ....schedule.anchors import Gemm
from ....weights.block_rows import PIECE, ROWS, BlockRows
from ....weights.format import WeightFormat, find_layout
from ..lang.device import GPU
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import blocks
from .gemv import Reader, Shape, instantiate
from .gemv_bf16c12 import resident

MAX_PIECES = 8  # the most pieces of a thread
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
    shape = choose_shape(kernel.k // PIECE, blocks(kernel.n * (1 + kernel.dual), ROWS), layout, dialect.device)
    fragments = dialect.fragment_access and kernel.inputs[0].dtype == "bfloat16"

    def reader(persistent: int) -> Reader:
        name, header = ("BlockFragments", "gemv_blocks_mma.h") if fragments else ("BlockWeights", "gemv_blocks.h")
        return Reader(
            name, "{{{0}}}", header, {"AHEAD": shape.vectors}, shape.per_unit if persistent else 0, elements=False,
            types={"F": format.name}, text=format_text(format, layout),
        )  # fmt: skip

    return instantiate(kernel, dialect, shape, reader)


def choose_shape(pieces: int, row_groups: int, layout: BlockRows, device: GPU) -> Shape:
    """Choose a shape with few idle threads. Workgroups are persistent if the ``row_groups`` groups of four rows do not
    fit on the SMs at once."""
    shapes = [(threads, blocks(pieces, threads)) for threads in range(256, 0, -SUBGROUP)]
    idle = {s: max(8 * (s[0] * s[1] - pieces) - pieces, 0) for s in shapes}  # beyond an eighth
    threads, vectors = min(shapes, key=lambda s: (s[1] > MAX_PIECES, idle[s], s[0]))
    each = layout.format.bits + 2 * layout.format.scale_fields[0]  # registers of a piece
    if not device.registers or blocks(row_groups, device.units) <= resident(threads, each * vectors + 40, device):
        return Shape(threads, vectors, ROWS)
    return Shape(threads, vectors, ROWS, resident(threads, 2 * each * vectors + 40, device))
