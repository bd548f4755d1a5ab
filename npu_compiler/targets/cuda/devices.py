"""NVIDIA's GPUs: one row for each architecture that programs are compiled for, and the GPU of this machine.

Shared memory, registers and resident threads are those of the CUDA C++ Programming Guide ("Technical Specifications per
Compute Capability"), SMs and bandwidths those of NVIDIA's architecture white papers and data sheets. Costs are
measured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from ...support.dtypes import FLOAT8
from ...support.errors import ConfigError
from ...target_config import Roofline, TargetConfig, devices
from ..simt.lang.device import GPU, GPU_CONFIG, WgmmaCosts

Capability = tuple[int, int]

CONFIG = replace(
    GPU_CONFIG,
    name="cuda",
    matrix_dtypes=(*GPU_CONFIG.matrix_dtypes, "uint8"),
    bundle_points=1 << 22,
    image_row=32,
    chunks=(128, 512, 2048),
    chunk_floor=256,
    asynchronous=True,
    float32_precisions=("highest", "tf32"),
)


@dataclass(frozen=True)
class TMACosts:
    """Costs of a product whose operands TMA loads, in microseconds of an SM unless said otherwise. Elements have two
    bytes.

    ``multiply``: one pair of elements. ``decode``: one column of 64 weights in a block format; ``decode_rows4``: in
    bf16c12. ``narrow``: the factor for tiles of 64 columns, for which wgmma is limited by shared memory. ``load``: one
    row or column of a stage of 64 terms. ``split``: what a stage takes longer if its floats are split. ``result``,
    ``residual``: one element that threads store or read. ``part``: one element that the blocks of a cluster exchange.
    ``tile``, ``launch``: the fixed costs of a tile and of a launch. ``tma_result``, ``tma_residual``, ``tma_tile``: the
    same for results that TMA stores; ``tma_last``: one element if each thread block has one tile, so that no other
    hides its store. ``byte_result``, ``byte_residual``, ``byte_tile``: the same for those of one byte.
    Requantising them limits their kernels, so no other tile of the SM hides the fixed cost of one. ``byte_serial``: the
    fraction of the shorter of a tile's two parts, products and results, that does not overlap with the longer one.
    ``cluster``: (blocks of a cluster, delay until so many neighbouring SMs are free). ``bandwidth``: bytes per
    microsecond of device memory. ``latency``: of a load from device memory. ``start``: time at the beginning and end of
    a kernel in which memory is idle.
    """

    multiply: float
    decode: float
    decode_rows4: float
    narrow: float
    load: float
    split: float
    result: float
    residual: float
    part: float
    tile: float
    launch: float
    tma_result: float
    tma_residual: float
    tma_tile: float
    tma_last: float
    byte_result: float
    byte_residual: float
    byte_tile: float
    byte_serial: float
    cluster: tuple[tuple[int, float], ...]
    bandwidth: float
    latency: float
    start: float


@dataclass(frozen=True)
class CUDADevice(GPU):
    """A row of the table.

    ``arch``: the compiler's name of the architecture. Code for an architecture whose name ends in 'a' runs only on that
    one; other code also runs on later ones. ``shared_per_sm``: bytes of shared memory of an SM. ``clusters``: (blocks
    of a cluster, blocks that run at once in such clusters). ``tma``: costs of kernels that use TMA and wgmma; None: the
    device has neither.
    """

    target: ClassVar[str] = "cuda"
    arch: str = ""
    shared_per_sm: int = 0
    clusters: tuple[tuple[int, int], ...] = ()
    tma: TMACosts | None = None

    @property
    def capability(self) -> Capability:
        """The compute capability, such as (9, 0)."""
        return capability_of(self.arch)

    def configured(self, config: TargetConfig) -> TargetConfig:
        found = super().configured(config)
        return replace(found, matrix_dtypes=(*found.matrix_dtypes, FLOAT8)) if self.tma is not None else found

    def with_sms(self, count: int) -> CUDADevice:
        """Return the same architecture with ``count`` SMs, and proportionally many clusters."""
        clusters = tuple((size, blocks * count // self.compute_units // size * size) for size, blocks in self.clusters)
        roofline = self.roofline
        if roofline is not None:
            flops = {dtype: rate * count / self.compute_units for dtype, rate in roofline.flops.items()}
            roofline = replace(roofline, flops=flops)
        return replace(self, compute_units=count, clusters=clusters, roofline=roofline)


# Fitted to 1100 measured variants on an H200. In a microsecond an SM multiplies 48,300 pairs of elements, loads 91 KB,
# stores 28,000 results, reads 20,000 residuals, or exchanges 6,200 partial sums.
_HOPPER_TMA = TMACosts(
    multiply=2.07e-5, decode=1.5e-3, decode_rows4=8e-4, narrow=1.5, load=1.4e-3, split=0.2, result=3.6e-5,
    residual=4.9e-5, part=1.6e-4, tile=1.55, launch=0.75, tma_result=4e-5, tma_residual=2e-6, tma_tile=0.19,
    tma_last=1e-4, byte_result=5e-5, byte_residual=3e-5, byte_tile=0.1, byte_serial=0.3,
    cluster=((2, 0.0), (4, 0.3), (8, 2.0)), bandwidth=4.6e6, latency=1.2, start=2.5,
)  # fmt: skip
_HOPPER_WGMMA = WgmmaCosts(
    step=1.05, rates=((128 * 256, 1.0), (128 * 128, 0.8), (128 * 64, 0.75)), rate=0.7, result=3 / 32768, start=2.0
)
_SHEET = "the maker's data sheet: dense products, accumulated in float32"
_SM_80 = CUDADevice(
    # A block may use 163 KB on an A100. Later chips that run the same code offer 99 KB.
    "sm_80", "A100", arch="sm_80", compute_units=108, shared_bytes=99 << 10, shared_per_sm=164 << 10, registers=1 << 16,
    roofline=Roofline.of(2.04, _SHEET, float16=312, bfloat16=312, int8=624, float32=19.5, float64=9.7),
)  # fmt: skip
_SM_86 = CUDADevice(
    "sm_86", "RTX 30, A10, A40", arch="sm_86", compute_units=84, shared_bytes=99 << 10, shared_per_sm=100 << 10,
    registers=1 << 16, threads=1536, workgroups=16,
    roofline=Roofline.of(0.696, _SHEET, float16=149.7, bfloat16=149.7, int8=299.3, float32=37.4, float64=0.58),  # A40
)  # fmt: skip
_SM_90 = CUDADevice(
    # An H100 (SXM) only differs in its bandwidth, 3.35 TB/s, and uses the tiles of the H200.
    "sm_90", "H100, H200", arch="sm_90a", compute_units=132, shared_bytes=227 << 10, shared_per_sm=228 << 10,
    registers=1 << 16, clusters=((2, 132), (4, 112), (8, 96)), wgmma=_HOPPER_WGMMA, tma=_HOPPER_TMA,
    roofline=Roofline.of(  # H200
        4.8, _SHEET, float16=989, bfloat16=989, int8=1979, float8_e4m3fn=1979, float32=67, float64=34,
    ),
)  # fmt: skip

# The first row of an architecture is used for chips that have no row.
DEVICES: tuple[CUDADevice, ...] = (
    _SM_80,
    _SM_86,
    replace(
        _SM_86,
        name="sm_89",
        chips="RTX 40, L4, L40",
        arch="sm_89",
        compute_units=128,
        workgroups=24,
        roofline=Roofline.of(
            1.008, _SHEET, float16=165.2, bfloat16=165.2, int8=660.6, float32=82.6, float64=1.29
        ),  # RTX 4090
    ),
    _SM_90,
    replace(
        _SM_90.with_sms(114),
        name="h100-pcie",
        chips="H100 PCIe",
        tma=replace(_HOPPER_TMA, bandwidth=1.9e6),
        roofline=Roofline.of(
            2.0, _SHEET, float16=756, bfloat16=756, int8=1513, float8_e4m3fn=1513, float32=51, float64=26
        ),
    ),
    # Later architectures have other matrix units, for which there are no kernels. They use those of sm_80.
    replace(
        _SM_80,
        name="sm_100",
        chips="B200",
        arch="sm_100",
        compute_units=148,
        shared_per_sm=228 << 10,
        roofline=Roofline.of(8.0, _SHEET, float16=2250, bfloat16=2250, int8=4500, float32=75, float64=37),
    ),
    replace(
        _SM_86,
        name="sm_120",
        chips="RTX 50",
        arch="sm_120",
        compute_units=170,
        workgroups=24,
        roofline=Roofline.of(
            1.792, _SHEET, float16=209.5, bfloat16=209.5, int8=838, float32=104.8, float64=1.64
        ),  # RTX 5090
    ),
)
DEFAULT = _SM_90  # on machines without a GPU


def rows() -> list[CUDADevice]:
    """Return the rows of the table, and those that were registered."""
    return [d for d in devices("cuda") if isinstance(d, CUDADevice)]


def arch_of(capability: Capability) -> str:
    """Return the compiler's name for GPUs of a compute capability: that of their row, else 'sm_87' for (8, 7)."""
    found = (d.arch for d in rows() if d.capability == capability)
    return next(found, f"sm_{capability[0]}{capability[1]}")


def capability_of(arch: str) -> Capability:
    """Return the compute capability of an architecture: (8, 6) for 'sm_86'."""
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number[:-1]), int(number[-1])


def too_old(capability: Capability) -> str | None:
    """Return the reason why kernels cannot run on a GPU of this compute capability, or None if they can."""
    oldest = min(rows(), key=lambda d: d.capability)
    if capability >= oldest.capability:
        return None
    has, least = (f"{major}.{minor}" for major, minor in (capability, oldest.capability))
    return f"has compute capability {has}; the oldest that is supported is {least} ({oldest.name}: {oldest.chips})"


def row_for(capability: Capability, sms: int = 0) -> CUDADevice:
    """Return the row for GPUs of this compute capability, or of the newest architecture before it. If there are
    several, the one with ``sms`` SMs is preferred."""
    known = rows()
    oldest = min(d.capability for d in known)
    best = max((d.capability for d in known if d.capability <= capability), default=oldest)
    found = [d for d in known if d.capability == best]
    return next((d for d in found if d.compute_units == sms), found[0])


def device_for(capability: Capability, sms: int) -> CUDADevice:
    """Return the device for a GPU with this compute capability and ``sms`` SMs. Raises ``ConfigError`` if it is too
    old."""
    problem = too_old(capability)
    if problem is not None:
        raise ConfigError(f"the GPU of this machine {problem}; --target {DEVICES[0].spec} compiles for another one")
    row = row_for(capability, sms)
    if row.capability != capability:
        arch = arch_of(capability)
        row = replace(row, name=arch, chips="", arch=arch, roofline=None)
    return row if row.compute_units == sms else row.with_sms(sms)


def device_at_hand() -> CUDADevice:
    """Return the first GPU of this machine, or :data:`DEFAULT` if it has none. Raises ``ConfigError`` if the GPU is too
    old."""
    found = present()
    return DEFAULT if found is None else device_for(*found)


_COMPUTE_MAJOR, _COMPUTE_MINOR, _MULTIPROCESSORS = 75, 76, 16  # CU_DEVICE_ATTRIBUTE_*


@cache
def present() -> tuple[Capability, int] | None:
    """Return (compute capability, number of SMs) of the first GPU that this process may use, or None if there is no
    driver or no GPU."""
    library = _library()
    count, device = ctypes.c_int(), ctypes.c_int()
    if library is None or library.cuInit(ctypes.c_uint(0)):
        return None
    if library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    failed = library.cuDeviceGet(ctypes.byref(device), 0)
    values = []
    for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR, _MULTIPROCESSORS):
        value = ctypes.c_int()
        failed = failed or library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return None if failed else ((values[0], values[1]), values[2])


def _library() -> Any:
    """Return NVIDIA's driver library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
