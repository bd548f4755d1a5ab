"""The C++ toolchain: finding a compiler, building, the cache, and what goes wrong."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.support.cache import Cache
from npu_compiler.support.errors import ToolchainError
from npu_compiler.support.files import is_temporary
from npu_compiler.targets.cpu import compilers, devices, host, toolchain
from npu_runtime import Executor

ROOT = Path(toolchain.__file__).parents[3]
EXPORT = '#include "api.h"\nAPI '
CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NPU_CXX", "CXX", "NPU_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def include(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "api.h").write_text(
        '#pragma once\n#include "deeper.h"\n#define API extern "C" __attribute__((visibility("default")))\n'
    )
    (folder / "deeper.h").write_text("constexpr int DEEP = 7;\n")
    return folder


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NPU_CXX is a wrapper that logs one line an invocation; the log starts empty after the probe."""
    log = tmp_path / "log"
    wrapper = _script(tmp_path / "bin" / "counting-c++", f'echo "$@" >> {log}\nexec {CXX} "$@"')
    monkeypatch.setenv("NPU_CXX", str(wrapper))
    compilers.find_compiler()
    log.write_text("")
    return log


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _runs(log: Path) -> tuple[int, int]:
    """(compilations, links) since the last call."""
    lines = log.read_text().splitlines()
    log.write_text("")
    return sum(" -c " in line for line in lines), sum("-shared" in line for line in lines)


def _load(tmp_path: Path, binary: bytes) -> ctypes.CDLL:
    path = tmp_path / f"{time.monotonic_ns()}.so"
    path.write_bytes(binary)
    return ctypes.CDLL(str(path))


def _entries(cache_dir: Path) -> list[Path]:
    return [path for path in (cache_dir / "kernels").rglob("*") if path.is_file()]


# ------------------------------------------------------------------------------------------------ building
@needs_cxx
def test_units_are_compiled_linked_and_callable(tmp_path: Path, include: Path) -> None:
    sources = {
        "first": EXPORT + "int twice(int x) { return 2 * x; }",
        "second": EXPORT + "int deep() { return DEEP; }",
        "third": "int hidden(int x) { return x; }",
    }
    library = _load(tmp_path, toolchain.build_shared(sources, include, jobs=2))
    assert library.twice(21) == 42
    assert library.deep() == 7
    assert not hasattr(library, "_Z6hiddeni")


@needs_cxx
def test_flags_keep_ieee_semantics_and_integers_wrap(tmp_path: Path, include: Path) -> None:
    source = EXPORT + (
        "int is_nan(float x) { return x != x; }\n"
        "API float keep_order(float a, float b) { return (a + b) - b; }\n"
        "API int wraps(int x) { return x + 1 > x; }\n"
    )
    library = _load(tmp_path, toolchain.build_shared({"flags": source}, include))
    library.is_nan.argtypes = [ctypes.c_float]
    library.keep_order.argtypes, library.keep_order.restype = [ctypes.c_float] * 2, ctypes.c_float
    assert library.is_nan(float("nan")) == 1
    assert library.keep_order(1.0, 1e30) == 0.0
    assert library.wraps(2**31 - 1) == 0


@needs_cxx
def test_cache_follows_sources_headers_and_flags(include: Path, counting: Path) -> None:
    sources = {name: EXPORT + f"int {name}() {{ return DEEP + {i}; }}" for i, name in enumerate("abc")}
    sources["plain"] = "static int nothing;"
    first = toolchain.build_shared(sources, include)
    assert _runs(counting) == (4, 1)
    assert toolchain.build_shared(sources, include) == first
    assert _runs(counting) == (0, 0)
    sources["b"] += "// changed"
    toolchain.build_shared(sources, include)
    assert _runs(counting) == (1, 1)
    (include / "deeper.h").write_text("constexpr int DEEP = 8;\n")
    assert toolchain.build_shared(sources, include) != first
    assert _runs(counting) == (3, 1)  # 'plain' includes nothing
    toolchain.build_shared(sources, include, march="x86-64" if host.host_cpu().arch == "x86_64" else "generic")
    assert _runs(counting) == (4, 1)


@needs_cxx
def test_equal_units_are_compiled_once(tmp_path: Path, include: Path, counting: Path) -> None:
    source = EXPORT + "int one() { return 1; }"
    assert _load(tmp_path, toolchain.build_shared({"a": source, "b": source}, include)).one() == 1
    assert _runs(counting) == (1, 1)


@needs_cxx
def test_a_new_compiler_is_not_served_old_objects(tmp_path: Path, include: Path, counting: Path) -> None:
    sources = {"a": EXPORT + "int a() { return 1; }"}
    toolchain.build_shared(sources, include)
    wrapper = Path(os.environ["NPU_CXX"])
    wrapper.write_text(wrapper.read_text() + "# upgraded\n")
    compilers._find.cache_clear()  # as in a new process
    _runs(counting)
    toolchain.build_shared(sources, include)
    compilations, links = _runs(counting)
    assert compilations == 2 and links == 2  # the probe, and the unit


@needs_cxx
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_entries_are_rebuilt(
    tmp_path: Path, include: Path, counting: Path, cache_dir: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {"a": EXPORT + "int a() { return 5; }"}
    toolchain.build_shared(sources, include)
    for path in _entries(cache_dir):
        blob = bytearray(path.read_bytes())
        blob[-1] ^= 1
        path.write_bytes({"truncate": bytes(blob[: len(blob) // 2]), "flip": bytes(blob), "empty": b""}[damage])
    _runs(counting)
    assert _load(tmp_path, toolchain.build_shared(sources, include)).a() == 5
    assert _runs(counting) == (1, 1)
    assert "damaged cache entry" in caplog.text
    toolchain.build_shared(sources, include)
    assert _runs(counting) == (0, 0)


@needs_cxx
def test_an_unusable_cache_costs_one_warning(
    tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "file" / "cache"))
    sources = {"a": EXPORT + "int a() { return 6; }"}
    assert _load(tmp_path, toolchain.build_shared(sources, include)).a() == 6
    assert "cannot be written" in caplog.text and "NPU_CACHE_DIR" in caplog.text


@needs_cxx
def test_cache_can_be_turned_off(tmp_path: Path, include: Path, counting: Path, cache_dir: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shutil.rmtree(cache_dir)
    monkeypatch.setenv("NPU_CACHE_SIZE", "0")
    sources = {"a": EXPORT + "int a() { return 1; }"}
    toolchain.build_shared(sources, include)
    _runs(counting)
    toolchain.build_shared(sources, include)
    assert _runs(counting) == (1, 1)
    assert _entries(cache_dir) == []


def test_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 10_000)
    for i in range(8):
        cache.put(f"key{i}", bytes([i]) * 1000)
    for age, (_, _, path) in enumerate(sorted(cache._entries(), key=lambda entry: entry[2].read_bytes()[-1])):
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.get("key0") == bytes(1000)  # a use, so it is now the newest
    cache.put("big", bytes(4000))
    assert cache.size() > 10_000
    cache.trim()
    assert cache.size() <= 9_000
    assert cache.get("key0") is not None and cache.get("big") is not None
    assert cache.get("key1") is None and cache.get("key2") is None and cache.get("key7") is not None
    cache.put("larger than all", bytes(20_000))
    assert cache.get("larger than all") is None


def test_a_cache_that_is_off_keeps_what_others_stored(tmp_path: Path) -> None:
    kept = Cache(tmp_path / "c", 10_000)
    kept.put("key", b"data")
    off = Cache(tmp_path / "c", 0)
    off.put("other", b"data")
    off.trim()
    assert off.get("key") is None and kept.get("key") == b"data" and kept.get("other") is None


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 10_000)
    cache.put("key", b"data")
    (entry,) = cache._entries()
    old, new = (entry[2].parent / f".{name * 60}.1.0123456789ab.tmp" for name in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert cache.size() == entry[1]
    cache.trim()
    assert not old.exists() and new.exists() and cache.get("key") == b"data"


_CONCURRENT = """
import ctypes, sys, tempfile
from npu_compiler.targets.cpu.toolchain import build_shared
sources = {f"u{i}": f'extern "C" __attribute__((visibility("default"))) int f{i}() {{ return {i}; }}' for i in range(4)}
binary = build_shared(sources, ".", jobs=2)
with tempfile.NamedTemporaryFile(suffix=".so") as file:
    file.write(binary)
    file.flush()
    library = ctypes.CDLL(file.name)
    print(sum(getattr(library, f"f{i}")() for i in range(4)))
"""


@needs_cxx
def test_processes_that_build_the_same_at_once_compile_it_once(cache_dir: Path, counting: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _CONCURRENT], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [stdout.strip() for stdout, _ in outputs] == ["6"] * 4, outputs
    assert [stderr for _, stderr in outputs] == [""] * 4
    assert _runs(counting) == (4, 1)
    assert not [path for path in _entries(cache_dir) if is_temporary(path.name)]


def test_concurrent_writers_and_readers_see_whole_entries(tmp_path: Path) -> None:
    values = [bytes([i]) * 200_000 for i in range(4)]
    stop = threading.Event()

    def write(value: bytes) -> None:
        while not stop.is_set():
            Cache(tmp_path / "c", 10**9).put("key", value)

    with ThreadPoolExecutor(4) as pool:
        for value in values:
            pool.submit(write, value)
        seen = []
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            found = Cache(tmp_path / "c", 10**9).get("key")
            if found is not None:
                seen.append(found)
        stop.set()
    assert seen and all(value in values for value in seen)


# ------------------------------------------------------------------------------------------------ errors
@needs_cxx
def test_compile_error_gives_the_line_the_command_and_the_source(include: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        toolchain.build_shared({"fine": "int x;", "broken": EXPORT + "int f() { return undeclared; }"}, include)
    first, command, kept = str(caught.value).splitlines()
    assert "broken.cpp:2:" in first and "undeclared" in first
    path = Path(kept.split("kept in ")[1])
    assert "undeclared" in path.read_text()
    again = subprocess.run(command.removeprefix("  command: "), shell=True, text=True, capture_output=True)
    assert again.returncode != 0 and "undeclared" in again.stderr


@needs_cxx
def test_undefined_symbols_fail_at_link_time(include: Path) -> None:
    with pytest.raises(ToolchainError, match=r"linking failed: .*missing_function"):
        toolchain.build_shared({"a": EXPORT + "int f() { extern int missing_function(); return missing_function(); }"},
                               include)  # fmt: skip


def test_a_bad_unit_name_is_refused(include: Path) -> None:
    with pytest.raises(ValueError, match=r"'\.\./x' cannot name a translation unit"):
        toolchain.build_shared({"../x": ""}, include)


@needs_cxx
def test_timeout_ends_the_compiler_and_its_children(
    tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _script(tmp_path / "bin" / "slow-c++", f'case "$*" in *slow.cpp*) sleep 60;; esac\n{CXX} "$@"')
    monkeypatch.setenv("NPU_CXX", str(slow))
    compilers.find_compiler()
    start = time.monotonic()
    with pytest.raises(ToolchainError, match=r"no end after 0.5 s: .*slow\.cpp"):
        toolchain.build_shared({"slow": "int x;"}, include, timeout=0.5)
    assert time.monotonic() - start < 10  # not 60: the sleep, a grandchild, holds the output pipes


@needs_cxx
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to find processes in")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_and_no_folder_outlives_an_interrupted_build(
    tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    for folder in (pids, scratch):
        folder.mkdir()
    # Two processes for each unit, as a compiler's driver has them; the folder holds one file for each.
    body = f'case "$*" in *slow*.cpp*) echo > {pids}/$$; sleep 120 & echo > {pids}/$!; wait;; esac\nexec {CXX} "$@"'
    monkeypatch.setenv("NPU_CXX", str(_script(tmp_path / "bin" / "slow-c++", body)))
    compilers.find_compiler()  # the probe's result is in the cache now
    monkeypatch.setenv("TMPDIR", str(scratch))
    script = (
        "import signal\n"
        "from npu_compiler.targets.cpu import toolchain\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background ignores SIGINT
        f"toolchain.build_shared({{'slow1': 'int x;', 'slow2': 'int y;', 'slow3': 'int z;'}}, {str(include)!r}, jobs=2)"
    )
    build = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    _wait_until(lambda: len(list(pids.iterdir())) == 4)
    start = time.monotonic()
    build.send_signal(number)
    stderr = build.communicate(timeout=60)[1]
    assert time.monotonic() - start < 30  # not 120
    _wait_until(lambda: not any(_is_running(int(file.name)) for file in pids.iterdir()))
    _wait_until(lambda: not any(scratch.iterdir()))
    assert len(list(pids.iterdir())) == 4  # the third unit was never begun
    if number == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt") and stderr.count("Traceback") == 1
    else:
        assert (build.returncode, stderr) == (-number, "")


def _wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Whether the process exists and is not merely waited for by its parent."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@needs_cxx
@pytest.mark.parametrize(("step", "option"), [("compile", " -c "), ("link", "-shared")])
@pytest.mark.parametrize(("write", "what"), [("", "nothing"), ("echo 0 > $out", "a file that is not an object")])
def test_a_compiler_that_reports_success_must_have_written_an_object(
    tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path,
    step: str, option: str, write: str, what: str,
) -> None:  # fmt: skip
    body = f'case "$*" in *probe*) ;; *"{option}"*) for out; do :; done; {write or ":"}; exit 0;; esac\nexec {CXX} "$@"'
    monkeypatch.setenv("NPU_CXX", str(_script(tmp_path / "bin" / "liar-c++", body)))
    compilers.find_compiler()
    before = len(_entries(cache_dir))
    with pytest.raises(ToolchainError, match=f"reported success and wrote {what}\n  command: .*liar-c"):
        toolchain.build_shared({"unit": "int x;"}, include)
    assert len(_entries(cache_dir)) == before + (step == "link")  # the sound object of the first step is kept


@needs_cxx
def test_a_probe_without_its_function_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.cpp"
    empty.touch()
    body = f'case "$*" in *" -c probe.cpp"*) exec {CXX} -fPIC -c {empty} -o probe.o;; esac\nexec {CXX} "$@"'
    monkeypatch.setenv("NPU_CXX", str(_script(tmp_path / "bin" / "odd-c++", body)))
    with pytest.raises(ToolchainError, match=r"makes objects that do not load here: .*npu_probe"):
        compilers.find_compiler()


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
        _script(tmp_path / "bin" / name, f'exec {CXX} "$@"')
    assert compilers.find_compiler().origin == "PATH"
    monkeypatch.setenv("CXX", f"{tmp_path}/bin/theirs")
    assert compilers.find_compiler().origin == "CXX"
    monkeypatch.setenv("NPU_CXX", f"{tmp_path}/bin/mine -DEXTRA='a b'")
    assert compilers.find_compiler().argv == (f"{tmp_path}/bin/mine", "-DEXTRA=a b")


@needs_cxx
def test_a_broken_compiler_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _script(tmp_path / "bin" / "c++", "echo 'error: licence expired' >&2; exit 1").parent
    good = _script(folder / "g++", f'exec {CXX} "$@"')
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
    command = str(tmp_path / "bin" / "broken") if body is None else str(_script(tmp_path / "bin" / "broken", body))
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
    library = _load(tmp_path, toolchain.build_shared({"a": source}, include))
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
    broken = _script(tmp_path / "bin" / "broken-c++", "exit 1")
    monkeypatch.setenv("NPU_CXX", str(broken))
    with pytest.raises(ToolchainError, match="cannot be used"):
        compilers.find_compiler()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(ToolchainError, match=r"compiler can work here: .* is mounted noexec, .*; set TMPDIR"):
        compilers.find_compiler()
