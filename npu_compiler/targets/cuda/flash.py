"""Attention of many queries on Hopper: sizes for ``kernels/flash_wgmma.h``."""

from __future__ import annotations

from ...schedule.anchors import Attention
from ...schedule.kernel import Operand
from ..simt.kernels.flash import MIN_QUERIES, flash_sizes, has_aligned_rows, has_tiles, is_flash, mask_and_positions
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks
from ..simt.lang.program import TileMap
from .tile_selection import WARPGROUP

SLOTS = 4  # tiles of keys or of values in shared memory
WIDTHS = {48: 128, 64: 128, 96: 128, 128: 128, 192: 64, 256: 64}  # of a product with values -> keys of a tile
COLUMNS = 64  # of a block: rows of 128 bytes
STORED = (64, 128)  # sizes of heads that threads store if TMA cannot


def supports_attention(kernel: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_wgmma_flash` supports ``kernel``, whose heads have up to 256 elements, as many in keys as in
    values, and is the fastest kernel that does."""
    if kernel.inputs[0].shape[2] < MIN_QUERIES or not has_tiles(kernel, dialect):
        return False
    size, out = kernel.inputs[0].shape[3], kernel.outputs[0]
    fits = size == kernel.inputs[2].shape[3] <= max(WIDTHS) and kernel.splits == 1
    by_threads = size in STORED and not any(s % 2 for s in out.strides[:3])
    stored = out.strides[3] == 1 and (has_aligned_rows(out) or by_threads)
    rows = all(s > 0 for o in kernel.inputs[:3] for s, n in zip(o.strides, o.shape, strict=True) if n > 1)
    pays = mask_and_positions(kernel)[0] is None or not is_flash(kernel, dialect) or _mask_pays(kernel)
    return fits and stored and rows and pays


def _mask_pays(kernel: Attention) -> bool:
    """Whether a masked kernel is faster here than with ``flash.h``, which loads tiles of the mask: a mask that all
    queries share is in the cache, and large heads are limited by products."""
    keys, mask = kernel.inputs[1], kernel.inputs[3]
    fills_a_tile = keys.shape[2] >= WIDTHS[COLUMNS]
    return mask.strides[2] == 0 or (keys.shape[3] > COLUMNS and fills_a_tile)


def emit_wgmma_flash(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel for which :func:`supports_attention`."""
    f, (q, k, v), out = Function(kernel, dialect, explicit_wait=True), kernel.inputs[:3], kernel.outputs[0]
    (b, h, sq, d), (mask, positions) = q.shape, mask_and_positions(kernel)
    width = next(w for w in WIDTHS if w >= d)
    keys, columns = WIDTHS[width], blocks(width, COLUMNS) * COLUMNS
    warpgroups = 2 if blocks(sq, 128) * h * b >= dialect.device.compute_units else 1
    # two warpgroups take the registers of a third one, which issues the copies
    rows, threads = 64 * warpgroups, 128 * warpgroups + (SUBGROUP if warpgroups == 1 else WARPGROUP)
    f.resident = 1
    types, sizes = flash_sizes(kernel, rows, keys, threads)
    tma_store = has_aligned_rows(out)
    arrays = [
        f.array(types["T"], "ring", SLOTS * keys * columns),
        f.array(types["T"], "qs", rows * columns),
        f.array("int64_t", "barriers", 2 * SLOTS + 1),
        f.array("int", "limit", 2 * threads // SUBGROUP) if sizes["LIMITED"] else "nullptr",
    ]
    maps = [f.tile_map(n, _map(o, size)) for n, (o, size) in enumerate(((q, 64), (k, keys), (v, keys)))]
    maps.append(f.tile_map(~0, _map(out, 64)) if tma_store else maps[0])
    operands = [f.pointer(n) if n is not None else "nullptr" for n in (mask, positions)]
    operands.append("nullptr" if tma_store else f.pointer(~0))
    own = {"D": width, "DV": width, "TILED": False, "TMA_STORE": tma_store, "WARPGROUPS": warpgroups, "SLOTS": SLOTS}
    f.template("flash_wgmma", "flash_wgmma.h", types, {**sizes, **own}, *maps, *operands, *arrays)
    return f.finish(blocks(sq, rows) * h * b, threads)


def _map(op: Operand, rows: int) -> TileMap:
    """Return the tensor map of operand [B, H, S, D] with tiles of ``rows`` and ``COLUMNS``."""
    b, h, n, d = op.shape
    row, head, batch = (s * 2 if count > 1 else 16 for s, count in zip(op.strides[2::-1], (n, h, b), strict=True))
    return TileMap((d, n, h, b), (row, head, batch), (COLUMNS, rows, 1, 1), COLUMNS * 2)
