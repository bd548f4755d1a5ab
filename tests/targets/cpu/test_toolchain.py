"""The C++ toolchain: building, the cache, and what goes wrong."""

from __future__ import annotations

import ctypes
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

import pytest

from npu_compiler.support.cache import Cache
from npu_compiler.support.errors import ToolchainError
from npu_compiler.support.files import is_temporary
from npu_compiler.targets.cpu import compilers, host, toolchain

from .cxx import CXX, EXPORT, ROOT, load, needs_cxx, write_script

pytestmark = pytest.mark.usefixtures("cache_dir")


def _runs(log: Path) -> tuple[int, int]:
    """(compilations, links) since the last call."""
    lines = log.read_text().splitlines()
    log.write_text("")
    return sum(" -c " in line for line in lines), sum("-shared" in line for line in lines)


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
    library = load(tmp_path, toolchain.build_shared(sources, include, jobs=2))
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
    library = load(tmp_path, toolchain.build_shared({"flags": source}, include))
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
    assert load(tmp_path, toolchain.build_shared({"a": source, "b": source}, include)).one() == 1
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
    assert load(tmp_path, toolchain.build_shared(sources, include)).a() == 5
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
    assert load(tmp_path, toolchain.build_shared(sources, include)).a() == 6
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


def test_entries_are_counted_again_when_a_share_of_the_space_left_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, counted = Cache(tmp_path / "c", 100_000), []
    entries = Cache._entries
    monkeypatch.setattr(Cache, "_entries", lambda self: counted.append(self) or entries(self))
    for i in range(10):
        cache.put(f"key{i}", bytes(1000))
        Cache(tmp_path / "c", 100_000).trim()
    assert len(counted) == 2  # at first, and after another 6,000 bytes


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
    slow = write_script(tmp_path / "bin" / "slow-c++", f'case "$*" in *slow.cpp*) sleep 60;; esac\n{CXX} "$@"')
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
    monkeypatch.setenv("NPU_CXX", str(write_script(tmp_path / "bin" / "slow-c++", body)))
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
    monkeypatch.setenv("NPU_CXX", str(write_script(tmp_path / "bin" / "liar-c++", body)))
    compilers.find_compiler()
    before = len(_entries(cache_dir))
    with pytest.raises(ToolchainError, match=f"reported success and wrote {what}\n  command: .*liar-c"):
        toolchain.build_shared({"unit": "int x;"}, include)
    assert len(_entries(cache_dir)) == before + (step == "link")  # the sound object of the first step is kept
