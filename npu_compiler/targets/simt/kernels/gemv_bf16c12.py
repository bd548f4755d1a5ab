"""Products of one row with weights in bf16c12: four rows at a time, decoded in registers (``bf16c12/rows4.py``)."""

from __future__ import annotations

from ....schedule.kernel import Gemm
from ....weights.formats.bf16c12.rows4 import ROWS, FourRows
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import blocks, simds
from .gemv import Reader, Shape, instantiate

MOST_PIECES = 10  # of a thread
IN_FLIGHT = 114 << 10  # bytes on their way to a core
AHEAD = 66 << 10  # of these before the inputs are there: more would delay what the kernel before still has to write


def emit_quads(kernel: Gemm, dialect: Dialect) -> Emission:
    """The function of a product of one row with weights in bf16c12."""
    layout = FourRows(kernel.k)
    quads = blocks(kernel.n * (1 + kernel.dual), ROWS)
    shape = choose_shape(layout, quads, dialect)

    def reader(turns: int) -> Reader:
        per_core = shape.per_core if turns else 0
        if not turns and dialect.registers:
            per_core = min(blocks(quads, dialect.cores), _fit(shape.threads, 12 * shape.vectors + 20, dialect))
        ahead = min(shape.vectors, max(1, AHEAD // (3 * 16 * shape.threads * max(1, per_core))))
        sizes = dict(
            NBYTES=layout.nbytes, SCALES=layout.scales, OUTLIERS=layout.outliers, MAX_OUTLIERS=layout.max_outliers,
            PLACES=blocks(layout.max_outliers, shape.threads), AHEAD=shape.vectors if turns else ahead,
        )  # fmt: skip
        name, header = ("Rows4Fragments", "gemv_bf16c12_mma.h") if dialect.flash else ("Rows4Weights", "gemv_bf16c12.h")
        return Reader(name, "{{{0}}}", header, sizes, per_core)

    return instantiate(kernel, dialect, shape, reader)


def choose_shape(layout: FourRows, quads: int, dialect: Dialect) -> Shape:
    """Few threads without a piece, two pieces or more for each, and many threads. Groups take quads in turns if not
    all quads can be on the cores at once."""
    shapes = [(threads, blocks(layout.pieces, threads)) for threads in range(256, 0, -SIMD)]
    idle = {s: max(8 * (s[0] * s[1] - layout.pieces) - layout.pieces, 0) for s in shapes}  # beyond an eighth
    threads, vectors = min(shapes, key=lambda s: (s[1] > MOST_PIECES, idle[s], s[1] < 2, -s[0]))
    if not dialect.registers or blocks(quads, dialect.cores) <= _fit(threads, 12 * vectors + 20, dialect):
        return Shape(threads, vectors, ROWS)
    count = min(IN_FLIGHT // (2 * layout.nbytes), _fit(threads, 28 * vectors + 30, dialect))
    return Shape(threads, vectors, ROWS, count)


def _fit(threads: int, registers: int, dialect: Dialect) -> int:
    """Groups of threads with so many registers on a core; those of a quarter of it serve every fourth simd."""
    simds_of_quarter = dialect.registers // 4 // (SIMD * registers)
    return min(4 * simds_of_quarter // simds(threads), 2048 // threads, 32)
