"""What goes wrong on a Mac, and what Metal's API validation would stop."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.support.errors import ArtifactError, BackendError, ConfigError, InputError
from npu_compiler.targets.simt.lang import program as simt
from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend, missing_parts

from ...support import metal_api
from ...support.metal_api import APIMisuse, NSError
from .conftest import Model


def changed(model: Model, **code: str) -> Executor:
    """An executor of the program with other code."""
    entries, old = simt.unpack(model.program.binary)
    return Executor(replace(model.program, binary=simt.pack(entries, {**old, **code})), model.weights, MetalBackend())


def test_a_text_that_does_not_compile(device: metal_api.Device, convnet: Model) -> None:
    with pytest.raises(BackendError, match=r"macOS does not compile program .* for Emulated Apple GPU: Compilation"):
        changed(convnet, text="kernel void f(device float* x) {}")
    with pytest.raises(BackendError, match=r"written in metal9\.9"):
        changed(convnet, language="metal9.9")
    with pytest.raises(ArtifactError, match="no kernel"):
        changed(convnet, text="#include <metal_stdlib>\n[[kernel]] void f(device float* x [[buffer(0)]]) {}\n")


def test_a_failed_command_buffer_names_the_kernel(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    function = simt.unpack(convnet.program.binary)[0][convnet.program.entries["main"].symbol][1].function
    device.faults[function] = NSError("Caused GPU Address Fault Error", 3)
    with pytest.raises(BackendError, match=r"^running 'main' of program .*Address Fault.*NPU_DEBUG=2 names it"):
        executor.run([convnet.x])
    monkeypatch.setenv("NPU_DEBUG", "2")
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    with pytest.raises(BackendError, match=rf"^kernel \S+ \({function}\) of program .*Address Fault"):
        executor.run([convnet.x])
    device.faults.clear()
    (result,) = executor.run([convnet.x]).values()
    convnet.check(result)


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        (8, "Insufficient Memory", "smaller batch or context"),
        (11, "Device removed", "the GPU was lost"),
        (2, "Caused GPU Timeout Error", "took too long"),
    ],
)
def test_errors_of_a_run_say_what_to_do(
    device: metal_api.Device, convnet: Model, code: int, text: str, remedy: str
) -> None:
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    function = simt.unpack(convnet.program.binary)[0][convnet.program.entries["main"].symbol][0].function
    device.faults[function] = NSError(text, code)
    with pytest.raises(BackendError, match=f"{text} .*{remedy}"):
        executor.run([convnet.x])


def test_too_little_memory(device: metal_api.Device, convnet: Model) -> None:
    backend = MetalBackend()
    device.memory = 0
    with pytest.raises(BackendError, match="no memory for 4000000 bytes"):
        backend.allocate_empty((1000, 1000), np.dtype(np.float32))
    with pytest.raises(BackendError, match="the weights: the GPU has no memory"):
        Executor(convnet.program, convnet.weights, backend)
    device.memory, device.max_buffer = 1 << 33, 1 << 20
    with pytest.raises(BackendError, match="a Metal buffer has at most 1048576"):
        backend.allocate_empty((1 << 20,), np.dtype(np.float32))
    device.max_buffer = 1 << 32
    (result,) = Executor(convnet.program, convnet.weights, backend).run([convnet.x]).values()
    convnet.check(result)


def test_what_a_gpu_does_not_have(convnet: Model) -> None:
    with metal_api.installed(metal_api.Device(family=6)), pytest.raises(BackendError, match="need the family apple7"):
        MetalBackend()
    newer = replace(convnet.program, device="metal:apple9")
    with metal_api.installed(metal_api.Device(family=8)), pytest.raises(BackendError, match=r"this GPU .* is apple8"):
        Executor(newer, convnet.weights, MetalBackend())
    device = metal_api.Device()
    device.max_threads = 8
    with metal_api.installed(device), pytest.raises(BackendError, match=r"threadgroups of \d+ threads; .* runs 8"):
        changed(convnet, language="metal3.1")
    device = metal_api.Device()
    device.static_shared = 40000
    with metal_api.installed(device), pytest.raises(BackendError, match="40000 bytes of threadgroup memory"):
        changed(convnet, language="metal3.1")
    with metal_api.installed(None), pytest.raises(BackendError, match="no GPU that Metal can use"):
        MetalBackend()


def test_bfloat16_needs_a_family_that_has_it(device: metal_api.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    class Twice(nn.Module):
        forward = staticmethod(twice)

    x = torch.arange(6, dtype=torch.bfloat16)
    program = npu_compiler.compile(capture(Twice(), (x,)), target="metal")
    (result,) = Executor(program, None, MetalBackend()).run([x]).values()
    np.testing.assert_array_equal(result.astype(np.float32), 2.0 * np.arange(6))
    families = device.supportsFamily_
    monkeypatch.setattr(device, "supportsFamily_", lambda n: n not in (1006, 5001) and families(n))
    with pytest.raises(BackendError, match=r"bfloat16, which Emulated Apple GPU does not have; .* dtype float16"):
        Executor(program, None, MetalBackend())


def test_an_index_out_of_range_names_the_kernel(device: metal_api.Device) -> None:
    class Pick(nn.Module):
        def forward(self, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(at, table)

    table, at = torch.arange(12.0).reshape(4, 3), torch.tensor([1, 3])
    run = Executor(npu_compiler.compile(capture(Pick(), (table, at)), target="metal"), None, MetalBackend())
    with pytest.raises(InputError, match="an index is out of range in kernel"):
        run.run([table.numpy(), np.array([1, 4])])
    (result,) = run.run([table.numpy(), at.numpy()]).values()
    np.testing.assert_array_equal(result, table[at])


def test_a_capture(
    device: metal_api.Device, convnet: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "run.gputrace"
    monkeypatch.setenv("NPU_METAL_CAPTURE", str(trace))
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    executor.run([convnet.x])
    executor.run([convnet.x])
    assert trace.read_text() == "1"
    (tmp_path / "old.gputrace").write_text("")
    monkeypatch.setenv("NPU_METAL_CAPTURE", str(tmp_path / "old.gputrace"))
    with pytest.raises(BackendError, match=r"already exists; the file must not exist, .* METAL_CAPTURE_ENABLED=1"):
        executor.run([convnet.x])
    monkeypatch.setenv("NPU_METAL_CAPTURE", "run.txt")
    with pytest.raises(ConfigError, match="NPU_METAL_CAPTURE"):
        executor.run([convnet.x])


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Metal", None)
    assert re.match(r"Metal needs a Mac with an Apple GPU, and this is \w+; compile for cpu", missing_parts()[0])
    assert not MetalBackend.machines()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BackendError, match=r"pyobjc-framework-Metal is needed.*: pip install 'npusim\[metal\]'"):
        MetalBackend()
    with metal_api.installed(metal_api.Device()):
        assert missing_parts() == [] and MetalBackend.machines() == ["Emulated Apple GPU"]


def test_the_stand_in_refuses_what_metal_refuses(device: metal_api.Device, convnet: Model) -> None:
    backend = MetalBackend()
    entry = Executor(convnet.program, convnet.weights, backend)._loaded
    pipeline = next(iter(entry._code.pipelines.values()))  # type: ignore[attr-defined]
    buffer = device.newBufferWithLength_options_(64, 0)
    size = metal_api.MTLSize
    commands = backend.commands.queue.commandBuffer()
    encoder = commands.computeCommandEncoderWithDispatchType_(1)
    for bad in (
        lambda: encoder.setBuffer_offset_atIndex_(buffer, 64, 0),
        lambda: encoder.setBuffer_offset_atIndex_(buffer, 0, 31),
        lambda: encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(32, 1, 1)),
        commands.commit,
        commands.blitCommandEncoder,
        commands.waitUntilCompleted,
    ):
        with pytest.raises(APIMisuse):
            bad()
    encoder.setComputePipelineState_(pipeline)
    for index in range(31):
        encoder.setBuffer_offset_atIndex_(buffer, 0, index)
    encoder.setBuffer_offset_atIndex_(buffer, 2, 0)
    with pytest.raises(APIMisuse, match="offset 2 for elements of 4 bytes"):
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(32, 1, 1))
    encoder.setBuffer_offset_atIndex_(buffer, 0, 0)
    for groups, threads in ((0, 32), (1, 0), (1, 2048)):
        with pytest.raises(APIMisuse):
            encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(groups, 1, 1), size(threads, 1, 1))
    encoder.endEncoding()
    commands.commit()
    for late in (encoder.endEncoding, commands.commit, commands.blitCommandEncoder):
        with pytest.raises(APIMisuse):
            late()
