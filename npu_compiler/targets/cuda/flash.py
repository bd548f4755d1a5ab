"""Attention of many queries on Hopper: sizes for ``kernels/flash_wgmma.h``."""

from __future__ import annotations

from ...schedule.anchors import Attention
from ...schedule.kernel import Operand
from ..simt.kernels.flash import flash_sizes, mask_and_positions
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, blocks
from ..simt.lang.program import TileMap
from .tile_selection import WARPGROUP

SLOTS, KEYS = 4, 128  # tiles of keys or of values in shared memory; keys of each


def supports_attention(kernel: Attention) -> bool:
    """Whether :func:`emit_wgmma_flash` supports ``kernel``: head sizes 64 and 128, and no mask other than causality and
    positions."""
    if not kernel.inputs[0].shape[2]:
        return False
    masked = len(kernel.inputs) > 3 and not kernel.by_position
    sizes = kernel.inputs[0].shape[3] == kernel.inputs[2].shape[3] in (64, 128) and kernel.splits == 1
    rows = all(s > 0 for o in kernel.inputs[:3] for s, n in zip(o.strides, o.shape, strict=True) if n > 1)
    return sizes and rows and not masked


def emit_wgmma_flash(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel for which :func:`supports_attention`."""
    f, (q, k, v), out = Function(kernel, dialect, explicit_wait=True), kernel.inputs[:3], kernel.outputs[0]
    (b, h, sq, d), positions = q.shape, mask_and_positions(kernel)[1]
    warpgroups = 2 if blocks(sq, 128) * h * b >= dialect.device.compute_units else 1
    # two warpgroups take the registers of a third one, which issues the copies
    rows, threads = 64 * warpgroups, 128 * warpgroups + (SUBGROUP if warpgroups == 1 else WARPGROUP)
    f.resident = 1
    types, sizes = flash_sizes(kernel, rows, KEYS, threads)
    tma_store = not any(s % 8 for s in (*out.strides[:3], out.offset))
    arrays = [
        f.array(types["T"], "ring", SLOTS * KEYS * d),
        f.array(types["T"], "qs", rows * d),
        f.array("int64_t", "barriers", 2 * SLOTS + 1),
        f.array("int", "limit", 2 * threads // SUBGROUP) if sizes["LIMITED"] else "nullptr",
    ]
    maps = [f.tile_map(n, _map(o, size)) for n, (o, size) in enumerate(((q, 64), (k, KEYS), (v, KEYS)))]
    maps.append(f.tile_map(~0, _map(out, 64)) if tma_store else maps[0])
    operands = [f.pointer(positions) if positions is not None else "nullptr"]
    operands.append("nullptr" if tma_store else f.pointer(~0))
    sizes = {**sizes, "WARPGROUPS": warpgroups, "SLOTS": SLOTS, "TMA_STORE": tma_store}
    f.template("flash_wgmma", "flash_wgmma.h", types, sizes, *maps, *operands, *arrays)
    return f.finish(blocks(sq, rows) * h * b, threads)


def _map(op: Operand, rows: int) -> TileMap:
    """Return the tensor map of operand [B, H, S, D] with tiles of ``rows``, as one or two blocks of 64 columns."""
    b, h, n, d = op.shape
    row, head, batch = (s * 2 if count > 1 else 16 for s, count in zip(op.strides[2::-1], (n, h, b), strict=True))
    return TileMap((64, n, d // 64, h, b), (row, 128, head, batch), (64, rows, d // 64, 1, 1), 128)
