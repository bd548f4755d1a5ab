"""Weights decoded to elements: sizes for ``kernels/unpack.h``."""

from __future__ import annotations

from ....schedule.kernel import Unpack
from ....weights.block_rows import PIECE, ROWS, BlockRows
from ....weights.format import find_layout
from ....weights.formats.bf16c12.rows4 import FourRows
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype
from .gemv_blocks import format_text

THREADS = 128  # of a workgroup that decodes blocks


def emit_unpack(kernel: Unpack, dialect: Dialect) -> Emission:
    """Return the function of an ``unpack`` kernel. Weights are loaded before the wait for preceding kernels."""
    format, layout = find_layout(kernel.inputs[0].format)
    f = Function(kernel, dialect, explicit_wait=True, launch_dependents=not kernel.early)
    fours = blocks(kernel.n, ROWS)
    arguments = [f.pointer(0), f.pointer(~0)]
    sizes = dict(N=kernel.n, K=kernel.k, PIECES=kernel.k // PIECE, FOURS=fours, THREADS=THREADS, LAST=-1)
    if isinstance(layout, BlockRows):
        types = {"T": ctype(kernel.outputs[0].dtype), "F": format.name}
        f.before.append(format_text(format, layout))
        workgroups = blocks(fours * (kernel.k // PIECE), THREADS)
        sizes |= {"LAST": workgroups - 1} if kernel.early else {}
        f.template("unpack_blocks", "unpack.h", types, sizes, *arguments)
        return f.finish(workgroups, THREADS)
    four = FourRows(kernel.k)
    sizes |= dict(PLANES=four.planes, EXTRAS=four.extras, MAX_OUTLIERS=four.max_outliers)
    threads = min(range(256, 0, -SUBGROUP), key=lambda n: blocks(four.pieces, n) * n)
    tile = f.array("bf16", "tile", ROWS * PIECE * threads)
    workgroups = fours * blocks(four.pieces, threads)
    sizes |= {"THREADS": threads, "LAST": workgroups - 1 if kernel.early else -1}
    f.template("unpack_rows4", "unpack.h", {}, sizes, *arguments, tile)
    return f.finish(workgroups, threads)
