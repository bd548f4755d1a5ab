"""Times of kernels by the GPU's clock."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.support.errors import BackendError
from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend
from npu_runtime.backends.metal.timestamps import Timestamps
from npu_runtime.profiler import EntryProfile
from npusim.cli import main

from ...support import metal_api
from ...support.metal_api.device import TICKS
from .conftest import Model


def profile(model: Model, backend: MetalBackend) -> EntryProfile:
    executor = Executor(model.program, model.weights, backend)
    before = backend.commands.queue.committed
    made = executor.profile([model.x], runs=2, warmup=0)
    assert (made.times[:, 0] == 0).all() and (made.spans > 0).all()
    made.command_buffers = backend.commands.queue.committed - before - 2  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(("most", "command_buffers"), [(2048, 1), (3, 3)])
def test_each_kernel_has_an_encoder_that_samples_the_clock(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch, most: int, command_buffers: int
) -> None:
    monkeypatch.setattr("npu_runtime.backends.metal.entry.MAX_KERNELS", most)
    made = profile(convnet, MetalBackend())
    assert made.command_buffers == 2 * command_buffers  # type: ignore[attr-defined]
    encoders = [kind for kind, *_ in device.log].count("encoder")
    assert encoders == 2 + 2 * len(convnet.program.entries["main"].calls)


@pytest.mark.parametrize("why", ["no counters", "no clock", "lost"])
def test_without_samples_each_kernel_has_a_command_buffer(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    device.counters = why != "no counters"
    if why == "no clock":
        monkeypatch.setattr(device, "counterSets", lambda: device.counters and metal_api.Device().counterSets()[:1])
    device.lost_samples = frozenset({3} if why == "lost" else ())
    made = profile(convnet, MetalBackend())
    kernels = len(convnet.program.entries["main"].calls)
    assert made.command_buffers == 2 * (kernels + (why == "lost"))  # type: ignore[attr-defined]


def test_the_clock_of_the_gpu_has_its_own_unit(device: metal_api.Device, backend: MetalBackend) -> None:
    clock = Timestamps.create(backend.mtl)
    assert clock is not None
    clock._samples.values[:4] = [100, 100 + 500_000 * TICKS, 0, 2_000_000 * TICKS]
    seconds = clock.seconds(2)
    assert seconds is not None
    np.testing.assert_allclose(seconds, [0.5, 2], rtol=0.3)
    clock._samples.values[1] = 99
    assert clock.seconds(2) is None


def test_a_failure_names_the_kernel(device: metal_api.Device, convnet: Model) -> None:
    device.faults["conv2d_1"] = metal_api.NSError("Caused GPU Address Fault Error", 3)
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    with pytest.raises(BackendError, match=r"^kernel \S+ \(conv2d_1\) of program 'Small': Caused"):
        executor.run_device([convnet.x], np.zeros(len(executor.entry.calls) + 1))


def test_npusim_profile_has_a_row_for_each_kernel(
    device: metal_api.Device, convnet: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.npubin"
    convnet.program.save(path)
    assert main(["profile", str(path), "--runs", "2", "--warmup", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (section,) = report["sections"]
    calls = convnet.program.entries["main"].calls
    assert [row["name"] for row in section["rows"]] == [c.name for c in calls]
    assert all(row["seconds"] > 0 for row in section["rows"]) and report["machine"] == "Emulated Apple GPU"
    assert all(row["launch"].endswith("threads") for row in section["rows"])
    assert any("timed kernels do not overlap" in note for note in report["notes"])
