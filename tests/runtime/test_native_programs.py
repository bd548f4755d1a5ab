"""Native code and the machine: backends by name, rebuilding, binaries that do not fit, threads, memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npu_runtime
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import env
from npu_compiler.support.errors import ArtifactError, BackendError, ConfigError, InputError
from npu_compiler.targets.cpu import host, toolchain
from npu_compiler.targets.cpu.devices import DEVICES
from npu_compiler.targets.cpu.target import KERNELS
from npu_runtime import CPUBackend, Executor, native
from npu_runtime.arrays import aligned_empty
from npu_runtime.native import NativeLibrary, obstacle

from ..support import handmade


def test_backends_by_name() -> None:
    assert npu_runtime.available_backends() == ["cpu", "cuda", "metal"]
    assert npu_runtime.get_backend("cpu", threads=1).name == "cpu"
    for name in ("tpu", "../cpu", "__init__"):
        with pytest.raises(BackendError, match=r"this build has no .* target; it has: cpu, cuda, metal"):
            npu_runtime.get_backend(name)
    with pytest.raises(AttributeError, match="has no attribute 'TPUBackend'"):
        _ = npu_runtime.TPUBackend
    with pytest.raises(InputError, match="threads=0"):
        CPUBackend(0)


def test_a_program_for_another_target(program: CompiledProgram) -> None:
    with pytest.raises(BackendError, match=r"this build has no 'tpu' target"):
        Executor(replace(program, target="tpu"), handmade.weights(), entry="main")
    with pytest.raises(BackendError, match="program 'handmade' is for 'cuda', not for 'cpu'"):
        Executor(replace(program, target="cuda"), handmade.weights(), CPUBackend(), "main")


def test_a_missing_cpu_feature_means_a_rebuild_or_a_clear_error(
    program: CompiledProgram, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = replace(program, requires=("avx9000", *sorted(host.host_cpu().features)[:1]))
    assert "avx9000" in obstacle(foreign)
    handmade.check(Executor(foreign, handmade.weights(), entry="main").run(handmade.inputs()), handmade.inputs())
    (record,) = caplog.records
    assert re.match(r"program 'handmade' was rebuilt from source: .*avx9000", record.getMessage())
    with pytest.raises(BackendError, match=r"needs the CPU features avx9000, .* holds no source"):
        Executor(replace(foreign, sources={}), handmade.weights(), entry="main")
    monkeypatch.setenv("NPU_CXX", "/nowhere/c++")
    with pytest.raises(BackendError, match=r"avx9000.*could not be rebuilt.*Install a C\+\+ compiler"):
        Executor(foreign, handmade.weights(), entry="main")
    monkeypatch.setattr(toolchain, "build_shared", lambda *args, **kwargs: b"not an object")
    with pytest.raises(BackendError, match=r"program 'handmade' was rebuilt, but does not load"):
        Executor(foreign, handmade.weights(), entry="main")


def test_an_object_for_another_machine(program: CompiledProgram) -> None:
    arch = bytearray(program.binary)
    arch[18] = 183 if arch[18] == 62 else 62
    assert " on linux/" in obstacle(replace(program, binary=bytes(arch)))
    assert "holds no binary" in obstacle(replace(program, binary=b""))
    for binary in (bytes(arch), b"", b"\x7fELF", b"MZ", program.binary[:100]):
        foreign = replace(program, binary=binary)
        handmade.check(Executor(foreign, handmade.weights(), entry="main").run(handmade.inputs()), handmade.inputs())
        with pytest.raises(BackendError, match="cannot run here"):
            Executor(replace(foreign, sources={}), handmade.weights(), entry="main")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return 1; }\nAPI int npu_start", "return 77; }\nAPI int npu_start", "has ABI 77, this build has 1"),
        ("int npu_main(", "int npu_other(", "lacks the symbol npu_main"),
        ("npu_stop(void)", "npu_halt(void)", "lacks the symbol npu_stop"),
        (
            "return running = threads < 3 ? threads : 3",
            "return 0",
            "program 'handmade' cannot start: its thread pool of .* threads is refused",
        ),
        (
            "API int npu_start(int threads) { return running = threads < 3 ? threads : 3; }",
            "API long npu_scratch_bytes(void) { return 1L << 40; }\nAPI int npu_start(int threads) { return 0; }",
            "program 'handmade' cannot start: the system refuses .*B of scratch memory, .*B for each of .* thread",
        ),
        ("if (running < 1) return -1;", "return -5;", "program 'handmade' failed with status -5"),
    ],
)
def test_a_binary_that_breaks_the_rules(program: CompiledProgram, old: str, new: str, message: str) -> None:
    source = program.sources["program"]
    assert old in source
    broken = replace(program, binary=handmade.binary(source.replace(old, new)))
    with pytest.raises((ArtifactError, BackendError), match=message):
        Executor(broken, handmade.weights(), entry="main").run(handmade.inputs())


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, arena_bytes=4096),
        lambda e: replace(e, calls=(replace(e.calls[0], inputs=(0,)), *e.calls[1:])),  # the weight would not be passed
        lambda e: replace(e, calls=(e.calls[0], e.calls[0], *e.calls[1:])),
        lambda e: replace(e, symbol="npu_step"),
    ],
)
def test_a_binary_knows_the_buffers_it_was_built_for(program: CompiledProgram, change: Callable[[Any], Any]) -> None:
    entries = {**program.entries, "main": change(program.entries["main"])}
    with pytest.raises(ArtifactError, match="was built for other buffers than the file lists"):
        Executor(replace(program, entries=entries), handmade.weights(), entry="main")


def test_threads(program: CompiledProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, started in ((1, 1), (2, 2), (8, 3)):  # the program has 3 at most
        assert NativeLibrary(program, asked).threads == started
    limit = re.search(r"MAX_THREADS = (\d+);", (KERNELS / "pool.cpp").read_text())
    assert limit is not None and int(limit[1]) == env.MAX_THREADS
    for wrong in (env.MAX_THREADS + 1, 1.5, "2", True):
        with pytest.raises(InputError, match=f"threads=.*from 1 to {env.MAX_THREADS}"):
            CPUBackend(threads=wrong)  # type: ignore[arg-type]
    assert CPUBackend(threads=np.int64(2)).threads == 2  # type: ignore[arg-type]
    monkeypatch.setenv("NPU_NUM_THREADS", "2")
    assert CPUBackend().threads == 2
    monkeypatch.setenv("NPU_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="NPU_NUM_THREADS"):
        CPUBackend()


def test_a_machine_that_loads_no_native_code(program: CompiledProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container with a read-only disk that forbids code in memory files: rebuilding does not help."""

    def refuse(binary: bytes) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(native, "_open", refuse)
    with pytest.raises(BackendError, match=r"^program 'handmade' was rebuilt, but does not load: .*Read-only file sys"):
        NativeLibrary(program, 1)


def test_programs_are_unloaded(program: CompiledProgram) -> None:
    def resources() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:npu-program")

    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc to look into")
    gc.collect()
    before = resources()
    for _ in range(10):
        with npu_runtime.load(program, handmade.weights(), threads=1) as model:
            model.run(handmade.inputs())
            assert resources()[1] > before[1]
        del model
    gc.collect()
    assert resources() == before


def test_a_child_process_can_run(executor: Executor) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, executor.run(handmade.inputs())["z"].tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 64) == executor.run(handmade.inputs())["z"].tobytes()
    os.close(reading)
    os.close(writing)


def test_too_much_memory_is_an_error_at_once() -> None:
    with pytest.raises(BackendError, match="needs 17592186044416 bytes of memory, but this machine has"):
        aligned_empty((2**42,), np.dtype(np.float32))


def test_padded_buffers() -> None:
    backend = CPUBackend(1)
    buffer = backend.allocate_buffer(np.ones((2, 3), np.float32), (2, 8))
    assert (buffer.shape, buffer.alloc_shape, buffer.size_bytes) == ((2, 3), (2, 8), 64)
    np.testing.assert_array_equal(buffer.to_numpy(), np.ones((2, 3)))
    with pytest.raises(BackendError, match=r"alloc_shape \[2, 2\] cannot hold shape \[2, 3\]"):
        backend.allocate_zeros((2, 3), np.dtype(np.float32), (2, 2))


def test_a_program_is_rebuilt_with_the_flags_of_this_cpu(
    program: CompiledProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Sequence[str]] = []

    def build(sources: object, folder: object, *, more_flags: Sequence[str]) -> bytes:
        found.append(more_flags)
        return program.binary

    monkeypatch.setattr(toolchain, "build_shared", build)
    monkeypatch.setattr(native, "device_at_hand", lambda: next(d for d in DEVICES if d.name == "cooperlake"))
    assert native.from_source(program).binary == program.binary and found == [("-DNPU_SLOW_BF16_DOT=1",)]
