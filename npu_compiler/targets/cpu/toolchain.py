"""Turns C++ sources into one shared object, through an on-disk cache."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...artifact.program import SOURCE_NAME
from ...support import env, progress
from ...support.cache import Cache, make_folders, open_cache
from ...support.errors import ToolchainError
from .compilers import Compiler, compile_flags, find_compiler, link_flags, machine_key
from .host import object_kind
from .processes import Finished, Workplace, workplace

TIMEOUT_S = 300.0

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class _Headers:
    """Digests of the headers that a source includes by quotes, directly or not. ``#if`` is ignored, which at worst
    causes a recompilation."""

    def __init__(self, include_dir: Path):
        self._dir = include_dir
        self._texts: dict[str, str | None] = {}

    def _text(self, name: str) -> str | None:
        if name not in self._texts:
            path = self._dir / name
            self._texts[name] = path.read_text(encoding="utf-8") if path.is_file() else None
        return self._texts[name]

    def digest(self, source: str) -> str:
        """Return a digest that changes when any included header does. Headers outside ``include_dir`` do not count."""
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
    """The settings that all translation units of one :func:`build_shared` share."""

    compiler: Compiler
    flags: tuple[str, ...]
    include_dir: Path
    cache: Cache
    timeout: float

    def compile(self, name: str, source: str, key: str, place: Workplace) -> Path:
        """Compile one translation unit to an object file in ``place``, or copy the object from the cache."""
        target = place.folder / f"{name}.o"
        cached = self.cache.get(key)
        if cached is not None:
            target.write_bytes(cached)
            return target
        file = place.folder / f"{name}.cpp"
        file.write_text(source, encoding="utf-8")
        # -iquote instead of -I, so that the kernels' math.h does not hide the system's.
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
        """Link object files and return the bytes of the shared object."""
        names = [path.name for path in objects]
        command = [*self.compiler.argv, *names, *flags, "-o", "program.so"]
        run = place.run(command, self.timeout)
        if run.status:
            raise ToolchainError(f"linking failed: {run.first_error()}\n  command: {shlex.join(command)}")
        return _object_bytes(place.folder / "program.so", command)

    def shared_object(self, units: Mapping[str, tuple[str, str]], link: Sequence[str], jobs: int) -> bytes:
        """Compile ``units`` (key -> name, text) in ``jobs`` processes at a time, and link them."""
        with workplace() as place, progress.step("compiling C++", len(units) + 1) as step:

            def unit(key: str, name: str, text: str) -> Path:
                made = self.compile(name, text, key, place)
                step.advance()
                return made

            with ThreadPoolExecutor(jobs) as pool:
                pending = [pool.submit(unit, key, name, text) for key, (name, text) in units.items()]
                try:
                    objects = [future.result() for future in pending]
                except BaseException:
                    place.stop("another unit failed, or the build was interrupted")
                    raise
            return self.link(objects, link, place)


def _object_bytes(path: Path, command: Sequence[str]) -> bytes:
    """Return the bytes that a compiler wrote to ``path``. Raises ``ToolchainError`` unless they are an object file."""
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
    system: str = "",
    more_flags: Sequence[str] = (),
    jobs: int | None = None,
    timeout: float = TIMEOUT_S,
) -> bytes:
    """Compile ``sources`` (unit name -> C++17 text) in parallel, link them, and return the bytes of the shared object.

    ``include_dir`` has the headers. ``march``, ``machine`` and ``system`` are those of
    :func:`npu_compiler.targets.cpu.compilers.compile_flags`, whose result ``more_flags`` follow. ``jobs``: the number
    of compiler processes (default ``NPU_COMPILE_JOBS``). ``timeout``: the limit for each of them, in seconds. Units
    with equal text are compiled and linked once.

    Objects and the result are cached under everything they depend on: text, headers, flags, compiler and, for
    'native', the CPU. Raises ``ToolchainError`` if there is no compiler, if a compiler fails (the message has its first
    error line, the command and the path of the source, which is kept) or if one exceeds the timeout; and ``ValueError``
    if a unit name is not a valid file name.
    """
    for name in sources:
        if not SOURCE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a translation unit: up to 200 letters, digits, '_', '-' and '.'")
    compiler, cache = find_compiler(machine, system), open_cache("kernels")
    flags = (*compile_flags(march, compiler, machine, system), *more_flags)
    include = Path(include_dir).resolve()
    headers = _Headers(include)
    common = repr((compiler.identity, flags, machine_key(march)))
    units: dict[str, tuple[str, str]] = {}
    for name, source in sources.items():
        text = hashlib.sha256(source.encode()).hexdigest()
        units.setdefault(f"object {common} {text} {headers.digest(source)}", (name, source))
    link = link_flags(compiler.kind, march, machine, system)
    whole = f"shared {common} {link} {[*units]}"
    if (known := cache.get(whole)) is not None:
        return known
    build = _Build(compiler, flags, include, cache, timeout)
    with cache.turn(whole, "compiling C++"):
        if (known := cache.get(whole)) is not None:
            return known
        result = build.shared_object(units, link, jobs or env.compile_jobs())
        cache.put(whole, result)
    cache.trim()
    return result
