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
from npu_compiler.artifact.program import KernelCall
from npu_compiler.frontend import capture
from npu_compiler.support import env
from npu_compiler.support.errors import ArtifactError, BackendError, ConfigError, InputError
from npu_compiler.targets.simt.lang import program as simt
from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend, missing_parts
from npu_runtime.backends.metal.entry import MetalEntry

from ...support import metal_api
from ...support.metal_api import NSError
from .conftest import FLOAT, Model


def changed(model: Model, **code: str) -> Executor:
    """An executor of the program with other code."""
    entries, old = simt.unpack(model.program.binary)
    return Executor(replace(model.program, binary=simt.pack(entries, {**old, **code})), model.weights, MetalBackend())


def calls_and_launches(model: Model) -> tuple[list[KernelCall], list[simt.Launch]]:
    entry = model.program.entries["main"]
    return list(entry.calls), simt.unpack(model.program.binary)[0][entry.symbol]


def test_a_text_that_does_not_compile(device: metal_api.Device, convnet: Model) -> None:
    with pytest.raises(BackendError, match=r"macOS does not compile program .* for Emulated Apple GPU: Compilation"):
        changed(convnet, text="kernel void f(device float* x) {}")
    with pytest.raises(BackendError, match=r"written in metal9\.9"):
        changed(convnet, language="metal9.9")
    with pytest.raises(ArtifactError, match="no kernel"):
        changed(convnet, text="#include <metal_stdlib>\n[[kernel]] void f(device float* x [[buffer(0)]]) {}\n")


@pytest.fixture(params=["indirect", "list"])
def failing(
    request: pytest.FixtureRequest, device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> tuple[Executor, str]:
    """An executor whose runs are encoded in one of the two ways, and the function of its second kernel."""
    monkeypatch.setenv("NPU_METAL_INDIRECT", str(int(request.param == "indirect")))
    _, launches = calls_and_launches(convnet)
    return Executor(convnet.program, convnet.weights, MetalBackend()), launches[1].function


def test_a_failed_run_names_the_kernel(
    device: metal_api.Device, convnet: Model, failing: tuple[Executor, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run again one by one, and the GPU works on afterwards."""
    executor, function = failing
    device.faults[function] = NSError("Caused GPU Address Fault Error", 3)
    message = rf"^kernel \S+ \({function}\) of program 'Small': .*Address Fault Error \(a kernel accessed memory out"
    with pytest.raises(BackendError, match=message):
        executor.run([convnet.x])
    monkeypatch.setenv("NPU_DEBUG", "2")
    with pytest.raises(BackendError, match=message):
        Executor(convnet.program, convnet.weights, executor.backend).run([convnet.x])
    device.faults.clear()
    (result,) = executor.run([convnet.x]).values()
    convnet.check(result)


def test_a_kernel_that_fails_once(device: metal_api.Device, convnet: Model, failing: tuple[Executor, str]) -> None:
    executor, function = failing
    device.faults, device.faults_last = {function: NSError("Caused GPU Hang Error", 2)}, False
    names = [f"{c.name} ({x.function})" for c, x in zip(*calls_and_launches(convnet), strict=True)]
    place = f" (kernels {names[0]} to {names[-1]})" if env.metal_indirect() else f", at {names[1]}"
    again = "running 'main' of program 'Small', none of whose kernels failed again when they ran one by one"
    with pytest.raises(BackendError, match=f"^{re.escape(again + place)}: Caused GPU Hang Error"):
        executor.run([convnet.x])
    (result,) = executor.run([convnet.x]).values()
    convnet.check(result)


def test_a_lost_gpu_is_not_asked_again(device: metal_api.Device, convnet: Model, failing: tuple[Executor, str]) -> None:
    executor, function = failing
    backend = executor.backend
    assert isinstance(backend, MetalBackend)
    device.faults[function] = NSError("Device removed", 11)
    place = r" \(kernels \S+ \(\w+\) to \S+ \(\w+\)\)" if env.metal_indirect() else rf", at \S+ \({function}\)"
    with pytest.raises(BackendError, match=rf"^running 'main' of program 'Small'{place}: Device removed \(the GPU was"):
        executor.run([convnet.x])
    assert backend.commands.queue.committed == 1


def test_runs_that_follow_a_failed_one(device: metal_api.Device, convnet: Model, failing: tuple[Executor, str]) -> None:
    """A launched run that follows has failed, too, because it works on what the failed one left; a later one works,
    and finds the arena as the first run did."""
    executor, function = failing
    backend, entry = executor.backend, executor._loaded
    assert isinstance(entry, MetalEntry)
    run = executor.bind([backend.allocate_buffer(convnet.x)], [y := backend.allocate_zeros((2, 5), FLOAT)])
    run()
    run.finish()
    assert entry._arena.whole.any()
    device.faults, device.faults_last = {function: NSError("Caused GPU Hang Error", 2)}, False
    run()
    first = backend.mark()
    run()
    second = backend.mark()
    for wait in (second, first, first):
        with pytest.raises(BackendError, match="none of whose kernels failed again"):
            wait()
    assert not entry._arena.whole.any()
    run()
    run.finish()
    convnet.check(y.to_numpy())


def test_a_copy_that_fails_is_no_kernel(
    device: metal_api.Device, convnet: Model, failing: tuple[Executor, str]
) -> None:
    """It is in the same command buffer as the run before it."""
    executor, _ = failing
    backend = executor.backend
    assert isinstance(backend, MetalBackend)
    x, spare = (backend.allocate_buffer(convnet.x) for _ in range(2))
    run = executor.bind([x], [backend.allocate_zeros((2, 5), FLOAT)])
    run()
    backend.copy(x, spare)
    device.faults["copy"] = NSError("Internal Error", 1)
    with pytest.raises(BackendError, match=r"^a copy on the GPU: Internal Error \(error 1 of Metal; report this\)$"):
        backend.synchronize()
    assert backend.commands.queue.committed == 1


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


def test_a_division_by_zero_names_the_kernel(device: metal_api.Device) -> None:
    class Divide(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(a, 0, dtype=torch.int32) // b

    a, b = torch.arange(6, dtype=torch.int32), torch.tensor([1, 2, 3, -1, 5, 6], dtype=torch.int32)
    run = Executor(npu_compiler.compile(capture(Divide(), (a, b)), target="metal"), None, MetalBackend())
    with pytest.raises(InputError, match="an integer is divided by zero in kernel"):
        run.run([a.numpy(), np.zeros(6, np.int32)])
    (result,) = run.run([a.numpy(), b.numpy()]).values()
    np.testing.assert_array_equal(result, torch.cumsum(a, 0, dtype=torch.int32) // b)


def test_a_capture(device: metal_api.Device, convnet: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
