"""Every environment variable the project reads, in one place: name, meaning, default, parser.

All accessors read the environment at the time of the call, so a change takes effect without a restart. An invalid value
raises :class:`~.errors.ConfigError`, which names the variable and what it accepts.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError

_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True)
class Variable:
    """One variable: ``accepts`` and ``default`` are prose, for help texts and error messages."""

    name: str
    accepts: str
    default: str
    meaning: str


MAX_THREADS = 256  # of a program on the CPU: as many as its thread pool holds (pool.cpp)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)

VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("NPU_CXX", "a C++ compiler command, e.g. 'g++-13' or 'ccache clang++'", "CXX, then PATH, then ziglang",
                 "the C++ compiler; when set, no other one is tried"),
        Variable("NPU_CACHE_DIR", "a directory", "the user's cache directory / npusim",
                 "where compiled kernels are kept between runs"),
        Variable("NPU_CACHE_SIZE", "a size in bytes, or with a unit like '512M' or '2GiB'; 0 turns the cache off",
                 "2GiB", "upper bound of the compile cache; the oldest entries go first"),
        Variable("NPU_WEIGHT_CACHE_SIZE", "a size like '8GiB'; 0 turns the cache off", "16GiB",
                 "upper bound of the packed weights of language models kept on disk; the oldest go first"),
        Variable("NPU_NUM_THREADS", f"a whole number from 1 to {MAX_THREADS}", "the cores this process may use",
                 "threads that run() uses"),
        Variable("NPU_COMPILE_JOBS", "a whole number from 1 to 4096", "the CPUs this process may use",
                 "C++ compilers that run at a time; the kernels of a program are divided among as many"),
        Variable("NPU_DEBUG", "a whole number from 0 to 9", "0",
                 "what the compiler logs, as -v does: 1 phases, 2 kernels, 3 graphs, 4 generated source"),
        Variable("NPU_DUMP", "a directory", "nothing is written",
                 "where each compiler phase and rewrite writes its graph and source"),
        Variable("NPU_DISABLE", "names of passes or rewrites, separated by commas", "nothing is disabled",
                 "rewrites to leave out"),
        Variable("NPU_VERIFY", "0, 1 or 2", "0",
                 "check the program after every phase and rewrite: 1 its invariants, 2 also results on random inputs"),
        Variable("NPU_METAL_CAPTURE", "a file whose name ends in .gputrace", "nothing is captured",
                 "where the first run on an Apple GPU is recorded for Xcode; macOS also wants METAL_CAPTURE_ENABLED=1"),
        Variable("NPU_METAL_INDIRECT", "0 or 1", "1",
                 "1: Apple GPUs run a program as one indirect command buffer; 0: its kernels are encoded for each run"),
        Variable("NPU_TARGET", "a target such as 'cuda', or one with a device such as 'cuda:sm_80'", "cpu",
                 "what programs are compiled for when the caller does not say"),
    )
}  # fmt: skip


def markdown() -> str:
    """Return the variables as a page for the documentation."""
    rows = [f"| `{v.name}` | {v.meaning} | {v.accepts} | {v.default} |" for v in VARIABLES.values()]
    head = "# Environment variables\n\nRead when they are needed: a change takes effect without a restart. "
    head += "`npusim doctor` shows the values in effect and names those that are misspelt.\n\n"
    return head + "\n".join(["| variable | meaning | takes | default |", "|---|---|---|---|", *rows, ""])


def _read(name: str, parse: Callable[[str], _T], default: _D) -> _T | _D:
    """Return the parsed value, or ``default`` if the variable is unset or blank."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except (ValueError, OverflowError, RuntimeError):  # RuntimeError: '~nobody' has no home directory
        raise ConfigError(f"{name}={text!r} is not understood: it takes {VARIABLES[name].accepts}") from None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _flag(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, prefix = match.groups()
    # 'M', 'MB' and 'MiB' all mean 1024**2 bytes: limits of caches are not given in decimal megabytes.
    return int(float(number) * 1024 ** " kmgt".index(prefix.lower() or " "))


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _default_cache_dir() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # a container's user may have no entry in the password database
        return Path(tempfile.gettempdir()) / f"npusim-{os.getuid()}"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "npusim"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "npusim"


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on, by its affinity if the system has it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_SYS = Path("/sys")


def usable_cores() -> int:
    """Return the number of cores among :func:`usable_cpus`, at most the CPU quota of this process's control group.

    Two hardware threads of a core count once: they share its vector units, so a second one does not make kernels
    faster. Where the system does not tell which CPUs share a core, each CPU counts.
    """
    if not hasattr(os, "sched_getaffinity"):
        return usable_cpus()
    cores = _cores(_SYS, frozenset(os.sched_getaffinity(0)))
    quota = _text(_SYS / "fs" / "cgroup" / "cpu.max").split()  # 'max 100000', or microseconds of each period
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


@cache
def _cores(sys_folder: Path, cpus: frozenset[int]) -> int:
    folder = sys_folder / "devices" / "system" / "cpu"
    return len({_text(folder / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # the system has no such file
        return ""


def cxx() -> str | None:
    """``NPU_CXX``: the compiler command line prefix, unsplit."""
    return _read("NPU_CXX", str, None)


def cache_dir() -> Path:
    """``NPU_CACHE_DIR``; it need not exist."""
    return _read("NPU_CACHE_DIR", _path, _default_cache_dir())


def cache_size() -> int:
    """``NPU_CACHE_SIZE`` in bytes; 0 means no cache."""
    return _read("NPU_CACHE_SIZE", _size, 2 * 1024**3)


def weight_cache_size() -> int:
    """``NPU_WEIGHT_CACHE_SIZE`` in bytes; 0 means no cache."""
    return _read("NPU_WEIGHT_CACHE_SIZE", _size, 16 * 1024**3)


def num_threads() -> int:
    """``NPU_NUM_THREADS``, else the number of cores that this process may use, up to :data:`MAX_THREADS`."""
    return _read("NPU_NUM_THREADS", _integer(1, MAX_THREADS), min(usable_cores(), MAX_THREADS))


def compile_jobs() -> int:
    """``NPU_COMPILE_JOBS``, else the number of CPUs that this process may use."""
    return _read("NPU_COMPILE_JOBS", _integer(1, 4096), usable_cpus())


def debug() -> int:
    """``NPU_DEBUG``, 0 (quiet) to 9."""
    return _read("NPU_DEBUG", _integer(0, 9), 0)


def dump_dir() -> Path | None:
    """``NPU_DUMP``; None: nothing is written."""
    return _read("NPU_DUMP", _path, None)


def disabled() -> frozenset[str]:
    """``NPU_DISABLE`` as a set of names. The compiler checks whether they exist."""
    return _read("NPU_DISABLE", lambda text: frozenset(n for n in re.split(r"[,\s]+", text) if n), frozenset[str]())


def verify() -> int:
    """``NPU_VERIFY``: 0, 1 (invariants) or 2 (results, too)."""

    def parse(text: str) -> int:
        return int(_flag(text)) if text.lower() in _TRUE + _FALSE else _integer(0, 2)(text)

    return _read("NPU_VERIFY", parse, 0)


def metal_capture() -> Path | None:
    """``NPU_METAL_CAPTURE``; None: nothing is captured."""

    def parse(text: str) -> Path:
        if not text.endswith(".gputrace"):
            raise ValueError(text)
        return _path(text).absolute()

    return _read("NPU_METAL_CAPTURE", parse, None)


def metal_indirect() -> bool:
    """``NPU_METAL_INDIRECT``: whether runs on an Apple GPU are indirect command buffers."""
    return _read("NPU_METAL_INDIRECT", _flag, True)


def target() -> str:
    """``NPU_TARGET``; :func:`npu_compiler.target_config.default_target` also says whether there is such a target."""
    return _read("NPU_TARGET", str.lower, "cpu")


_ACCESSORS: dict[str, Callable[[], Any]] = {
    "NPU_CXX": cxx,
    "NPU_CACHE_DIR": cache_dir,
    "NPU_CACHE_SIZE": cache_size,
    "NPU_WEIGHT_CACHE_SIZE": weight_cache_size,
    "NPU_NUM_THREADS": num_threads,
    "NPU_COMPILE_JOBS": compile_jobs,
    "NPU_DEBUG": debug,
    "NPU_DUMP": dump_dir,
    "NPU_DISABLE": disabled,
    "NPU_VERIFY": verify,
    "NPU_METAL_CAPTURE": metal_capture,
    "NPU_METAL_INDIRECT": metal_indirect,
    "NPU_TARGET": target,
}


def settings() -> dict[str, Any]:
    """Return the effective value of every variable (for ``npusim doctor``); raises ``ConfigError`` for a bad one."""
    return {name: read() for name, read in _ACCESSORS.items()}


def unknown() -> list[str]:
    """Return ``NPU_*`` names that are set but unknown: most likely misspelt."""
    return sorted(name for name in os.environ if name.startswith("NPU_") and name not in VARIABLES)
