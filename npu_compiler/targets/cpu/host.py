"""The CPU features that a CPU has and that a compiled object needs, under the same names.

Feature names are those of /proc/cpuinfo with two changes: ``avx...`` names have no underscore (``avx512bf16``), and the
compilers' name is used where Linux has an older one (``sse3``, ``lzcnt``, ``neon``, ``lse``).
"""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ALIASES = {
    "pni": "sse3",
    "abm": "lzcnt",
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "asimdrdm": "rdm",
    "atomics": "lse",
    # sysctl on a Mac
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "avx1.0": "avx",
}

# A compiler's predefined macro -> the feature that code compiled with it may use. The table has only features whose
# instructions compilers emit on their own, not those that need intrinsics (cryptography, transactions, ...).
MACRO_FEATURES = {
    "__SSE3__": "sse3",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__LZCNT__": "lzcnt",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__MOVBE__": "movbe",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__GFNI__": "gfni",
    "__AVXVNNI__": "avxvnni",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512vbmi2",
    "__AVX512VNNI__": "avx512vnni",
    "__AVX512BITALG__": "avx512bitalg",
    "__AVX512VPOPCNTDQ__": "avx512vpopcntdq",
    "__AVX512BF16__": "avx512bf16",
    "__AVX512FP16__": "avx512fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
    "__AMX_INT8__": "amx_int8",
    "__ARM_NEON": "neon",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "fp16",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_DOTPROD": "dotprod",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_ATOMICS": "lse",
    "__ARM_FEATURE_QRDMX": "rdm",
    "__ARM_FEATURE_COMPLEX": "fcma",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


@dataclass(frozen=True)
class HostCPU:
    """A CPU. ``arch``: 'x86_64', 'aarch64', or the system's name for another architecture. ``name``: its model name.
    ``refused``: features of the CPU that the system does not let this process use; ``features`` has the others."""

    arch: str
    features: frozenset[str]
    name: str
    refused: frozenset[str] = frozenset()

    def missing(self, required: Iterable[str]) -> list[str]:
        """Return the features in ``required`` that this CPU lacks, sorted. Empty: an object that needs them runs."""
        return sorted(set(required) - self.features)


def normalise(name: str) -> str:
    """Return the name that this module uses for a feature, from that of /proc/cpuinfo or sysctl."""
    name = name.lower()
    name = _ALIASES.get(name, name)
    return name.replace("_", "") if name.startswith("avx") else name


def parse_cpuinfo(text: str) -> tuple[frozenset[str], str]:
    """Return (features that *all* listed cores have, model name) from the text of /proc/cpuinfo."""
    common: frozenset[str] | None = None
    name = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = frozenset(normalise(flag) for flag in value.split())
            common = flags if common is None else common & flags
        elif key.strip() == "model name" and not name:
            name = value.strip()
    return common or frozenset(), name


def _sysctl(*names: str) -> dict[str, str]:
    run = subprocess.run(["sysctl", *names], capture_output=True, text=True, timeout=10, check=False)
    pairs = (line.partition(": ") for line in run.stdout.splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _mac_cpu() -> tuple[frozenset[str], str]:
    values = _sysctl("machdep.cpu", "hw.optional")
    names = [key.rpartition(".FEAT_")[2] for key, value in values.items() if ".FEAT_" in key and value == "1"]
    for key in ("features", "leaf7_features", "extfeatures"):
        names += values.get(f"machdep.cpu.{key}", "").split()
    if platform.machine() == "arm64":
        names.append("neon")
    return frozenset(map(normalise, names)), values.get("machdep.cpu.brand_string", "")


@cache
def _tiles_granted() -> bool:
    """Whether Linux lets this process use the tile registers of AMX. A program asks again when it is loaded."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@cache
def host_cpu() -> HostCPU:
    """Return the CPU of this machine. On systems that list no features they are empty, and kernels are portable."""
    arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        features, name = parse_cpuinfo(cpuinfo.read_text(errors="replace"))
    elif sys.platform == "darwin":
        features, name = _mac_cpu()
    else:
        features, name = frozenset[str](), ""
    refused = frozenset(f for f in features if f.startswith("amx_") and not _tiles_granted())
    return HostCPU(arch, features - refused, name, refused)


_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
_MACHO_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_MACHO_MAGIC = b"\xcf\xfa\xed\xfe"


def object_kind(binary: bytes) -> tuple[str, str]:
    """Return (system, architecture) of an object file, such as ('linux', 'x86_64'); empty strings if unknown."""
    if binary[:6] == b"\x7fELF\x02\x01" and len(binary) >= 20:
        return "linux", _ELF_MACHINES.get(struct.unpack_from("<H", binary, 18)[0], "")
    if binary[:4] == _MACHO_MAGIC and len(binary) >= 8:
        return "darwin", _MACHO_MACHINES.get(struct.unpack_from("<I", binary, 4)[0], "")
    return "", ""
