"""The CUDA target where there is no GPU: what it compiles, what it says. On a GPU: ``test_gpu.py``."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture
from npu_compiler.support.errors import ArtifactError, BackendError
from npu_compiler.targets.simt.lang.program import unpack
from npu_runtime import get_backend
from npu_runtime.backends import cuda
from npu_runtime.backends.cuda import code as cuda_code
from npu_runtime.backends.cuda import driver as cuda_driver
from npusim.cli import main

from ...conformance.cases import Case, cases_for, compile_cases
from ...llm import small_model
from ...support import cuda_gpu
from ...support.sweeps import FULL

ELF = b"\x7fELF"
compiles = cuda_gpu.compiles()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return npu_compiler.compile(capture(Small(), (torch.ones(2, 8),)), target="cuda:sm_90")


def code_of(program: CompiledProgram) -> dict[str, Any]:
    return unpack(program.binary)[1]


def with_code(program: CompiledProgram, **changes: Any) -> CompiledProgram:
    plain = msgpack.unpackb(program.binary)
    plain["code"].update(changes)
    return replace(program, binary=msgpack.packb(plain))


# ----------------------------------------------------------------------------------------------------------- compiling
@compiles
def test_every_op_compiles_to_machine_code() -> None:
    """The first sample of each overload of the conformance suite (of every fourth one in each family, without
    NPU_CONFORMANCE=full): every launch has its cubin, for this chip alone."""
    first = {case.op_type: case for case in reversed(cases_for("cuda"))}
    families: dict[str, list[Case]] = {}
    for case in first.values():
        families.setdefault(case.family, []).append(case)
    batch = compile_cases([case for members in families.values() for case in members[:: 1 if FULL else 4]])
    assert not batch.failed and len(batch.outputs) > (450 if FULL else 112)
    made = npu_compiler.pipeline.compile_graph(batch.graph, "cuda:sm_90")
    entries, code = unpack(made.binary)
    launches = [x for x in entries[made.entries["main"].symbol] if x.workgroups]
    assert {x.function for x in launches} == set(code["modules"]) and len(launches) > (300 if FULL else 75)
    assert all(cubin.startswith(ELF) and not ptx for cubin, ptx in code["modules"].values())
    assert made.requires == ("sm_90a",) and made.build["compiler"].startswith("nvrtc ")
    assert all(1 <= x.threads <= 1024 and x.shared <= 227 << 10 for x in launches)


@compiles
@pytest.mark.parametrize(("device", "arch", "has_ptx"), [("sm_80", "sm_80", True), ("sm_90", "sm_90a", False)])
def test_the_device_can_be_chosen(device: str, arch: str, has_ptx: bool) -> None:
    """Code for one architecture alone has no PTX; other code has, for architectures to come."""
    made = npu_compiler.compile(capture(Small(), (torch.ones(2, 8),)), target=f"cuda:{device}")
    code = code_of(made)
    assert code["arch"] == arch and (made.target, made.device) == ("cuda", f"cuda:{device}")
    for cubin, ptx in code["modules"].values():
        assert cubin.startswith(ELF) and bool(ptx) == has_ptx
        assert not ptx or f".target {arch}".encode() in zlib.decompress(ptx)


@compiles
def test_the_command_line_compiles_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = small_model.write_model(tmp_path / "small"), tmp_path / "source"
    to = ["--target", "cuda:sm_90", "--max-len", "160", "--emit-source", str(folder)]
    to += ["-o", str(tmp_path / "small.npubin")]
    assert main(["compile", str(model), *to, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "cuda:sm_90"
    loaded = CompiledProgram.load(tmp_path / "small.npubin")
    assert loaded.device == "cuda:sm_90" and set(loaded.entries) == {"decode", "greedy", "prefill_128", "sample"}
    text = (folder / "kernels.cu").read_text()
    assert all(f"\n{name}(" in text for name in code_of(loaded)["modules"])


# ------------------------------------------------------------------------------------------------------------- errors
class FakeDriver:
    """A driver that loads anything but damaged code, for what is decided before a kernel runs."""

    def __init__(self, version: tuple[int, int] = (13, 0)):
        self.version = version
        self.images: list[bytes] = []

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        if not image.startswith((ELF, b"//")):
            raise cuda_driver.failure(f"loading kernel {name}", 200, "device kernel image is invalid")
        self.images.append(image)
        return len(self.images), len(self.images)

    def unload(self, module: int) -> None:
        del self.images[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    monkeypatch.setattr(cuda_code, "driver", lambda: made)
    yield made


@compiles
def test_code_for_another_device(program: CompiledProgram, fake: FakeDriver) -> None:
    """sm_90a runs on compute capability 9.0 alone; sm_80 on 8.x by its cubin, and on later chips by its PTX."""
    cuda_code.Code(program, (9, 0))
    assert all(image.startswith(ELF) for image in fake.images)
    with pytest.raises(
        BackendError,
        match=r"compiled for cuda:sm_90, this GPU is sm_86; .*: npusim compile MODEL --target cuda:sm_86 ",
    ):
        cuda_code.Code(program, (8, 6))
    older = npu_compiler.compile(capture(Small(), (torch.ones(2, 8),)), target="cuda:sm_80")
    for capability, start in (((8, 6), ELF), ((9, 0), b"//")):
        code = cuda_code.Code(older, capability)
        assert fake.images and all(image.startswith(start) for image in fake.images)
        del code


@compiles
def test_damaged_code_names_the_kernel(program: CompiledProgram, fake: FakeDriver) -> None:
    modules = code_of(program)["modules"]
    name = next(iter(modules))
    damaged = with_code(program, modules={**modules, name: [b"\0" * 100, b""]})
    with pytest.raises(
        BackendError, match=f"program '{program.name}': loading kernel {name} failed: its code is damaged"
    ):
        cuda_code.Code(damaged, (9, 0))
    with pytest.raises(ArtifactError, match="no CUDA code"):
        cuda_code.Code(with_code(program, modules={name: [b""]}), (9, 0))
    with pytest.raises(ArtifactError, match="damaged launch list"):
        cuda_code.Code(replace(program, binary=program.binary[:50]), (9, 0))


@compiles
def test_code_of_a_newer_compiler_than_the_driver_knows(program: CompiledProgram, fake: FakeDriver) -> None:
    fake.version = (12, 4)
    with pytest.raises(BackendError, match=r"the NVIDIA driver is too old for it: it supports CUDA 12\.4\. Update"):
        cuda_code.Code(program, (9, 0))


class Refusing(cuda_driver.Driver):
    """Records, but refuses a launch; ending the capture fails then, too, as the real one does."""

    def __init__(self) -> None:
        self._library = self  # type: ignore[assignment]
        self.ended = 0

    def cuStreamBeginCapture_v2(self, *arguments: Any) -> int:
        return 0

    def cuStreamEndCapture(self, *arguments: Any) -> int:
        self.ended += 1
        return 901

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0


def test_a_refused_launch_is_what_the_error_is_about() -> None:
    driver = Refusing()

    def launch_all() -> None:
        raise cuda_driver.failure("launching kernel k7_gemm", 1, "invalid argument")

    with pytest.raises(BackendError, match="launching kernel k7_gemm failed: invalid argument"):
        driver.record(0, "the graph of 'main'", launch_all)
    assert driver.ended == 1


class OldLibrary:
    """libcuda of a driver for CUDA 11.4."""

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 11040
        return 0


def test_an_old_driver_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: OldLibrary())
    with pytest.raises(BackendError, match=r"the NVIDIA driver is too old: it supports CUDA 11\.4, and CUDA 12\.3 is"):
        cuda_driver.Driver()


def test_errors_that_cost_the_gpu_say_so() -> None:
    """An illegal access ends all use of the GPU by the process, running out of memory does not."""
    lost = cuda_driver.failure("running 'main' of program 'p'", 700, "")
    assert str(lost) == (
        "running 'main' of program 'p' failed: a kernel read or wrote outside of its memory; this process cannot use "
        "the GPU any more: start it again, or go on with the cpu target (CUDA error 700)"
    )
    assert str(cuda_driver.failure("loading", 2, "")) == "loading failed: the GPU is out of memory (CUDA error 2)"
    assert (
        str(cuda_driver.failure("loading", 400, "invalid handle")) == "loading failed: invalid handle (CUDA error 400)"
    )


@pytest.mark.skipif(not cuda_gpu.reason(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_missing() -> None:
    for make in (cuda.CUDABackend, lambda: get_backend("cuda")):
        with pytest.raises(BackendError, match=r"^the cuda target cannot run here: .*(driver|GPU|CuPy)[^\n]*$"):
            make()


def test_threads_are_no_option_of_a_gpu() -> None:
    with pytest.raises(BackendError, match="the cuda target has no option 'threads'"):
        get_backend("cuda", threads=2)
