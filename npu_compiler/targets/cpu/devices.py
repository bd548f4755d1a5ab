"""CPUs by instruction set: a row for each that programs are compiled for, and the CPU of this machine.

Sources: the levels of the x86-64 psABI, Intel's and AMD's software developer's manuals, the Arm Architecture Reference
Manual. The kernels choose among their own variants by the compiler's macros of the same features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ...target_config import Device, TargetConfig
from .host import HostCPU, host_cpu

CONFIG = TargetConfig("cpu", prologue_rows=4, dual_gemm=True, bundles=True)


@dataclass(frozen=True)
class CPUCosts:
    """What one core takes, in nanoseconds: estimates, on which the split of work among threads depends.

    ``op``: a scalar operation of a vectorised body; ``slow_op``: one that is computed lane by lane, or in float64.
    ``gather``: an element that is not beside its neighbour; ``bytes_per_ns``: how many bytes move where they are.
    ``row``: adding up the lanes of a row. ``chunk``: work that is worth a trip to the counter of chunks.
    ``wake_us``: microseconds in which a sleeping thread wakes up; in one, a thread that is awake computes
    ``flops_per_us`` and moves ``bytes_per_us``.
    ``winograd_flops_per_byte``: flops that take as long as reading a byte of weights, for Winograd's algorithm.
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


MEASURED = CPUCosts()  # on two cores of a Xeon with AVX-512; the others are taken to be alike


@dataclass(frozen=True)
class CPUDevice(Device):
    """A row of the table. ``machine``: 'x86_64' or 'aarch64'; empty: any. ``march``: the compiler's name of the
    instruction set, or 'native'; empty: the least that the machine has. ``features``: what code may count on, in the
    vocabulary of ``host.py``."""

    target: ClassVar[str] = "cpu"
    machine: str = ""
    march: str = ""
    features: tuple[str, ...] = ()
    costs: CPUCosts = MEASURED

    def runs_on(self, cpu: HostCPU) -> bool:
        return self.machine in ("", cpu.arch) and not cpu.missing(self.features)


_AVX2 = ("avx2", "f16c", "fma")
_AVX512 = ("avx512bw", "avx512dq", "avx512f", "avx512vl", *_AVX2)
_BF16 = ("avx512bf16", *_AVX512)
_AMX = ("amx_bf16", "amx_int8", "amx_tile", *_BF16)

# Best first.
DEVICES: tuple[CPUDevice, ...] = (
    # The kernels are those of AVX-512 with bf16.
    CPUDevice("amx", "Xeon since Sapphire Rapids", "x86_64", "sapphirerapids", _AMX),
    CPUDevice("avx512", "Zen 4, Zen 5", "x86_64", "x86-64-v4+avx512bf16", _BF16),
    CPUDevice("x86-64-v4", "AVX-512 without bf16: Skylake-X, Ice Lake", "x86_64", "x86-64-v4", _AVX512),
    CPUDevice("avx2", "Haswell, Zen and later", "x86_64", "x86-64-v3", _AVX2),
    CPUDevice("neon", "Armv8-A: Apple M, Graviton, Ampere", "aarch64", "generic", ("neon",)),
    CPUDevice("portable", "any CPU"),
)


def device_of(features: Iterable[str], machine: str) -> CPUDevice:
    """The best row whose code runs on a CPU with these features."""
    cpu = HostCPU(machine, frozenset(features), "")
    return next(d for d in DEVICES if d.runs_on(cpu))


@cache
def device_at_hand() -> CPUDevice:
    """The CPU of this machine: its row, and code for all that this very CPU has."""
    cpu = host_cpu()
    row = device_of(cpu.features, cpu.arch)
    features = tuple(sorted(cpu.features))
    return replace(row, chips=cpu.name or cpu.arch, machine=cpu.arch, march="native", features=features)
