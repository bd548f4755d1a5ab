"""Which chip CUDA kernels are compiled for, with drivers that are not there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from npu_compiler.support.errors import BackendError, ConfigError
from npu_compiler.targets.cuda import chips
from npu_compiler.targets.cuda.dialect import DIALECT, HOPPER
from npu_compiler.targets.cuda.target import TARGET
from npu_runtime import cuda_driver
from npu_runtime.backends import cuda
from npusim.doctor import _cuda_parts

Present = Callable[..., None]


class FakeLibrary:
    """The calls of libcuda that tell about GPUs. ``broken``: a call that fails."""

    def __init__(self, capabilities: list[tuple[int, int]], broken: str = ""):
        self.capabilities, self.broken = capabilities, broken

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.broken:
                return 999
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = len(self.capabilities)
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = 40 + arguments[1]
            elif name == "cuDeviceGetAttribute":
                value, attribute, handle = arguments
                value._obj.value = self.capabilities[handle.value - 40][attribute - 75]
            return 0

        assert name.startswith("cu"), name
        return call


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Iterator[Present]:
    monkeypatch.delenv("NPU_CUDA_ARCH", raising=False)

    def set_up(*capabilities: tuple[int, int], broken: str = "") -> None:
        monkeypatch.setattr(chips, "_library", lambda: FakeLibrary(list(capabilities), broken))
        chips.present.cache_clear()

    yield set_up
    chips.present.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 1), "sm_121"),
    ],
)
def test_the_gpu_of_this_machine_decides(present: Present, capability: tuple[int, int], arch: str) -> None:
    present(capability, (7, 0))
    assert chips.present() == capability and chips.arch() == arch
    assert TARGET.dialect == (HOPPER if arch == "sm_90a" else DIALECT)
    assert chips.capability_of(arch) == capability


@pytest.mark.parametrize("broken", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_without_a_gpu_that_works(present: Present, broken: str) -> None:
    present((8, 6), broken=broken)
    assert chips.present() is None and chips.arch() == "sm_90a"
    present()
    assert chips.arch() == "sm_90a"


def test_without_a_driver(present: Present, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    chips.present.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert chips.arch() == "sm_90a"


def test_the_variable_wins(present: Present, monkeypatch: pytest.MonkeyPatch) -> None:
    present((8, 6))
    monkeypatch.setenv("NPU_CUDA_ARCH", "sm_90a")
    assert chips.arch() == "sm_90a" and TARGET.dialect == HOPPER
    monkeypatch.setenv("NPU_CUDA_ARCH", "hopper")
    with pytest.raises(ConfigError, match="NPU_CUDA_ARCH='hopper' is not understood"):
        chips.arch()


def test_a_chip_that_is_too_old(present: Present, monkeypatch: pytest.MonkeyPatch) -> None:
    present((7, 0))
    with pytest.raises(
        ConfigError, match=r"^the GPU of this machine has compute capability 7\.0; the oldest .* 8\.0 \(sm_80"
    ):
        chips.arch()
    monkeypatch.setenv("NPU_CUDA_ARCH", "sm_75")
    with pytest.raises(ConfigError, match=r"^NPU_CUDA_ARCH=sm_75 has compute capability 7\.5; the oldest .* 8\.0"):
        TARGET.emit([])
    monkeypatch.setenv("NPU_CUDA_ARCH", "sm_80")
    assert chips.arch() == "sm_80", "compiling for another machine"


@pytest.mark.parametrize("newer", [False, True], ids=["one GPU", "and a newer one"])
def test_running_on_a_chip_that_is_too_old(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """Where CuPy is missing too, all that is missing is told."""
    found = [cuda_driver.Device(0, "Tesla V100", (7, 0), 16 << 30)]
    found += [cuda_driver.Device(1, "A100", (8, 0), 40 << 30)] if newer else []
    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(version=(13, 0), devices=lambda: found))
    monkeypatch.setattr(cuda_driver, "driver", cuda.driver)
    old = "Tesla V100 has compute capability 7.0; the oldest that is supported is 8.0 (sm_80: A100, RTX 30)"
    missing = cuda.missing_parts()
    assert (old in missing) != newer
    devices, _, parts = _cuda_parts({})
    assert devices[0].startswith("Tesla V100, compute capability 7.0") and (old in parts) != newer
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(BackendError, match=r"Tesla V100\)? has compute capability 7\.0; the oldest"):
        cuda.CUDABackend(0)
