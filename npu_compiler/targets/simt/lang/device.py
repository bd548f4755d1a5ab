"""Properties of a GPU that the SIMT kernels depend on. A compute unit is a streaming multiprocessor (SM) of
NVIDIA, or a GPU core of Apple."""

from __future__ import annotations

from dataclasses import dataclass

from ....target_config import ALL_REAL, Device, TargetConfig

# The limits that all GPU targets share; each has its own name and more.
GPU_CONFIG = TargetConfig(
    "gpu", panel=0, buffer_align=256, dtypes=ALL_REAL, max_head_dim=256, pair_dtypes=(), prologue_rows=1,
    dual_gemm=True, bundles=True, scans_pairs=True,
)  # fmt: skip


@dataclass(frozen=True)
class WgmmaCosts:
    """Costs in microseconds of a tile of a matrix product that warpgroups compute (``wgmma``) from shared memory.

    ``step``: 64 terms of the largest tile. ``rates``: (results of a tile, its rate as a fraction of the largest
    tile's); ``rate``: that of all other tiles. ``result``: storing one result. ``start``: the fixed cost of a tile.
    """

    step: float
    rates: tuple[tuple[int, float], ...]
    rate: float
    result: float
    start: float


@dataclass(frozen=True)
class GPU(Device):
    """A GPU.

    ``compute_units``: their number. ``shared_bytes``: shared memory that a workgroup may use. ``registers``: 32-bit
    registers of a compute unit; 0: unknown, and then no kernel uses persistent workgroups. ``threads``, ``workgroups``:
    the most that are resident on a compute unit. ``gemv_bytes``, ``gemv_bf16c12_bytes``, ``gemv_blocks_bytes``: bytes
    of weights, plain, compressed and in block formats, that a compute unit must have in flight to saturate the memory
    bandwidth. ``prefetch_bytes``: how many of these are prefetched before the predecessor finishes; prefetching more
    steals its write bandwidth. ``wgmma``: costs of the warpgroups' matrix unit; None: there is none.
    """

    compute_units: int = 1
    shared_bytes: int = 32 << 10
    registers: int = 0
    threads: int = 2048
    workgroups: int = 32
    gemv_bytes: int = 120 << 10
    gemv_bf16c12_bytes: int = 114 << 10
    gemv_blocks_bytes: int = 124 << 10
    prefetch_bytes: int = 66 << 10
    wgmma: WgmmaCosts | None = None
