"""Which chip CUDA kernels are compiled for: ``NPU_CUDA_ARCH``, else the GPU of this machine, else Hopper."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...support import env
from ...support.errors import ConfigError

OLDEST = (8, 0)  # the first with asynchronous copies and a matrix unit for bfloat16
WITHOUT_A_GPU = "sm_90a"
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*

Capability = tuple[int, int]


def arch() -> str:
    """The chip in NVIDIA's spelling: 'sm_90a', 'sm_86'. Raises ``ConfigError`` if it is older than :data:`OLDEST`."""
    chosen = env.cuda_arch()
    if chosen is not None:
        require(capability_of(chosen), f"NPU_CUDA_ARCH={chosen}")
        return chosen
    found = present()
    if found is None:
        return WITHOUT_A_GPU
    require(found, "the GPU of this machine")
    return arch_of(found)


def arch_of(capability: Capability) -> str:
    """What to compile for a GPU: Hopper has instructions that only code for that very chip may use."""
    return WITHOUT_A_GPU if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def capability_of(arch: str) -> Capability:
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number[:-1]), int(number[-1])


def too_old(capability: Capability) -> str | None:
    """Why kernels cannot run on a GPU of this compute capability, or None if they can."""
    if capability >= OLDEST:
        return None
    has, oldest = (f"{major}.{minor}" for major, minor in (capability, OLDEST))
    return f"has compute capability {has}; the oldest that is supported is {oldest} ({arch_of(OLDEST)}: A100, RTX 30)"


def require(capability: Capability, what: str) -> None:
    problem = too_old(capability)
    if problem is not None:
        raise ConfigError(f"{what} {problem}; NPU_CUDA_ARCH names another chip to compile for")


@cache
def present() -> Capability | None:
    """Compute capability of the first GPU that this process may use, as its driver says; None without either."""
    library = _library()
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if library is None or library.cuInit(ctypes.c_uint(0)):
        return None
    if library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    failed = library.cuDeviceGet(ctypes.byref(device), 0)
    for value, attribute in ((major, _COMPUTE_MAJOR), (minor, _COMPUTE_MINOR)):
        failed = failed or library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return None if failed else (major.value, minor.value)


def _library() -> Any:
    """NVIDIA's driver library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
