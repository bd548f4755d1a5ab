"""Finding a C++ compiler, what it is asked for, and the CPUs that it compiles for."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.support.errors import ToolchainError
from npu_compiler.targets.cpu import compilers, devices, host, toolchain
from npu_runtime import Executor

from .cxx import CXX, EXPORT, ROOT, load, needs_cxx, write_script

pytestmark = pytest.mark.usefixtures("cache_dir")


# ------------------------------------------------------------------------------------------------ finding a compiler
@needs_cxx
def test_the_probe_runs_once(counting: Path) -> None:
    compilers._find.cache_clear()  # as in a new process
    compiler = compilers.find_compiler()
    assert counting.read_text() == ""
    assert compiler.kind in ("gcc", "clang") and compiler.version.split(".")[0].isdigit()
    assert compiler.argv == (os.environ["NPU_CXX"],) and compiler.origin == "NPU_CXX"


@needs_cxx
def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        write_script(tmp_path / "bin" / name, f'exec {CXX} "$@"')
    assert compilers.find_compiler().origin == "PATH"
    monkeypatch.setenv("CXX", f"{tmp_path}/bin/theirs")
    assert compilers.find_compiler().origin == "CXX"
    monkeypatch.setenv("NPU_CXX", f"{tmp_path}/bin/mine -DEXTRA='a b'")
    assert compilers.find_compiler().argv == (f"{tmp_path}/bin/mine", "-DEXTRA=a b")


@needs_cxx
def test_a_broken_compiler_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_script(tmp_path / "bin" / "c++", "echo 'error: licence expired' >&2; exit 1").parent
    good = write_script(folder / "g++", f'exec {CXX} "$@"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert compilers.find_compiler().argv == (str(good),)


@pytest.mark.parametrize("variable", ["NPU_CXX", "CXX"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "no such program"),
        ("echo 'c++: error: bad licence' >&2; exit 1", "bad licence"),
        ("exit 0", "neither gcc nor clang"),
    ],
)
def test_a_named_compiler_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, body: str | None, reason: str
) -> None:
    command = str(tmp_path / "bin" / "broken") if body is None else str(write_script(tmp_path / "bin" / "broken", body))
    monkeypatch.setenv(variable, command)
    with pytest.raises(ToolchainError) as caught:
        compilers.find_compiler()
    message = str(caught.value)
    assert message.startswith(f"{variable}={command!r} cannot be used: ") and reason in message
    assert "\n" not in message


def test_no_compiler_at_all_says_what_to_install(
    tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError) as caught:
        toolchain.build_shared({"a": ""}, include)
    message = str(caught.value)
    assert "install g++" in message and "pip install ziglang" in message and "\n" not in message
    report = compilers.compiler_report()
    assert report["compiler"] is None and report["error"] == message


def test_ziglang_serves_where_nothing_else_does(tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = compilers.find_compiler()
    assert (compiler.kind, compiler.origin) == ("zig", "ziglang")
    source = "#include <math.h>\n" + EXPORT + "int f(float x) { return (int)expf(x); }"
    library = load(tmp_path, toolchain.build_shared({"a": source}, include))
    library.f.argtypes = [ctypes.c_float]
    assert library.f(2.0) == 7


def test_clang_takes_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vectors of comparisons have types of their own, which matters where a vector takes two registers."""
    pytest.importorskip("ziglang")
    monkeypatch.setenv("NPU_CXX", f"{sys.executable} -m ziglang c++")
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    x, n = torch.linspace(-3, 3, 2 * 40, dtype=torch.float64).view(2, 40), torch.arange(80).view(2, 40) % 7

    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.where(n < 3, x.relu(), -x)
            return y, (n - 3).abs().clamp(max=2), torch.gather(y.float(), 1, n), y.softmax(-1), y.amax(-1), n.argmax(-1)

    program = npu_compiler.compile(npu_compiler.capture(Wide(), (x, n)))
    results = Executor(program, None).run([x.numpy(), n.numpy()]).values()
    for found, wanted in zip(results, Wide()(x, n), strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12)


@needs_cxx
def test_a_probe_without_its_function_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.cpp"
    empty.touch()
    body = f'case "$*" in *" -c probe.cpp"*) exec {CXX} -fPIC -c {empty} -o probe.o;; esac\nexec {CXX} "$@"'
    monkeypatch.setenv("NPU_CXX", str(write_script(tmp_path / "bin" / "odd-c++", body)))
    with pytest.raises(ToolchainError, match=r"makes objects that do not load here: .*npu_probe"):
        compilers.find_compiler()


# ------------------------------------------------------------------------------------------------ CPUs
@needs_cxx
def test_required_features_come_from_the_flags(counting: Path) -> None:
    cpu = host.host_cpu()
    native = compilers.required_features("native")
    assert cpu.missing(native) == []
    assert devices.device_of(native, cpu.arch).runs_on(cpu)
    if cpu.arch == "x86_64":
        haswell = compilers.required_features("haswell")
        assert {"avx2", "fma", "f16c", "bmi2"} <= haswell and not any(name.startswith("avx512") for name in haswell)
        assert devices.device_of(haswell, cpu.arch).name == "avx2"
        server = compilers.required_features("cooperlake")
        assert {"avx512f", "avx512bf16", "avx512vnni"} <= server
        assert devices.device_of(server, cpu.arch).name == "avx512"
        assert devices.device_of(compilers.required_features("x86-64"), cpu.arch).name == "portable"
        assert {"amx_tile", "amx_bf16", "amx_int8"} <= compilers.required_features("sapphirerapids")
    counting.write_text("")
    assert compilers.required_features("native") == native
    assert counting.read_text() == ""
    with pytest.raises(ToolchainError, match="no-such-cpu"):
        compilers.required_features("no-such-cpu")


def test_cpuinfo_is_read_in_one_vocabulary() -> None:
    x86 = "model name\t: Some CPU\nflags\t: pni abm avx2 avx512_bf16 avx_vnni sse4_1\n\nflags\t: pni avx2 sse4_1 f16c\n"
    features, name = host.parse_cpuinfo(x86)
    assert name == "Some CPU"
    assert features == {"sse3", "avx2", "sse4_1"}  # what both cores have
    arm, _ = host.parse_cpuinfo("Features\t: fp asimd asimdhp asimddp atomics bf16 i8mm\n")
    assert arm >= {"neon", "fp16", "dotprod", "lse", "bf16", "i8mm"}
    assert host.parse_cpuinfo("nothing here") == (frozenset(), "")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the CPU is described in another way")
def test_tiles_that_the_system_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset({"avx2", "amx_tile", "amx_bf16"})
    monkeypatch.setattr(host, "parse_cpuinfo", lambda text: (features, "Some CPU"))
    for granted in (True, False):
        monkeypatch.setattr(host, "_tiles_granted", lambda granted=granted: granted)
        cpu = host.host_cpu.__wrapped__()
        assert cpu.features == (features if granted else {"avx2"}) and cpu.features | cpu.refused == features
        monkeypatch.setattr(compilers, "host_cpu", lambda cpu=cpu: cpu)
        x86 = compilers._flags("gcc", "native", "x86_64")
        assert ("-mno-amx-bf16" in x86, "-mno-amx-tile" in x86) == (not granted, not granted)
        named = next(f for f in compilers._flags("zig", "native", "x86_64") if f.startswith("-mcpu"))
        assert named == ("-mcpu=native" if granted else "-mcpu=native-amx_bf16-amx_tile")
        assert not any("amx" in f for f in compilers._flags("gcc", "x86-64-v3", "x86_64"))


def test_gcc_tunes_for_no_amd_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for maker in ("AMD EPYC", "Intel(R) Xeon(R) Processor"):
        cpu = host.HostCPU("x86_64", frozenset({"avx2"}), maker)
        monkeypatch.setattr(compilers, "host_cpu", lambda cpu=cpu: cpu)
        assert ("-mtune=generic" in compilers._flags("gcc", "native")) == maker.startswith("AMD")
        assert "-mtune=generic" in compilers._flags("gcc", "znver3+avx512f")
        assert "-mtune=generic" not in compilers._flags("gcc", "x86-64-v3")
        assert "-mtune=generic" not in compilers._flags("clang", "native")


@pytest.mark.parametrize(
    ("features", "machine", "name", "system"),
    [
        (
            "amx_tile amx_bf16 amx_int8 avx512bf16 avx512f avx512bw avx512dq avx512vl avx2 fma f16c",
            "x86_64",
            "amx",
            "linux",
        ),
        ("avx512bf16 avx512f avx512bw avx512dq avx512vl avx2 fma f16c", "x86_64", "avx512", "linux"),
        ("avx512f avx512bw avx512dq avx512vl avx2 fma f16c", "x86_64", "x86-64-v4", "linux"),
        ("avx512f avx2 fma f16c", "x86_64", "avx2", "linux"),
        ("avx2 fma", "x86_64", "portable", "linux"),
        ("neon", "aarch64", "neon", "linux"),
        ("neon fp16 dotprod lse rdm", "aarch64", "armv8.2", "linux"),
        ("neon fp16 dotprod lse bf16 i8mm", "aarch64", "armv8.6", "linux"),
        ("neon fp16 dotprod lse rdm fcma", "aarch64", "apple-m1", "darwin"),
        ("neon fp16 dotprod lse bf16 i8mm", "aarch64", "apple-m2", "darwin"),
        ("", "riscv64", "portable", "linux"),
    ],
)
def test_the_row_of_a_cpu(features: str, machine: str, name: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert devices.device_of(features.split(), machine).name == name


def test_the_maker_decides_between_rows_of_equal_features() -> None:
    bf16 = "avx512bf16 avx512f avx512bw avx512dq avx512vl avx2 fma f16c".split()
    assert devices.device_of(bf16, "x86_64", "Intel(R) Xeon(R) Platinum 8380H CPU @ 2.90GHz").name == "cooperlake"
    assert devices.device_of(bf16, "x86_64", "AMD EPYC 9554 64-Core Processor").name == "avx512"


def test_bfloat16_is_not_slower_than_float32() -> None:
    """The rate of the table decides, not the flag of an instruction."""
    rates = {d.name: d.costs.bfloat16_rate for d in devices.DEVICES}
    assert rates["amx"] > rates["avx512"] > rates["cooperlake"] == 1


@needs_cxx
def test_report_is_complete_and_serialisable(cache_dir: Path) -> None:
    report = compilers.compiler_report()
    compiler = report["compiler"]
    assert isinstance(compiler, dict) and compiler["version"] and "-O3" in compiler["flags"]
    assert report["error"] is None
    assert report["device"] in [d.spec for d in devices.DEVICES]
    size = report["cache"]["bytes"]
    assert report["cache"] == {"path": str(cache_dir / "kernels"), "bytes": size, "limit": 2**31, "obstacle": ""}


# ------------------------------------------------------------------------------------------------- temporary files


@needs_cxx
def test_a_full_folder_for_temporary_files_is_the_cause_that_is_named() -> None:
    script = (
        "import resource\n"
        "from npu_compiler.targets.cpu import compilers\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"  # what is longer fails to be written, as on a full disk
        "try: compilers.find_compiler()\n"
        "except compilers.ToolchainError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("no C++ compiler can work here: temporary files cannot be written"), found
    assert "set TMPDIR to another folder" in found.stdout and "install" not in found.stdout


@needs_cxx
def test_a_noexec_folder_for_temporary_files_is_the_cause_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write_script(tmp_path / "bin" / "broken-c++", "exit 1")
    monkeypatch.setenv("NPU_CXX", str(broken))
    with pytest.raises(ToolchainError, match="cannot be used"):
        compilers.find_compiler()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(ToolchainError, match=r"compiler can work here: .* is mounted noexec, .*; set TMPDIR"):
        compilers.find_compiler()
