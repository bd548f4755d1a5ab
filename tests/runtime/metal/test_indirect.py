"""Runs as indirect command buffers: encoded once, executed by a fixed number of calls; and runs that cannot be."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime
from npu_compiler.frontend import capture
from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend
from npu_runtime.backends.metal.entry import MetalEntry

from ...support import metal_api
from .conftest import FLOAT, Model

RUNTIME = str(Path(npu_runtime.__file__).parent)
METAL = str(Path(metal_api.__file__).parent)
NEW_BUFFER = "newIndirectCommandBufferWithDescriptor_maxCommandCount_options_"


def calls(action: Callable[[], Any]) -> tuple[int, list[str]]:
    """The number of Python functions that are called in npu_runtime, and the names of those of Metal that it calls."""
    count, metal = 0, []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call":
            called, caller = frame.f_code.co_filename, frame.f_back
            count += called.startswith(RUNTIME)
            if called.startswith(METAL) and caller is not None and caller.f_code.co_filename.startswith(RUNTIME):
                metal.append(frame.f_code.co_name)

    gc.disable()  # what it frees would be counted, too
    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, metal


def entry_of(executor: Executor) -> MetalEntry:
    entry = executor._loaded
    assert isinstance(entry, MetalEntry)
    return entry


def bound(executor: Executor, x: np.ndarray) -> tuple[Any, Any]:
    """A run that reads a copy of ``x``, and its output."""
    y = executor.backend.allocate_zeros((2, 5), FLOAT)
    return executor.bind([executor.backend.allocate_buffer(x)], [y]), y


def test_the_calls_of_a_run_do_not_depend_on_the_number_of_kernels(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list, by contrast, takes several calls for each kernel."""

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    x, backend, found = np.ones((2, 5), np.float32), MetalBackend(), {}
    double = npu_compiler.compile(capture(Double(), (torch.from_numpy(x),)), target="metal")
    kernels = [len(p.entries["main"].calls) for p in (double, convnet.program)]
    for indirect in (True, False):
        monkeypatch.setenv("NPU_METAL_INDIRECT", str(int(indirect)))
        for model in (Model(double, {}, x, 2 * x), convnet):
            executor = Executor(model.program, model.weights, backend)
            assert (entry_of(executor).obstacle is None) == indirect
            run, y = bound(executor, model.x)
            run()
            run.finish()
            run()
            found[indirect, model is convnet] = calls(run), calls(run.finish)
            model.check(y.to_numpy())
    assert found[True, True] == found[True, False]
    (count, metal), _ = found[True, True]
    assert count < 30 and metal == [
        "commit", "commandBufferWithDescriptor_", "computeCommandEncoderWithDispatchType_", "setLabel_",
        "waitForFence_", "useResources_count_usage_", "executeCommandsInBuffer_withRange_", "updateFence_",
        "endEncoding",
    ]  # fmt: skip
    few, many = (len(found[False, large][0][1]) for large in (False, True))
    assert kernels == [1, 7] and many >= few + 3 * 6


def test_both_ways_give_the_same_bits(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for indirect in "10":
        monkeypatch.setenv("NPU_METAL_INDIRECT", indirect)
        (result,) = Executor(convnet.program, convnet.weights, MetalBackend()).run([convnet.x]).values()
        results.append(result)
    convnet.check(results[0])
    np.testing.assert_array_equal(*results)


def test_another_binding_encodes_only_the_commands_whose_memory_is_another(
    device: metal_api.Device, convnet: Model
) -> None:
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    assert not device.indirect  # nothing has run
    x, twice = (executor.backend.allocate_buffer(n * convnet.x) for n in (1, 2))
    outputs = [executor.backend.allocate_zeros((2, 5), FLOAT) for _ in range(3)]
    run = executor.bind([x], [outputs[0]])
    run()
    (first,) = device.indirect
    assert first.encoded == first.size() == len(convnet.program.entries["main"].calls)
    run = executor.bind([x], [outputs[1]])
    run()
    assert len(device.indirect) == 2  # the GPU may still execute the commands of the first
    run.finish()
    for y in outputs[:2]:
        convnet.check(y.to_numpy())
    run = executor.bind([twice], [outputs[2]])
    run()
    assert device.indirect[0] is first and len(device.indirect) == 2
    again = sum(made.encoded for made in device.indirect) - 2 * first.size()
    assert 0 < again < first.size()  # what reads x or writes the output
    run.finish()
    (wanted,) = executor.run([2 * convnet.x]).values()
    np.testing.assert_array_equal(outputs[2].to_numpy(), wanted)


def test_an_entry_point_keeps_few_indirect_command_buffers(device: metal_api.Device, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    runs = [bound(executor, convnet.x)[0] for _ in range(6)]
    for run in runs:
        run()
    assert len(device.indirect) == 6
    executor.backend.synchronize()
    del runs, run
    assert len(device.indirect) == 4
    del executor
    gc.collect()
    assert not device.indirect


def test_memory_of_a_binding_that_is_gone_is_freed(backend: MetalBackend, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, backend)
    before = len(metal_api.Buffer.live)
    for _ in range(3):
        run, y = bound(executor, convnet.x)
        run()
        run.finish()
        convnet.check(y.to_numpy())
    del run, y
    assert len(metal_api.Buffer.live) == before


def test_a_run_lives_until_the_gpu_has_finished(backend: MetalBackend, convnet: Model) -> None:
    """Its executor, weights and inputs too: Metal does not keep what indirect commands use."""
    executor = Executor(convnet.program, convnet.weights, backend)
    run, y = bound(executor, convnet.x)
    run()
    del run, executor
    backend.synchronize()
    convnet.check(y.to_numpy())


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("variable", "NPU_METAL_INDIRECT=0"),
        ("macos", "macOS has no indirect command buffers"),
        ("kernel", "cannot be a command of an indirect command buffer"),
        ("threads", "cannot be a command of an indirect command buffer"),
        ("count", "kernels; an indirect command buffer takes 3"),
        ("arguments", r"arguments; a command takes 2"),
    ],
)
def test_what_an_indirect_command_buffer_cannot_hold_is_encoded_for_each_run(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch, why: str, message: str
) -> None:
    functions = [c.name for c in convnet.program.entries["main"].calls]
    if why == "variable":
        monkeypatch.setenv("NPU_METAL_INDIRECT", "0")
    elif why == "macos":
        monkeypatch.delattr(metal_api.Device, NEW_BUFFER)
    elif why == "kernel":
        device.not_indirect = frozenset({"conv2d_1"})
    elif why == "threads":
        device.indirect_threads = 8
    elif why == "count":
        monkeypatch.setattr("npu_runtime.backends.metal.indirect._MAX_COMMANDS", 3)
    else:
        monkeypatch.setattr("npu_runtime.backends.metal.indirect._MAX_BUFFERS", 2)
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    assert message.replace("\\", "") in str(entry_of(executor).obstacle)
    (result,) = executor.run([convnet.x]).values()
    convnet.check(result)
    dispatches = [name for kind, name in (entry for entry in device.log if len(entry) == 2) if kind == "dispatch"]
    assert not device.indirect and len(dispatches) == len(functions)


def test_too_little_memory_for_an_indirect_command_buffer(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal_api.Device, NEW_BUFFER, lambda *arguments: None)
    (result,) = Executor(convnet.program, convnet.weights, MetalBackend()).run([convnet.x]).values()
    convnet.check(result)
    assert ("dispatch", "conv2d_1") in device.log


def test_a_missing_fence_is_caught(device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal sees no dependency between two runs whose memory it does not know."""
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    monkeypatch.setattr(metal_api.ComputeEncoder, "waitForFence_", lambda self, fence: None)
    run, _ = bound(executor, convnet.x)
    run()
    with pytest.raises(metal_api.APIMisuse, match=r"^no fence between .running 'main' of program"):
        run()
        run.finish()


def test_memory_that_is_not_listed_is_caught(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetalEntry, "_listed", lambda self, steps: [])
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    with pytest.raises(metal_api.APIMisuse, match="is not resident"):
        executor.run([convnet.x])
