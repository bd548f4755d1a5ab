"""Translated kernels -> a shared object, with the system's C++ compiler and an on-disk cache."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from npu_compiler.support.cache import open_cache
from npu_compiler.support.errors import ToolchainError
from npu_compiler.targets.cpu.compilers import find_compiler, link_flags
from npu_compiler.targets.cpu.host import host_cpu

from .tokens import NEWEST

INCLUDE = Path(__file__).with_name("include")

_COMMON = (
    "-std=c++17 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-math-errno -fwrapv -fno-strict-aliasing "
    "-ffp-contract=off -fsigned-char -fno-threadsafe-statics"
).split()
_RUNTIME = [*_COMMON, "-O2"]
# The sanitisers only mark the accesses; include/runtime.cpp has what they call. Vectorised, marks would cover less.
_CHECKED = ["-fsanitize=thread", "-fsanitize=bounds", "-fsanitize=integer-divide-by-zero"]
_KERNELS = [*_COMMON, "-O1", "-Werror=return-type"]


def _flags(checks: bool) -> tuple[list[str], list[str]]:
    """Of the runtime and of translated kernels. The runtime bears no marks, as it does what the marks call."""
    machine = ["-mf16c"] if "f16c" in host_cpu().features else []
    return [*_RUNTIME, *machine], [*_KERNELS, *(_CHECKED if checks else [])]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ToolchainError(_first_errors(done.stderr))


def preprocess(text: str, name: str, version: int = NEWEST) -> str:
    """A Metal text with its macros expanded and its conditions decided for a ``version`` of the language, such as 310;
    line markers keep the lines of ``name``."""
    if not re.search(r"^[ \t]*#[ \t]*(define|if|undef)", text, re.MULTILINE):
        return text
    text = re.sub(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>[^\n]*", "", text, flags=re.MULTILINE)
    macros = ["-undef", "-D__METAL__=1", f"-D__METAL_VERSION__={version}"]
    with tempfile.TemporaryDirectory(prefix="emu-") as folder:
        file, expanded = Path(folder, "kernel.cpp"), Path(folder, "kernel.ii")
        file.write_text(f'#line 1 "{name}"\n{text}')
        command = [*find_compiler().argv, "-E", "-nostdinc", *macros, file.name, "-o", expanded.name]
        _run(command, Path(folder))
        lines = expanded.read_text().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if re.match(rf'# 1 "{re.escape(name)}"', line))
    return "".join(lines[start:])


def _first_errors(stderr: str) -> str:
    """What the compiler says, in terms of Metal: the first errors and the lines of the text that led to them."""
    told = re.compile(r" error: |required from here|requested here")
    lines = [line.replace(f"{INCLUDE}/", "") for line in stderr.splitlines() if told.search(line)]
    text = "\n".join(lines[:4]) or stderr[:2000]
    return re.sub(r"metal::(device|coherent|constant|threadgroup|thread)_space", r"\1", text)


def headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(INCLUDE.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build(sources: Mapping[str, str], checks: bool) -> bytes:
    """C++ texts by file name -> the bytes of a shared object, which needs the runtime's to be loaded before it.
    ``ToolchainError`` with the compiler's first errors."""
    return _shared_object({f"{name}.cpp": text for name, text in sources.items()}, _flags(checks)[1])


def build_runtime() -> bytes:
    """The shared object that runs kernels."""
    return _shared_object({"runtime.cpp": (INCLUDE / "runtime.cpp").read_text()}, _flags(True)[0])


def _shared_object(units: Mapping[str, str], flags: list[str]) -> bytes:
    compiler, cache = find_compiler(), open_cache("emulator")
    common = repr((compiler.identity, flags, headers_digest()))
    whole = f"shared {common} {units!r}"
    known = cache.get(whole)
    if known is not None:
        return known

    def compile_unit(name: str, text: str) -> Path:
        key, target = f"object {common} {text}", folder / f"{name}.o"
        stored = cache.get(key)
        if stored is None:
            (folder / name).write_text(text)
            _run([*compiler.argv, *flags, "-I", str(INCLUDE), "-c", name, "-o", target.name], folder)
            stored = target.read_bytes()
            cache.put(key, stored)
        target.write_bytes(stored)
        return target

    with tempfile.TemporaryDirectory(prefix="emu-") as scratch, ThreadPoolExecutor(2) as pool:
        folder = Path(scratch)
        names = [o.name for o in pool.map(compile_unit, units, units.values())]
        link = [f for f in link_flags(compiler.kind, "native") if f != "-Wl,-z,defs"]  # the runtime has the rest
        _run([*compiler.argv, *names, *link, "-o", "library.so"], folder)
        result = (folder / "library.so").read_bytes()
    cache.put(whole, result)
    cache.trim()
    return result
