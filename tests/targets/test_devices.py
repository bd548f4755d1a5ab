"""The tables of devices: what a target's name stands for, and code for machines that are not this one."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
import npusim
from npu_compiler import target_config as table
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture
from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig
from npu_compiler.pipeline import compile_entries, run_phases
from npu_compiler.support.errors import BackendError, ConfigError, ToolchainError
from npu_compiler.target_config import default_target, find_device, register_device, target_config
from npu_compiler.targets import CodegenTarget, register_target
from npu_compiler.targets.cpu.compilers import find_compiler
from npu_compiler.targets.cpu.devices import CPUDevice
from npu_compiler.targets.cpu.host import host_cpu, object_kind
from npu_compiler.targets.cuda import devices as cuda_devices
from npu_compiler.targets.cuda.dialect import DIALECT, dialect_for
from npu_compiler.targets.cuda.target import TARGET
from npu_compiler.targets.metal.devices import device_for as apple_device
from npu_compiler.targets.simt.lang.program import unpack
from npu_runtime.backends import cuda
from npu_runtime.backends.cuda import backend as cuda_backend
from npu_runtime.backends.cuda.driver import InstalledGPU
from npu_runtime.executor import Executor
from npu_runtime.registry import get_backend
from npusim.cli import main

from ..llm import small_model
from ..support import cuda_gpu

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
Present = Callable[..., None]
x86 = pytest.mark.skipif(host_cpu().arch != "x86_64", reason="levels of x86-64")
compiles_cuda = cuda_gpu.compiles()


# ------------------------------------------------------------------------------------------------------------- names
def test_every_row_is_found_by_its_name() -> None:
    for target in ("cpu", "cuda", "metal"):
        rows = table.devices(target)
        assert len({d.name for d in rows}) == len(rows) > 2
        for d in rows:
            config = target_config(d.spec)
            assert config.device is d and config.name == target and str(d).startswith(f"{target}:{d.name}")
        assert target_config(target).device is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu", r"unknown target 'tpu'; known: cpu, cuda, metal"),
        ("cuda:sm_70", r"target 'cuda' has no device 'sm_70'; known: cuda:sm_80, .*cuda:sm_90"),
        ("cpu:", r"target 'cpu' has no device ''; known: cpu:amx, .*cpu:avx2, .*cpu:portable"),
        ("metal:apple1", r"known: metal:apple7"),
    ],
)
def test_unknown_names_list_the_known_ones(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (target_config, lambda n: npu_compiler.compile(capture(Net(), IMAGE), target=n)):
        with pytest.raises(ConfigError, match=message):
            ask(name)
    assert main(["compile", "resnet18", "--target", name]) == 1
    monkeypatch.setenv("NPU_TARGET", name)
    with pytest.raises(ConfigError, match=f"^NPU_TARGET='{name}' is not understood: .*{message}"):
        default_target()


def test_numbers_of_a_chip_stand_in_its_table() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "npu_compiler").rglob("*.py")
        if re.search(r"\b132\b", path.read_text())
    }
    assert found == {"npu_compiler/targets/cuda/devices.py"}


# -------------------------------------------------------------------------------------------------------- other CPUs
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x).relu().mean((2, 3))).softmax(-1)


IMAGE = (torch.linspace(-1, 1, 3 * 12 * 12).reshape(1, 3, 12, 12),)


def _net() -> tuple[Net, dict[str, np.ndarray]]:
    torch.manual_seed(3)
    net = Net().eval()
    return net, {k: v.numpy() for k, v in net.state_dict().items()}


@x86
@pytest.mark.parametrize(("device", "wide"), [("avx2", "zmm"), ("portable", "[yz]mm")])
def test_code_for_a_lesser_cpu_uses_no_more_and_runs_here(device: str, wide: str, tmp_path: Path) -> None:
    row = find_device("cpu", device)
    if host_cpu().missing(row.features):
        pytest.skip(f"this CPU cannot run {row}")
    net, weights = _net()
    program = npu_compiler.compile(capture(net, IMAGE), target=row.spec)
    assert (program.target, program.device) == ("cpu", row.spec) and "native" not in program.build["flags"]
    assert f"compiled for {row.spec}" in program.describe() and program.to_json()["device"] == row.spec
    assert not any(f.startswith("avx512") for f in program.requires)
    assert ("avx2" in program.requires) == (device == "avx2")
    program.save(tmp_path / "net.npubin")
    loaded = CompiledProgram.load(tmp_path / "net.npubin")
    assert loaded.device == row.spec
    (result,) = Executor(loaded, weights).run([IMAGE[0].numpy()]).values()
    np.testing.assert_allclose(result, net(*IMAGE).detach().numpy(), rtol=1e-5)
    if objdump := shutil.which("objdump"):
        (tmp_path / "net.so").write_bytes(program.binary)
        text = subprocess.run([objdump, "-d", tmp_path / "net.so"], capture_output=True, text=True, check=True).stdout
        assert "%xmm" in text and not re.search(f"%{wide}[0-9]", text)


@pytest.mark.parametrize("device", ["neon", "avx2", "apple-m1"])
def test_code_for_another_machine(device: str) -> None:
    """zig compiles for each; other compilers say what to do. Loading says what the program is for and what this is."""
    row = find_device("cpu", device)
    assert isinstance(row, CPUDevice)
    system, machine = row.system or "linux", row.machine
    if (system, machine) == (sys.platform, host_cpu().arch):
        pytest.skip("this is such a machine")
    net, weights = _net()
    try:
        find_compiler(machine, row.system)
    except ToolchainError as error:
        assert f"not for {machine}" in str(error)
        pytest.skip(str(error))
    program = npu_compiler.compile(capture(net, IMAGE), target=row.spec)
    assert object_kind(program.binary) == (system, machine) and "zig" in program.build["compiler"]
    assert set(row.features) <= set(program.requires)
    with pytest.raises(BackendError, match=f"compiled for {row.spec} on {system}/{machine}, this is {sys.platform}"):
        Executor(replace(program, sources={}), weights)


def test_a_program_for_a_cpu_with_more_features() -> None:
    net, weights = _net()
    made = npu_compiler.compile(capture(net, IMAGE))
    here = target_config("cpu").device
    assert here is not None and made.device == here.spec
    both = f"compiled for cpu:next and needs the CPU features avx9000, which this CPU, {here}, lacks"
    with pytest.raises(BackendError, match=f"{re.escape(both)}.*--target {here.spec}$"):
        Executor(replace(made, requires=("avx9000",), sources={}, device="cpu:next"), weights)


def test_a_model_is_built_for_a_device() -> None:
    net, _ = _net()
    model = npusim.build(net, IMAGE, target="cpu:portable")
    assert [p.device for p in model.programs] == ["cpu:portable"]
    np.testing.assert_allclose(model(*IMAGE).detach(), net(*IMAGE).detach(), rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- other GPUs
HOPPERS_OWN = ("wgmma", "tile_copy", "cluster", "TileMap")


def _code(program: CompiledProgram) -> dict[str, Any]:
    code: dict[str, Any] = unpack(program.binary)[1]
    return code


@compiles_cuda
def test_older_gpus_get_code_that_they_have_instructions_for() -> None:
    """A convolutional model and a decoder for an A100: what NVRTC accepts for it, and nothing of Hopper's own. Other
    tests compile decoders for Hopper."""
    card = LLMConfig.from_hf(small_model.config())
    graphs = {"net": capture(Net().half(), (IMAGE[0].half().expand(8, -1, -1, -1),))}
    graphs |= llm_graphs(card, max_len=64, chunks=(32,), dtype="bfloat16")
    for target, hopper in (("cuda:sm_80", False), ("cuda:sm_90", True)):
        wanted = {name: ir for name, ir in graphs.items() if name == "net" or not hopper}
        programs = [compile_entries({name: ir}, target) for name, ir in wanted.items()]
        text = "".join("".join(t for n, t in p.sources.items() if n.startswith("kernels")) for p in programs)
        assert any(word in text for word in HOPPERS_OWN) == hopper and all(p.device == target for p in programs)
        for code in map(_code, programs):
            assert code["arch"] == ("sm_90a" if hopper else "sm_80")
            for _, ptx in code["modules"].values():
                assert ptx == b"" if hopper else b".target sm_80" in zlib.decompress(ptx)


@compiles_cuda
def test_a_chip_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jetson Orin, and AMD's Zen 2: added here, and compiled for by their names."""
    monkeypatch.setattr(table, "_rows", {})
    orin = replace(find_device("cuda", "sm_86"), name="orin", chips="Jetson Orin", arch="sm_87", compute_units=16)
    zen_2 = replace(find_device("cpu", "avx2"), name="zen2", chips="Zen 2", march="znver2")
    for device in (orin, zen_2):
        register_device(device)
    row = npu_compiler.compile(capture(Net(), IMAGE), target="cuda:orin")
    assert row.device == "cuda:orin" and _code(row)["arch"] == "sm_87" and row.requires == ("sm_87",)
    assert dialect_for(orin).device.compute_units == 16 and dialect_for(orin).wgmma_widths == ()
    if host_cpu().arch == "x86_64":
        flags = npu_compiler.compile(capture(Net(), IMAGE), target="cpu:zen2").build["flags"]
        assert re.search("-m(arch|cpu)=znver2", flags)
    with pytest.raises(ConfigError, match=r"known: .*cuda:orin"):
        target_config("cuda:thor")
    assert cuda_devices.device_for((8, 7), 16) == orin, "a machine with this chip"
    assert cuda_devices.arch_of((8, 7)) == "sm_87" and cuda_devices.arch_of((9, 0)) == "sm_90a"
    assert cuda_devices.device_for((8, 8), 20).arch == "sm_88" and cuda_devices.device_for((8, 8), 20).roofline is None


def test_a_device_may_have_chunks_of_its_own() -> None:
    assert target_config("cpu:avx2").chunks == (32, 128)
    assert target_config("cpu:amx").chunks == (32, 128, 512)


def test_compute_units_decide_how_sums_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of a product keep eight compute units busy; for more of them, its sums are split."""
    monkeypatch.setattr(table, "_rows", {})
    register_device(replace(find_device("cuda", "sm_80"), name="eighth", compute_units=8))
    ir = capture(nn.Linear(4096, 512, dtype=torch.float16), (torch.zeros(128, 4096, dtype=torch.float16),))
    count = {}
    for target in ("cuda:sm_80", "cuda:eighth"):
        schedule = run_phases(ir, target, until="memory").schedule
        assert schedule is not None
        count[target] = len(schedule.kernels)
    assert count == {"cuda:sm_80": 2, "cuda:eighth": 1}


# --------------------------------------------------------------------------------------------- the GPU of this machine
class FakeLibrary:
    """The calls of libcuda that tell about GPUs: (compute capability, SMs) of each. ``broken``: a call that fails."""

    def __init__(self, gpus: list[tuple[tuple[int, int], int]], broken: str = ""):
        self.gpus, self.broken = gpus, broken

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.broken:
                return 999
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = len(self.gpus)
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = 40 + arguments[1]
            elif name == "cuDeviceGetAttribute":
                value, attribute, handle = arguments
                (major, minor), units = self.gpus[handle.value - 40]
                value._obj.value = {75: major, 76: minor, 16: units}[attribute]
            return 0

        assert name.startswith("cu"), name
        return call


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Iterator[Present]:
    def set_up(*gpus: tuple[tuple[int, int], int], broken: str = "") -> None:
        monkeypatch.setattr(cuda_devices, "_library", lambda: FakeLibrary(list(gpus), broken))
        cuda_devices.present.cache_clear()

    yield set_up
    cuda_devices.present.cache_clear()


@pytest.mark.parametrize(
    ("capability", "units", "arch", "name"),
    [
        ((8, 0), 108, "sm_80", "sm_80"),
        ((8, 6), 84, "sm_86", "sm_86"),
        ((8, 7), 16, "sm_87", "sm_87"),
        ((8, 9), 58, "sm_89", "sm_89"),
        ((9, 0), 132, "sm_90a", "sm_90"),
        ((9, 0), 114, "sm_90a", "h100-pcie"),
        ((9, 0), 16, "sm_90a", "sm_90"),
        ((10, 0), 148, "sm_100", "sm_100"),
        ((12, 1), 48, "sm_121", "sm_121"),
    ],
)
def test_the_gpu_of_this_machine_decides(
    present: Present, capability: tuple[int, int], units: int, arch: str, name: str
) -> None:
    present((capability, units), ((7, 0), 80))
    device = target_config("cuda").device
    assert isinstance(device, cuda_devices.CUDADevice) and device == TARGET.device == TARGET.dialect.device
    assert (device.arch, device.compute_units, device.name, device.capability) == (arch, units, name, capability)
    assert (TARGET.dialect.wgmma_widths != ()) == (device.tma is not None) == (arch == "sm_90a")
    assert all(blocks % size == 0 and blocks <= units for size, blocks in device.clusters)


@pytest.mark.parametrize("broken", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_without_a_gpu_that_works(present: Present, broken: str) -> None:
    present(((8, 6), 84), broken=broken)
    assert cuda_devices.present() is None and target_config("cuda").device == find_device("cuda", "sm_90")
    present()
    assert target_config("cuda").device == find_device("cuda", "sm_90")


def test_without_a_driver(present: Present, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    cuda_devices.present.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert target_config("cuda").device == find_device("cuda", "sm_90")


def test_a_chip_that_is_too_old(present: Present) -> None:
    present(((7, 0), 80))
    with pytest.raises(
        ConfigError, match=r"^the GPU of this machine has compute capability 7\.0; the oldest .* 8\.0 \(sm_80"
    ):
        target_config("cuda")
    assert target_config("cuda:sm_80").device == DIALECT.device, "compiling for another machine"


@pytest.mark.parametrize("newer", [False, True], ids=["one GPU", "and a newer one"])
def test_running_on_a_chip_that_is_too_old(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """Where CuPy is missing too, all that is missing is told."""
    found = [InstalledGPU(0, "Tesla V100", (7, 0), 16 << 30)]
    found += [InstalledGPU(1, "A100", (8, 0), 40 << 30)] if newer else []
    monkeypatch.setattr(cuda_backend, "driver", lambda: SimpleNamespace(version=(13, 0), devices=lambda: found))
    old = "Tesla V100 has compute capability 7.0; the oldest that is supported is 8.0 (sm_80: A100)"
    assert (old in cuda.CUDABackend.missing()) != newer
    assert cuda.CUDABackend.machines()[0].startswith("Tesla V100, sm_70")
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(BackendError, match=r"Tesla V100\)? has compute capability 7\.0; the oldest"):
        cuda.CUDABackend(0)


@pytest.mark.parametrize(
    ("chip", "family"), [("Apple M1 Max", "apple7"), ("Apple M4", "apple9"), ("Apple M9", "apple7"), ("", "apple7")]
)
def test_the_family_of_a_mac(chip: str, family: str) -> None:
    assert apple_device(chip).name == family


@pytest.mark.parametrize("call", [target_config, get_backend])
def test_a_target_that_is_no_text(call: Callable[[Any], object]) -> None:
    """As when the third argument of build() is taken for the keyword arguments, which torch.export.export has there."""
    with pytest.raises(ConfigError, match=r"^target is of type dict: pass a name \(cpu, cuda, metal.*\), or one such"):
        call({"x": 1})


def test_a_target_that_lacks_a_member() -> None:
    class Half:
        config = replace(target_config("cpu"), name="half")
        name = "half"

        def supports(self, kernel: Any) -> None:
            return None

    missing = "winograd, in_limbs, rewrites, emit, for_device, compiler"
    with pytest.raises(ConfigError, match=f"'half' has no {missing}: derive its class from"):
        register_target(Half())  # type: ignore[arg-type]

    class Whole(CodegenTarget):
        config, name = Half.config, "half"

        def supports(self, kernel: Any) -> None:
            return None

        def emit(self, schedules: Any, *, build: bool = True) -> Any:
            raise NotImplementedError

    whole = Whole()
    assert whole.rewrites == () and whole.winograd(None) is None and not whole.in_limbs(None)  # type: ignore[arg-type]
    assert whole.compiler() is None
    with pytest.raises(ConfigError, match="target 'half' generates code for one device, not for 'cpu:avx2'"):
        whole.for_device(find_device("cpu", "avx2"))
