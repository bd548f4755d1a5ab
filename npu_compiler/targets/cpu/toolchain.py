"""Finds a C++ compiler and turns sources into one shared object, through an on-disk cache.

The compiler is the first of: ``NPU_CXX``, ``CXX``, then ``c++``/``g++``/``clang++`` on PATH, then the ``ziglang``
package. One named explicitly must work; the others are skipped when a probe program fails. Sources are freestanding
C++17 (no exceptions, RTTI or C++ library), so every one of these compilers can serve.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ...artifact.program import SOURCE_NAME
from ...support import env, progress
from ...support.cache import Cache, make_folders, open_cache
from ...support.errors import NPUError, ToolchainError
from .devices import device_at_hand
from .host import MACRO_FEATURES, HostCPU, host_cpu, object_kind
from .processes import Finished, Workplace, workplace

__all__ = [
    "Compiler",
    "HostCPU",
    "build_shared",
    "compile_flags",
    "compiler_report",
    "find_compiler",
    "host_cpu",
    "required_features",
]

TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 120.0  # ziglang's first run builds parts of its runtime
_PROBE_BYTES = 1 << 20  # about what a probe writes
_INSTALL = "install g++ (12 or newer) or clang++ (16 or newer), or run: pip install ziglang"

# No -ffast-math: it would break infinities in masks, NaN checks and signed zeros. Integer tensors wrap around as in
# PyTorch, and one arena holds tensors of all dtypes: hence -fwrapv and -fno-strict-aliasing.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fPIC",
)

# Uses each language extension the kernels rely on, so an old compiler fails here and not in the middle of a build.
_PROBE = r"""
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
template <int N> static inline vf times(vf x) {
  if constexpr (N == 2) return x + x;
  else return x;
}
extern "C" __attribute__((visibility("default"))) int npu_probe(int n) {
  vf x = vf{} + (float)n;
  vf y = times<2>(x) > x ? x : -x;
  y = __builtin_shufflevector(y, y, 7, 6, 5, 4, 3, 2, 1, 0);
  vi i = __builtin_convertvector(y, vi);
  return i[0] + (int)(0x1p1f * y[7]);
}
"""


@dataclass(frozen=True)
class Compiler:
    """A usable C++ compiler.

    ``argv`` is the command prefix; ``kind`` is 'gcc', 'clang' or 'zig'; ``origin`` says where it was found ('NPU_CXX',
    'CXX', 'PATH' or 'ziglang'); ``identity`` changes whenever the compiler does.
    """

    argv: tuple[str, ...]
    kind: str
    version: str
    origin: str
    identity: str

    def __str__(self) -> str:
        return f"{shlex.join(self.argv)} ({self.kind} {self.version})"


def _is_zig(argv: Sequence[str]) -> bool:
    return any(Path(word).name in ("zig", "ziglang", "zig.exe") for word in argv[:-1])


_LEAST = {"x86_64": "x86-64", "aarch64": "generic"}


def _march_flags(kind: str, march: str, machine: str = "") -> list[str]:
    machine = machine or host_cpu().arch
    march = march or _LEAST.get(machine, "")
    flags = []
    if kind == "zig" and sys.platform.startswith("linux"):
        # A target with a version makes zig use its own libc headers and stubs, whatever the machine has installed.
        libc = "musl" if platform.libc_ver()[0] == "musl" else "gnu.2.17"
        flags = ["-target", f"{machine}-linux-{libc}"]
    if not march:
        return flags
    if kind == "zig":
        return [*flags, "-mcpu=" + march.replace("-", "_")]
    if machine == "aarch64":
        return ["-mcpu=" + march]
    name, *extensions = march.split("+")
    return ["-march=" + name, *("-m" + extension for extension in extensions)]


def _flags(kind: str, march: str, machine: str = "") -> list[str]:
    march_flags = _march_flags(kind, march, machine)
    return [*_FLAGS, "-Wno-psabi" if kind == "gcc" else "-fno-sanitize=undefined", *march_flags]


def _link_flags(kind: str, march: str, machine: str = "") -> list[str]:
    if kind == "zig":
        # Without its libraries nothing has to be built; libc and libm come from the process that loads the object.
        return ["-shared", "-O3", "-nostdlib", *_march_flags(kind, march, machine)]
    if sys.platform.startswith("linux"):
        return ["-shared", "-Wl,--as-needed", "-Wl,-z,defs", "-lm", "-lpthread"]
    return ["-shared"]


def compile_flags(march: str = "native", compiler: Compiler | None = None, machine: str = "") -> list[str]:
    """The flags sources are compiled with.

    ``march``: 'native', a CPU name of the compiler like 'haswell', one with extensions like 'x86-64-v4+avx512bf16', or
    nothing: the least that ``machine`` has. ``machine``: 'x86_64' or 'aarch64'; nothing: that of this process.
    """
    return _flags((compiler or find_compiler(machine)).kind, march, machine)


# ------------------------------------------------------------------------------------------------ finding a compiler
def _identity(argv: Sequence[str]) -> str:
    """Changes when a file of the command is replaced; cheap, as no program runs."""
    parts: list[object] = [tuple(argv), sys.platform, platform.machine()]
    for word in argv:
        found = shutil.which(word)
        if found is not None:
            real = os.path.realpath(found)
            stat = os.stat(real)
            parts += [real, stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _macros(argv: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """The macros a compiler predefines under ``flags``."""
    with workplace() as place:
        (place.folder / "empty.cpp").touch()
        run = place.run([*argv, *flags, "-dM", "-E", "empty.cpp"], _PROBE_TIMEOUT_S)
    if run.status:
        raise ToolchainError(run.first_error())
    return dict(re.findall(r"^#define (\w+) ?(.*)$", run.stdout, re.MULTILINE))


def _try_probe(argv: Sequence[str], kind: str) -> None:
    with workplace() as place:
        (place.folder / "probe.cpp").write_text(_PROBE)
        for command in (
            [*argv, *_flags(kind, "native"), "-c", "probe.cpp", "-o", "probe.o"],
            [*argv, "probe.o", *_link_flags(kind, "native"), "-o", "probe.so"],
        ):
            run = place.run(command, _PROBE_TIMEOUT_S)
            if run.status:
                raise ToolchainError(run.first_error())
        try:
            answer = ctypes.CDLL(str(place.folder / "probe.so")).npu_probe(7)
        except (OSError, AttributeError) as error:  # AttributeError: without the function
            raise ToolchainError(f"it makes objects that do not load here: {error}") from None
        if answer != 21:
            raise ToolchainError(f"it miscompiles the probe program ({answer} instead of 21)")


def _probe(argv: tuple[str, ...], origin: str, cache: Cache) -> Compiler:
    """The compiler behind ``argv``; raises ``ToolchainError`` with the bare reason if it cannot serve."""
    if not argv or shutil.which(argv[0]) is None:
        raise ToolchainError("there is no such program")
    identity = _identity(argv)
    key = f"compiler {identity} {hashlib.sha256(_PROBE.encode()).hexdigest()} {sorted(host_cpu().features)}"
    known = cache.get(key)
    if known is not None:
        kind, version = json.loads(known)
    else:
        macros = _macros(argv, [])
        kind = "zig" if _is_zig(argv) else "clang" if "__clang__" in macros else "gcc" if "__GNUC__" in macros else ""
        if not kind:
            raise ToolchainError("it is neither gcc nor clang")
        numbers = [macros.get(name, "0") for name in
                   (("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__") if kind == "gcc" else
                    ("__clang_major__", "__clang_minor__", "__clang_patchlevel__"))]  # fmt: skip
        version = ".".join(numbers)
        _try_probe(argv, kind)
        cache.put(key, json.dumps([kind, version]).encode())
    return Compiler(argv, kind, version, origin, hashlib.sha256(f"{identity} {version}".encode()).hexdigest())


def _implicit_candidates() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(origin, argv) of the compilers nobody named, best first."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            yield "PATH", (path,)
    spec = importlib.util.find_spec("ziglang")
    if spec is not None:
        folder = Path((spec.submodule_search_locations or ["."])[0])
        binary = folder / ("zig.exe" if os.name == "nt" else "zig")
        # The binary itself saves starting another Python for every source.
        yield "ziglang", (str(binary), "c++") if binary.exists() else (sys.executable, "-m", "ziglang", "c++")


def _check_folder(failures: str) -> None:
    """Raises ``ToolchainError`` if the folder for temporary files is why no compiler worked."""
    problem = None
    try:
        with workplace() as place:
            with open(place.folder / "space", "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            if hasattr(os, "statvfs") and os.statvfs(place.folder).f_flag & getattr(os, "ST_NOEXEC", 0):
                problem = f"{place.folder.parent} is mounted noexec, so that nothing compiled there can be loaded"
    except OSError as error:
        where = Path(error.filename).parent.parent if error.filename else "TMPDIR"
        problem = f"temporary files cannot be written ({where}: {error.strerror or error})"
    if problem is not None:
        raise ToolchainError(f"no C++ compiler can work here: {problem}; set TMPDIR to another folder ({failures})")


@lru_cache(maxsize=16)
def _find(named: tuple[tuple[str, str], ...], path: str, cache_dir: Path, cache_size: int) -> Compiler:
    del path, cache_dir, cache_size  # parts of the key: another value may find another compiler
    cache = open_cache("kernels")
    for variable, command in named:
        try:
            return _probe(tuple(shlex.split(command)), variable, cache)
        except (ToolchainError, ValueError, OSError) as error:
            _check_folder(f"{variable}={command!r}: {error}")
            raise ToolchainError(
                f"{variable}={command!r} cannot be used: {error}; name a working C++17 compiler or unset {variable}"
            ) from None
    failures = []
    for origin, argv in _implicit_candidates():
        try:
            return _probe(argv, origin, cache)
        except (ToolchainError, OSError) as error:
            failures.append(f"{shlex.join(argv)}: {error}")
    if failures:
        _check_folder("; ".join(failures))
    tried = f" (tried {'; '.join(failures)})" if failures else ""
    raise ToolchainError(f"no working C++ compiler: {_INSTALL}{tried}")


def find_compiler(machine: str = "") -> Compiler:
    """The C++ compiler in effect (see the module's text for the order); for another ``machine`` than this one, zig.

    The probe runs once per compiler binary and machine; later processes read its result from the cache.
    Raises ``ToolchainError``: one line that says what to install, or what is wrong with the compiler that was named.
    """
    compiler, host = _native_compiler(), host_cpu().arch
    if machine in ("", host) or (compiler.kind == "zig" and sys.platform.startswith("linux")):
        return compiler
    for origin, argv in _implicit_candidates():
        if origin == "ziglang" and sys.platform.startswith("linux"):
            return _probe(argv, origin, open_cache("kernels"))
    raise ToolchainError(
        f"{compiler} compiles for {host}, not for {machine}; on Linux zig can: pip install ziglang. "
        f"Or compile on a machine with such a CPU"
    )


def _native_compiler() -> Compiler:
    named = [("NPU_CXX", env.cxx() or ""), ("CXX", os.environ.get("CXX", "").strip())]
    return _find(
        tuple((variable, command) for variable, command in named if command)[:1],
        os.environ.get("PATH", ""),
        env.cache_dir(),
        env.cache_size(),
    )


def _machine(march: str) -> str:
    """What 'native' stands for on this machine, for cache keys."""
    cpu = host_cpu()
    return f"{cpu.arch} {cpu.name} {' '.join(sorted(cpu.features))}" if march == "native" else cpu.arch


def required_features(march: str = "native", compiler: Compiler | None = None, machine: str = "") -> frozenset[str]:
    """CPU features that objects built for ``march`` may use, as the compiler's own macros tell.

    Compare with :meth:`HostCPU.missing`. Raises ``ToolchainError`` if the compiler does not know ``march``.
    """
    compiler = compiler or find_compiler(machine)
    flags = compile_flags(march, compiler, machine)
    cache = open_cache("kernels")
    key = f"features {compiler.identity} {flags} {_machine(march)} {sorted(MACRO_FEATURES.items())}"
    known = cache.get(key)
    if known is not None:
        return frozenset(json.loads(known))
    macros = _macros(compiler.argv, flags)
    features = sorted(feature for macro, feature in MACRO_FEATURES.items() if macro in macros)
    cache.put(key, json.dumps(features).encode())
    return frozenset(features)


# ------------------------------------------------------------------------------------------------ building
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class _Headers:
    """Digests of the headers a source includes by quotes, directly or not. ``#if`` is ignored: at worst a recompile."""

    def __init__(self, include_dir: Path):
        self._dir = include_dir
        self._texts: dict[str, str | None] = {}

    def _text(self, name: str) -> str | None:
        if name not in self._texts:
            path = self._dir / name
            self._texts[name] = path.read_text(encoding="utf-8") if path.is_file() else None
        return self._texts[name]

    def digest(self, source: str) -> str:
        """Changes when any included header does; a header outside ``include_dir`` does not count."""
        found: dict[str, str] = {}
        waiting = _INCLUDE.findall(source)
        while waiting:
            name = waiting.pop()
            text = self._text(name)
            if name not in found and text is not None:
                found[name] = text
                beside = Path(name).parent
                for inner in _INCLUDE.findall(text):
                    waiting += [inner, str(beside / inner)]
        return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@dataclass(frozen=True)
class _Build:
    """What all translation units of one :func:`build_shared` have in common."""

    compiler: Compiler
    flags: tuple[str, ...]
    include_dir: Path
    cache: Cache
    timeout: float

    def compile(self, name: str, source: str, key: str, place: Workplace) -> Path:
        """One translation unit to an object file in ``place``, from the cache if it is there."""
        target = place.folder / f"{name}.o"
        cached = self.cache.get(key)
        if cached is not None:
            target.write_bytes(cached)
            return target
        file = place.folder / f"{name}.cpp"
        file.write_text(source, encoding="utf-8")
        # -iquote, not -I: the kernels' math.h must not hide the system's.
        search = ["-iquote", str(self.include_dir)]
        command = [*self.compiler.argv, *self.flags, *search, "-c", file.name, "-o", target.name]
        run = place.run(command, self.timeout)
        if run.status:
            raise ToolchainError(self._failure(name, source, run, command, file.name))
        self.cache.put(key, _object_bytes(target, command))
        return target

    def _failure(self, name: str, source: str, run: Finished, command: Sequence[str], file: str) -> str:
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        kept = env.cache_dir() / "failed" / f"{name}-{digest}.cpp"
        try:
            make_folders(kept.parent)
            kept.write_text(source, encoding="utf-8")
            command = [str(kept) if word == file else word for word in command[:-1]] + [os.devnull]
            where = f"source kept in {kept}"
        except OSError as error:
            where = f"the source could not be kept: {error}"
        return f"the compiler rejected {name}: {run.first_error()}\n  command: {shlex.join(command)}\n  {where}"

    def link(self, objects: Sequence[Path], flags: Sequence[str], place: Workplace) -> bytes:
        """Object files to the bytes of one shared object."""
        names = [path.name for path in objects]
        command = [*self.compiler.argv, *names, *flags, "-o", "program.so"]
        run = place.run(command, self.timeout)
        if run.status:
            raise ToolchainError(f"linking failed: {run.first_error()}\n  command: {shlex.join(command)}")
        return _object_bytes(place.folder / "program.so", command)


def _object_bytes(path: Path, command: Sequence[str]) -> bytes:
    """What a compiler wrote to ``path``. Raises ``ToolchainError`` if that is not an object file."""
    data = path.read_bytes() if path.is_file() else b""
    if not object_kind(data)[0]:
        what = "a file that is not an object" if data else "nothing"
        raise ToolchainError(
            f"the compiler reported success and wrote {what}\n  command: {shlex.join(command)}\n"
            "  name another compiler in NPU_CXX"
        )
    return data


def build_shared(
    sources: Mapping[str, str],
    include_dir: str | os.PathLike[str],
    *,
    march: str = "native",
    machine: str = "",
    jobs: int | None = None,
    timeout: float = TIMEOUT_S,
) -> bytes:
    """Compile ``sources`` (unit name -> C++17 text) in parallel and link them; returns the shared object's bytes.

    Headers are found in ``include_dir``; ``march`` and ``machine`` are those of :func:`compile_flags`; ``jobs`` is the
    number of compiler processes (default ``NPU_NUM_THREADS``); ``timeout`` bounds each of them, in seconds. Units with
    equal text are compiled and linked once.

    Objects and the result are cached under everything they depend on: text, headers, flags, compiler and, for
    'native', the CPU. Raises ``ToolchainError`` (no compiler; the compiler's first error line with the command and the
    path of the kept source; a timeout) and ``ValueError`` for a unit name that cannot be a file name.
    """
    for name in sources:
        if not SOURCE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a translation unit: up to 200 letters, digits, '_', '-' and '.'")
    compiler, cache = find_compiler(machine), open_cache("kernels")
    flags = tuple(compile_flags(march, compiler, machine))
    include = Path(include_dir).resolve()
    headers = _Headers(include)
    common = repr((compiler.identity, flags, _machine(march)))
    units: dict[str, tuple[str, str]] = {}
    for name, source in sources.items():
        text = hashlib.sha256(source.encode()).hexdigest()
        units.setdefault(f"object {common} {text} {headers.digest(source)}", (name, source))
    link = _link_flags(compiler.kind, march, machine)
    whole = f"shared {common} {link} {[*units]}"
    known = cache.get(whole)
    if known is not None:
        return known
    build = _Build(compiler, flags, include, cache, timeout)
    with workplace() as place, progress.step("compiling C++", len(units) + 1) as step:

        def unit(key: str, name: str, text: str) -> Path:
            made = build.compile(name, text, key, place)
            step.advance()
            return made

        with ThreadPoolExecutor(jobs or env.num_threads()) as pool:
            pending = [pool.submit(unit, key, name, text) for key, (name, text) in units.items()]
            try:
                objects = [future.result() for future in pending]
            except BaseException:
                place.stop("another unit failed, or the build was interrupted")
                raise
        result = build.link(objects, link, place)
    cache.put(whole, result)
    cache.trim()
    return result


def compiler_report() -> dict[str, object]:
    """What ``doctor`` shows: the compiler or why there is none, the CPU and its row of the device table, the cache and
    why it is not used. Never raises."""
    cpu = host_cpu()
    report: dict[str, object] = {
        "compiler": None,
        "error": None,
        "cpu": {"arch": cpu.arch, "name": cpu.name, "features": sorted(cpu.features)},
        "device": device_at_hand().spec,
    }
    try:
        compiler = find_compiler()
        report["compiler"] = {**asdict(compiler), "flags": compile_flags("native", compiler)}
        cache = open_cache("kernels")
        report["cache"] = {
            "path": str(cache.root), "bytes": cache.size(), "limit": cache.limit, "obstacle": cache.obstacle,
        }  # fmt: skip
    except NPUError as error:
        report["error"] = str(error)
    return report
