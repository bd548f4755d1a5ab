"""Finds a C++ compiler, and determines its flags for a CPU.

The compiler is the first of: ``NPU_CXX``, ``CXX``, then ``c++``/``g++``/``clang++`` on PATH, then the ``ziglang``
package. A compiler that a variable names must work; the others are skipped if a probe program fails. Sources are
freestanding C++17 (no exceptions, RTTI or C++ library), which all of these compilers accept.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ...support import env
from ...support.cache import Cache, open_cache
from ...support.errors import NPUError, ToolchainError
from .devices import device_at_hand
from .host import MACRO_FEATURES, host_cpu
from .processes import workplace

_PROBE_TIMEOUT_S = 120.0  # ziglang's first run builds parts of its runtime
_PROBE_BYTES = 1 << 20  # about as many bytes as a probe writes
_INSTALL = "install g++ (12 or newer) or clang++ (16 or newer), or run: pip install ziglang"

# -ffast-math would break infinities in masks, NaN checks and signed zeros. -fwrapv: integer tensors wrap around as in
# PyTorch. -fno-strict-aliasing: one arena holds tensors of all dtypes.
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

# Uses each language extension that the kernels need, so that an old compiler fails here and not during a build.
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

    ``argv``: the command and its first arguments. ``kind``: 'gcc', 'clang' or 'zig'. ``origin``: where it was found
    ('NPU_CXX', 'CXX', 'PATH' or 'ziglang'). ``identity``: a digest that changes whenever the compiler does.
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


_BASELINE = {"x86_64": "x86-64", "aarch64": "generic"}
_ZIG_SYSTEMS = {"darwin": "macos.11.0"}  # the oldest macOS for aarch64
_ZIG_FEATURES = {"fp16": "fullfp16"}  # features to which zig and the compilers' -mcpu give different names


def _march_flags(kind: str, march: str, machine: str = "", system: str = "") -> list[str]:
    machine = machine or host_cpu().arch
    march = march or _BASELINE.get(machine, "")
    refused = sorted(host_cpu().refused) if march == "native" else []
    flags = []
    if system not in ("", sys.platform):
        flags = ["-target", f"{machine}-{_ZIG_SYSTEMS[system]}"]
    elif kind == "zig" and sys.platform.startswith("linux"):
        # With a version in the target, zig uses its own libc headers and stubs instead of those of the machine.
        libc = "musl" if platform.libc_ver()[0] == "musl" else "gnu.2.17"
        flags = ["-target", f"{machine}-linux-{libc}"]
    if not march:
        return flags
    # Compilers that tune for 256 bits copy the kernels' wider vectors in halves, through memory.
    width = ["-mprefer-vector-width=512"] if machine == "x86_64" else []
    if kind == "zig":
        cpu, *extensions = march.replace("-", "_").split("+")
        name = "+".join([cpu, *(_ZIG_FEATURES.get(e, e) for e in extensions)])
        return [*flags, f"-mcpu={name}" + "".join(f"-{feature}" for feature in refused), *width]
    if machine == "aarch64":
        return ["-mcpu=" + march]
    name, *extensions = march.split("+")
    without = (f"-mno-{feature.replace('_', '-')}" for feature in refused)
    return ["-march=" + name, *_tuning(kind, name), *("-m" + extension for extension in extensions), *without, *width]


def _tuning(kind: str, march: str) -> list[str]:
    """Return gcc's option for AMD CPUs. Its tuning for them spills addresses to vector registers, which is cheap in
    other code. In a kernel, the address waits there until the products of the tile before have been computed."""
    amd = kind == "gcc" and (march.startswith("znver") or (march == "native" and "AMD" in host_cpu().name))
    return ["-mtune=generic"] if amd else []


def _flags(kind: str, march: str, machine: str = "", system: str = "") -> list[str]:
    march_flags = _march_flags(kind, march, machine, system)
    return [*_FLAGS, "-Wno-psabi" if kind == "gcc" else "-fno-sanitize=undefined", *march_flags]


def link_flags(kind: str, march: str, machine: str = "", system: str = "") -> list[str]:
    """Return the flags with which objects are linked to one shared object.

    ``kind``: of :class:`Compiler`. ``march``, ``machine`` and ``system``: those of :func:`compile_flags`.
    """
    if kind == "zig":
        # Without its own libraries zig builds no runtime. The process that loads the object provides libc and libm.
        return ["-shared", "-O3", "-nostdlib", *_march_flags(kind, march, machine, system)]
    if sys.platform.startswith("linux"):
        return ["-shared", "-Wl,--as-needed", "-Wl,-z,defs", "-lm", "-lpthread"]
    return ["-shared"]


def compile_flags(
    march: str = "native", compiler: Compiler | None = None, machine: str = "", system: str = ""
) -> list[str]:
    """Return the flags with which sources are compiled.

    ``march``: 'native', a CPU name of the compiler such as 'haswell', one with extensions such as
    'x86-64-v4+avx512bf16', or empty: the baseline of ``machine``. ``machine``: 'x86_64' or 'aarch64'; empty: that of
    this process. ``system``: 'linux' or 'darwin'; empty: that of this process. ``compiler``: default
    :func:`find_compiler`, whose ``ToolchainError`` it raises.
    """
    return _flags((compiler or find_compiler(machine, system)).kind, march, machine, system)


# ------------------------------------------------------------------------------------------------ finding a compiler
def _identity(argv: Sequence[str]) -> str:
    """Return a digest that changes when a file of the command is replaced. Runs no program, so it is fast."""
    parts: list[object] = [tuple(argv), sys.platform, platform.machine()]
    for word in argv:
        found = shutil.which(word)
        if found is not None:
            real = os.path.realpath(found)
            stat = os.stat(real)
            parts += [real, stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _macros(argv: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """Return the macros that a compiler predefines under ``flags``, and their values."""
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
            [*argv, "probe.o", *link_flags(kind, "native"), "-o", "probe.so"],
        ):
            run = place.run(command, _PROBE_TIMEOUT_S)
            if run.status:
                raise ToolchainError(run.first_error())
        try:
            answer = ctypes.CDLL(str(place.folder / "probe.so")).npu_probe(7)
        except (OSError, AttributeError) as error:  # AttributeError: the function is missing
            raise ToolchainError(f"it makes objects that do not load here: {error}") from None
        if answer != 21:
            raise ToolchainError(f"it miscompiles the probe program ({answer} instead of 21)")


def _probe(argv: tuple[str, ...], origin: str, cache: Cache) -> Compiler:
    """Return the compiler that ``argv`` calls. Raises ``ToolchainError`` with the reason if it is not usable."""
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
    """Yield (origin, argv) of the compilers that are tried if no variable names one, best first."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            yield "PATH", (path,)
    spec = importlib.util.find_spec("ziglang")
    if spec is not None:
        folder = Path((spec.submodule_search_locations or ["."])[0])
        binary = folder / ("zig.exe" if os.name == "nt" else "zig")
        # Calling the binary avoids starting another Python process for every source.
        yield "ziglang", (str(binary), "c++") if binary.exists() else (sys.executable, "-m", "ziglang", "c++")


def _check_folder(failures: str) -> None:
    """Raise ``ToolchainError`` if no compiler worked because of the folder for temporary files."""
    problem = None
    try:
        with workplace() as place:
            with open(place.folder / "space", "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            if hasattr(os, "statvfs") and os.statvfs(place.folder).f_flag & getattr(os, "ST_NOEXEC", 0):
                problem = f"{place.folder.parent} is mounted noexec, so objects compiled there cannot be loaded"
    except OSError as error:
        where = Path(error.filename).parent.parent if error.filename else "TMPDIR"
        problem = f"temporary files cannot be written ({where}: {error.strerror or error})"
    if problem is not None:
        raise ToolchainError(f"no C++ compiler can work here: {problem}; set TMPDIR to another folder ({failures})")


@lru_cache(maxsize=16)
def _find(named: tuple[tuple[str, str], ...], path: str, cache_dir: Path, cache_size: int) -> Compiler:
    del path, cache_dir, cache_size  # parts of the cache key: with other values another compiler may be found
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


def find_compiler(machine: str = "", system: str = "") -> Compiler:
    """Return the C++ compiler to use (the module's docstring has the order), or zig for another machine or system.

    ``machine`` and ``system``: those of :func:`compile_flags`.

    The probe runs once per compiler binary and machine; later processes read its result from the cache.
    Raises ``ToolchainError`` in one line that says what to install, or why the named compiler is not usable.
    """
    compiler, host = _native_compiler(), host_cpu().arch
    here = machine in ("", host) and system in ("", sys.platform)
    if here or (compiler.kind == "zig" and sys.platform.startswith("linux")):
        return compiler
    for origin, argv in _implicit_candidates():
        if origin == "ziglang" and sys.platform.startswith("linux"):
            return _probe(argv, origin, open_cache("kernels"))
    wanted = f"{machine} {system}".rstrip()
    raise ToolchainError(
        f"{compiler} compiles for {host}, not for {wanted}; on Linux zig can: pip install ziglang. "
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


def machine_key(march: str) -> str:
    """Return the part of a cache key that stands for the CPU: all of it for 'native', else its architecture."""
    cpu = host_cpu()
    return f"{cpu.arch} {cpu.name} {' '.join(sorted(cpu.features))}" if march == "native" else cpu.arch


def required_features(
    march: str = "native", compiler: Compiler | None = None, machine: str = "", system: str = ""
) -> frozenset[str]:
    """Return the CPU features that objects built for ``march`` may use, according to the compiler's macros.

    Parameters are those of :func:`compile_flags`; compare with ``HostCPU.missing``. Raises ``ToolchainError`` if the
    compiler does not know ``march``.
    """
    compiler = compiler or find_compiler(machine, system)
    flags = compile_flags(march, compiler, machine, system)
    cache = open_cache("kernels")
    key = f"features {compiler.identity} {flags} {machine_key(march)} {sorted(MACRO_FEATURES.items())}"
    known = cache.get(key)
    if known is not None:
        return frozenset(json.loads(known))
    macros = _macros(compiler.argv, flags)
    features = sorted(feature for macro, feature in MACRO_FEATURES.items() if macro in macros)
    cache.put(key, json.dumps(features).encode())
    return frozenset(features)


def compiler_report() -> dict[str, object]:
    """Return what ``npusim doctor`` prints: the compiler or the reason why there is none, the CPU and its row of the
    device table, the cache and the reason why it is not used. Never raises."""
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
            "path": str(cache.root), "bytes": cache.size(), "limit": cache.limit,
            "obstacle": cache.obstacle or cache.unwritable(),
        }  # fmt: skip
    except NPUError as error:
        report["error"] = str(error)
    return report
