"""Attention of many float32 queries on the matrix unit: sizes for ``kernels/flash_tf32.h``."""

from __future__ import annotations

from ...schedule.anchors import Attention
from ..simt.kernels.flash import MIN_QUERIES, flash_sizes, has_aligned_rows, mask_and_positions
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks

MAX_SIZE = 128  # of a head: the results of 16 rows stay in the registers of a subgroup
ROWS, KEYS, SUBGROUPS = 64, 32, 4


def supports_float32(kernel: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_flash_tf32` supports ``kernel``: at least ``MIN_QUERIES`` float32 queries, heads of up to
    ``MAX_SIZE`` elements, in rows at multiples of 16 bytes."""
    (q, k, v), out = kernel.inputs[:3], kernel.outputs[0]
    same = all(o.dtype == "float32" for o in (q, k, v, out)) and kernel.splits == 1 and not kernel.scaled
    fits = max(q.shape[3], v.shape[3]) <= MAX_SIZE and q.shape[3] % 4 == v.shape[3] % 8 == 0
    rows = all(o.strides[3] == 1 and has_aligned_rows(o) for o in (q, k, v))
    stored = out.strides[3] == 1 and not any(s % 2 for s in (*out.strides[:3], out.offset))
    return bool(dialect.matrix_tf32) and same and fits and rows and stored and q.shape[2] >= MIN_QUERIES


def emit_flash_tf32(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel for which :func:`supports_float32`."""
    f, q, threads = Function(kernel, dialect, explicit_wait=True), kernel.inputs[0], SUBGROUPS * SUBGROUP
    mask, positions = mask_and_positions(kernel)
    types, sizes = flash_sizes(kernel, ROWS, KEYS, threads)
    key_pitch, value_pitch = int(sizes["D"]) + 16, int(sizes["DV"]) + 4
    lengths = {"qs": ROWS * key_pitch, "ks": 2 * KEYS * key_pitch, "vs": 2 * KEYS * value_pitch}
    arrays = [f.array("float", name, length) for name, length in lengths.items()]
    arrays.append(f.array("int", "limit", 2 * SUBGROUPS) if sizes["LIMITED"] else "nullptr")
    operands = [f.pointer(n) if n is not None else "nullptr" for n in (0, 1, 2, mask, positions, ~0)]
    f.template("flash_tf32", "flash_tf32.h", types, {**sizes, "TILED": False}, *operands, *arrays)
    return f.finish(blocks(q.shape[2], ROWS) * q.shape[1] * q.shape[0], threads)
