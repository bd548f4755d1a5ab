"""What is known of devices at best: measured on this CPU, from the rows of GPUs, and from what a driver tells."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import ToolchainError
from npu_compiler.target_config import devices, find_device
from npu_compiler.targets.cuda.devices import CUDADevice, device_for
from npusim.profiling import roofline
from npusim.profiling.roofline import measured_cpu, roofline_of

from ..support import handmade


def test_this_cpu_is_measured_and_the_best_figures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    measured_cpu.cache_clear()
    first = measured_cpu(1)
    assert first is not None and first.bandwidths[-1][0] == math.inf
    assert all(1e7 < first.peak(dtype) < 1e14 for dtype in ("float32", "float64", "bfloat16", "int8"))
    assert first.peak("uint8") == first.peak("int8")
    assert first.peak("float16") == first.peak("float32")
    sizes, rates = zip(*first.bandwidths, strict=True)
    assert list(sizes) == sorted(sizes) and list(rates) == sorted(rates, reverse=True)
    assert 1e7 < first.bandwidth < 1e14
    measured_cpu.cache_clear()
    slow = SimpleNamespace(flops=lambda dtype: 1.0, bandwidth=lambda size: 1.0)
    monkeypatch.setattr(roofline, "_Probe", lambda threads: slow)
    again = measured_cpu(1)
    assert again is not None and again.flops == dict(first.flops) and again.bandwidths == first.bandwidths
    measured_cpu.cache_clear()


def test_without_a_compiler_the_roofline_of_a_cpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise ToolchainError("no compiler")

    measured_cpu.cache_clear()
    monkeypatch.setattr(roofline, "find_compiler", fails)
    assert roofline_of(handmade.program(), backend()) is None
    measured_cpu.cache_clear()


def backend(bandwidth: float = 0.0) -> Any:
    return SimpleNamespace(bandwidth=bandwidth, threads=1)


def cuda(device: str) -> CompiledProgram:
    return replace(handmade.program(), target="cuda", device=device)


def test_every_gpu_has_figures_and_its_driver_has_the_last_word() -> None:
    for device in devices("cuda"):
        known = roofline_of(cuda(device.spec), backend())
        assert known is not None and known.peak("bfloat16") > known.peak("float32") > known.peak("float64") > 0
        assert 5e11 < known.bandwidth < 2e13
        assert known.peak("uint8") == known.peak("int8") > 1.9 * known.peak("bfloat16")
        assert known.peak("int64") == known.peak("float32")
    told = roofline_of(cuda("cuda:sm_90"), backend(3.35e12))
    assert told is not None and told.bandwidth == 3.35e12 and "memory bus" in told.source


def test_fewer_units_have_a_lower_peak_and_unknown_chips_none() -> None:
    row = find_device("cuda", "sm_90")
    assert isinstance(row, CUDADevice) and row.roofline is not None
    half = row.with_sms(66)
    assert half.roofline is not None and half.roofline.peak("float16") == row.roofline.peak("float16") / 2
    assert half.roofline.bandwidth == row.roofline.bandwidth
    assert device_for((11, 0), 100).roofline is None
