"""CPUs by instruction set: one row for each that programs are compiled for, and the CPU of this machine.

Sources: the levels of the x86-64 psABI, Intel's and AMD's software developer's manuals, the Arm Architecture Reference
Manual. The kernels select their variants by the macros that the compiler predefines for the same features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ...target_config import ALL_REAL, Device, TargetConfig
from .host import HostCPU, host_cpu

CONFIG = TargetConfig(
    "cpu",
    vector_lanes=16,
    dtypes=ALL_REAL,
    prologue_rows=4,
    dual_gemm=True,
    bundles=True,
    residuals_in_place=True,
    scans_pairs=True,
    matrix_dtypes=("float64", "float32", "float16", "bfloat16", "uint8"),
    max_head_dim=512,
)


@dataclass(frozen=True)
class CPUCosts:
    """Estimated costs on one core, which decide how work is divided among threads. Times are in nanoseconds.

    ``op``: one scalar operation of a vectorised body. ``slow_op``: one that is computed lane by lane, or in float64.
    ``bytes_per_ns``: bytes of contiguous accesses per nanosecond. ``gather``: one element of any other access.
    ``row``: the horizontal reduction at the end of a row. ``chunk``: the smallest amount of work worth claiming.
    ``wake_us``: microseconds until a sleeping thread runs. ``flops_per_us``, ``bytes_per_us``: what one thread computes
    and moves in a microsecond. ``winograd_flops_per_byte``: flops that take as long as reading one byte of weights, in
    the cost models of Winograd's algorithm and of limbs (``limbs.py``). ``bfloat16_rate``: how many times as fast as
    float32 products those of bfloat16 run. ``lanes``: numbers of 32 bits in a vector register.
    """

    op: float = 0.016
    slow_op: float = 6.0
    bytes_per_ns: float = 40
    gather: float = 0.7
    row: float = 8.0
    chunk: float = 6000.0
    wake_us: float = 20
    flops_per_us: float = 20e3
    bytes_per_us: float = 10e3
    winograd_flops_per_byte: float = 10
    bfloat16_rate: float = 1
    lanes: int = 16


MEASURED = CPUCosts()  # measured on two cores of a Xeon with AVX-512, and used for all CPUs
_FAST_DOT = replace(MEASURED, bfloat16_rate=2)  # `vdpbf16ps` at the rate of a float32 FMA
_MEDIUM, _SHORT = replace(MEASURED, lanes=8), replace(MEASURED, lanes=4)
_TILES = replace(MEASURED, bfloat16_rate=16, winograd_flops_per_byte=15)  # 1024 operations in a cycle


@dataclass(frozen=True)
class CPUDevice(Device):
    """A row of the table.

    ``machine``: 'x86_64' or 'aarch64'; empty: any. ``system``: a value of ``sys.platform``; empty: any. ``march``: the
    compiler's name of the instruction set, or 'native'; empty: the baseline of the machine. ``features``: the CPU
    features that code may use, named as in ``host.py``. ``flags``: more flags for the compiler. ``maker``: a word in
    the model names of the CPUs that the row suits best; empty: any.
    """

    target: ClassVar[str] = "cpu"
    machine: str = ""
    march: str = ""
    features: tuple[str, ...] = ()
    system: str = ""
    costs: CPUCosts = MEASURED
    flags: tuple[str, ...] = ()
    maker: str = ""

    def runs_on(self, cpu: HostCPU) -> bool:
        """Whether code for this device runs on ``cpu`` under the system of this process."""
        here = self.machine in ("", cpu.arch) and self.system in ("", sys.platform)
        return here and not cpu.missing(self.features)


_AVX2 = ("avx2", "f16c", "fma")
_AVX512 = ("avx512bw", "avx512dq", "avx512f", "avx512vl", *_AVX2)
_BF16 = ("avx512bf16", *_AVX512)
_AMX = ("amx_bf16", "amx_int8", "amx_tile", *_BF16)
_NEON = ("neon",)
_ARMV8_2 = ("dotprod", "fp16", "lse", *_NEON)
_ARMV8_6 = ("bf16", "i8mm", *_ARMV8_2)

# Best first.
DEVICES: tuple[CPUDevice, ...] = (
    CPUDevice(
        "amx",
        "Xeon since Sapphire Rapids",
        "x86_64",
        "sapphirerapids",
        _AMX,
        costs=_TILES,
        chunks=(32, 128, 512),  # tiles multiply 128 tokens in the time in which weights are read and unpacked
    ),
    CPUDevice(
        "cooperlake",
        "Intel, AVX-512 with bf16, without AMX",
        "x86_64",
        "cooperlake",
        _BF16,
        flags=("-DNPU_SLOW_BF16_DOT=1",),
        maker="Intel",
    ),
    CPUDevice("avx512", "Zen 4, Zen 5", "x86_64", "x86-64-v4+avx512bf16", _BF16, costs=_FAST_DOT),
    CPUDevice("x86-64-v4", "AVX-512 without bf16: Skylake-X, Ice Lake", "x86_64", "x86-64-v4", _AVX512),
    CPUDevice("avx2", "Haswell, Zen and later", "x86_64", "x86-64-v3", _AVX2, costs=_MEDIUM),
    CPUDevice("apple-m2", "M2 and later, macOS", "aarch64", "apple-m2", _ARMV8_6, "darwin", costs=_SHORT),
    CPUDevice("apple-m1", "M1, macOS", "aarch64", "apple-m1", _ARMV8_2, "darwin", costs=_SHORT),
    CPUDevice("armv8.6", "Graviton 3, Grace", "aarch64", "generic+bf16+dotprod+fp16+i8mm+lse", _ARMV8_6, costs=_SHORT),
    CPUDevice("armv8.2", "Graviton 2, Ampere Altra", "aarch64", "generic+dotprod+fp16+lse", _ARMV8_2, costs=_SHORT),
    CPUDevice("neon", "any Armv8-A", "aarch64", "generic", _NEON, costs=_SHORT),
    CPUDevice("portable", "any CPU", costs=_SHORT),
)


def device_of(features: Iterable[str], machine: str, name: str = "") -> CPUDevice:
    """Return the best row whose code runs on a CPU with ``features``; ``machine`` is 'x86_64' or 'aarch64', ``name``
    the CPU's model name."""
    cpu = HostCPU(machine, frozenset(features), name)
    return next(d for d in DEVICES if d.runs_on(cpu) and d.maker in name)


@cache
def device_at_hand() -> CPUDevice:
    """Return the best row for the CPU of this machine, with all features of this CPU and ``march`` 'native'."""
    cpu = host_cpu()
    row = device_of(cpu.features, cpu.arch, cpu.name)
    features = tuple(sorted(cpu.features))
    return replace(row, chips=cpu.name or cpu.arch, machine=cpu.arch, march="native", features=features)
