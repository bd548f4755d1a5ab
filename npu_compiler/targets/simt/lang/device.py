"""What the SIMT kernels ask about a GPU. A unit is a streaming multiprocessor (NVIDIA) or a GPU core (Apple)."""

from __future__ import annotations

from dataclasses import dataclass

from ....target_config import Device


@dataclass(frozen=True)
class WgmmaCosts:
    """Microseconds of a tile of a product that warpgroups multiply (``wgmma``) from shared memory.

    ``step``: 64 terms of the largest tile; ``rates``: how fast smaller ones are multiplied, as (results of the tile,
    fraction of the largest tile's rate), and ``rate`` for all others. ``result``: storing one. ``start``: once.
    """

    step: float
    rates: tuple[tuple[int, float], ...]
    rate: float
    result: float
    start: float


@dataclass(frozen=True)
class GPU(Device):
    """A GPU as its kernels see it.

    ``units``: how many there are. ``shared_bytes``: shared memory that a workgroup may use. ``registers``: 32-bit ones
    of a unit; 0: the maker does not tell, so that no kernel counts on workgroups that stay on their unit.
    ``threads``, ``workgroups``: the most that are on a unit at once.
    ``gemv_bytes``, ``gemv_bf16c12_bytes``: bytes of weights, plain and compressed, that a unit must have requested to
    keep memory busy. ``prefetch_bytes``: how many of these before the kernel's predecessor ends: prefetching more
    steals the predecessor's write bandwidth. ``wgmma``: costs of the warpgroups' matrix unit, if there is one.
    """

    units: int = 1
    shared_bytes: int = 32 << 10
    registers: int = 0
    threads: int = 2048
    workgroups: int = 32
    gemv_bytes: int = 120 << 10
    gemv_bf16c12_bytes: int = 114 << 10
    prefetch_bytes: int = 66 << 10
    wgmma: WgmmaCosts | None = None
