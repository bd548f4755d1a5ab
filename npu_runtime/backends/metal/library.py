"""The kernels of a program on a GPU: its text is compiled by macOS, and pipeline states are made of its functions."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import env
from npu_compiler.support.cache import private_folder
from npu_compiler.support.errors import ArtifactError, BackendError
from npu_compiler.targets.simt.lang import program as simt

from .device import autorelease_pool, check_program, file_url, frameworks
from .indirect import available

_log = logging.getLogger(__name__)

_ARCHIVES = "metal"  # the folder of binary archives in the cache
_LANGUAGES = {  # the constant of a version, and the first macOS that has it
    "metal3.0": ("MTLLanguageVersion3_0", 13),
    "metal3.1": ("MTLLanguageVersion3_1", 14),
    "metal3.2": ("MTLLanguageVersion3_2", 15),
}


class Code:
    """The kernels of a program on ``device``. ``entries``: launches by entry symbol; ``pipelines``: pipeline states by
    function.

    Raises ``BackendError`` if the device or macOS cannot run the program, ``ArtifactError`` if its code is damaged.
    """

    def __init__(self, program: CompiledProgram, device: Any):
        check_program(program, device)
        self.program = program
        self.entries, code = simt.unpack(program.binary)
        text, language = code.get("text"), code.get("language")
        if not isinstance(text, str) or not isinstance(language, str):
            raise ArtifactError("binary: no Metal code; compile the model again")
        threads: dict[str, int] = {}
        for launch in (x for launches in self.entries.values() for x in launches if x.workgroups):
            threads[launch.function] = max(threads.get(launch.function, 0), launch.threads)
        library, path = _compile(program, device, text, language), _archive_path(device, text, language)
        archive = None if path is None else _Archive(device, path)
        self.pipelines = _Pipelines(program, device, library, threads, archive).make()


def _compile(program: CompiledProgram, device: Any, text: str, language: str) -> Any:
    metal = frameworks()
    constant, macos = _LANGUAGES.get(language, ("", 0))
    version = getattr(metal, constant, None)
    if version is None:
        raise BackendError(
            f"program {program.name!r} is written in {language}, which this pyobjc does not know; update "
            "pyobjc-framework-Metal"
        )
    options = metal.MTLCompileOptions.alloc().init()
    options.setLanguageVersion_(version)
    if hasattr(options, "setMathMode_"):  # from macOS 15 on
        options.setMathMode_(metal.MTLMathModeSafe)
    else:
        options.setFastMathEnabled_(False)
    library, error = device.newLibraryWithSource_options_error_(text, options, None)
    if library is None:
        raise BackendError(
            f"macOS does not compile program {program.name!r} for {device.name()}: {_text(error)} (the program is "
            f"written in {language}, which needs macOS {macos} or later)"
        )
    return library


class _Pipelines:
    """Makes the pipeline states of a program's functions. ``threads``: the size of the largest threadgroup by function;
    ``archive``: where machine code is kept, or None."""

    def __init__(
        self, program: CompiledProgram, device: Any, library: Any, threads: Mapping[str, int], archive: _Archive | None
    ):
        self._program, self._device, self._library = program.name, device, library
        self._threads, self._archive = threads, archive
        self._shared, self._indirect = int(device.maxThreadgroupMemoryLength()), available(device)

    def make(self) -> dict[str, Any]:
        """Return the pipeline states by function; several threads make them."""
        with ThreadPoolExecutor(max(env.usable_cpus(), 1)) as pool:
            pipelines = dict(zip(self._threads, pool.map(self._make_in_thread, self._threads), strict=True))
        if self._archive is not None:
            self._archive.save()
        return pipelines

    def _make_in_thread(self, name: str) -> Any:
        with autorelease_pool():
            state = self._make(name)
            self._check(name, state)
            return state

    def _make(self, name: str) -> Any:
        """Return the state of a function: for indirect command buffers, too, if the device can and a state for them
        runs threadgroups of this size."""
        function = self._library.newFunctionWithName_(name)
        if function is None:
            raise ArtifactError(f"binary: its text has no kernel {name!r}; compile the model again")
        state, error = self._state_of(name, function, self._indirect)
        if self._indirect and (state is None or state.maxTotalThreadsPerThreadgroup() < self._threads[name]):
            _log.debug("%s cannot be an indirect command: %s", name, _text(error))
            state, error = self._state_of(name, function, False)
        if state is None:
            raise BackendError(f"kernel {name} of program {self._program!r}: {_text(error)}")
        return state

    def _state_of(self, name: str, function: Any, as_command: bool) -> tuple[Any, Any]:
        """Return (pipeline state or None, error). ``as_command``: for indirect command buffers, too."""
        descriptor = frameworks().MTLComputePipelineDescriptor.alloc().init()
        descriptor.setComputeFunction_(function)
        descriptor.setLabel_(name)
        descriptor.setSupportIndirectCommandBuffers_(as_command)
        if self._archive is not None:
            self._archive.look_in(descriptor)
        made = self._device.newComputePipelineStateWithDescriptor_options_reflection_error_(descriptor, 0, None, None)
        if self._archive is not None and made[0] is not None:
            self._archive.keep(descriptor)
        return made[0], made[-1]

    def _check(self, name: str, state: Any) -> None:
        """Raise ``BackendError`` if the device cannot run threadgroups of the size or with the memory that the program
        needs."""
        most, needed, device = state.maxTotalThreadsPerThreadgroup(), self._threads[name], self._device.name()
        if most < needed:
            raise BackendError(
                f"kernel {name} of program {self._program!r} has threadgroups of {needed} threads; {device} runs "
                f"{most} at most, because it has no registers for more; report this"
            )
        memory = state.staticThreadgroupMemoryLength()
        if memory > self._shared:
            raise BackendError(
                f"kernel {name} of program {self._program!r} takes {memory} bytes of threadgroup memory; {device} has "
                f"{self._shared}; report this"
            )


def _archive_path(device: Any, text: str, language: str) -> Path | None:
    """Return where the machine code of a text is kept; None if there is no cache."""
    if not env.cache_size():
        return None
    folder = private_folder(_ARCHIVES)
    if folder is None:
        return None
    key = "\0".join((text, language, device.name(), platform.platform(), str(available(device))))
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.metalarchive"


class _Archive:
    """A binary archive: machine code that macOS keeps between processes. No error here stops a program from running,
    because macOS compiles what an archive lacks."""

    def __init__(self, device: Any, path: Path):
        self._path, self._new, metal = path, not path.exists(), frameworks()
        self._url = file_url(path)
        self._descriptors: list[Any] = []
        self._archive = self._opened(device, metal)
        if self._archive is None and not self._new:  # of another version of macOS, or damaged
            path.unlink(missing_ok=True)
            self._new = True
            self._archive = self._opened(device, metal)

    def _opened(self, device: Any, metal: Any) -> Any:
        descriptor = metal.MTLBinaryArchiveDescriptor.alloc().init()
        if not self._new:
            descriptor.setUrl_(self._url)
        archive, error = device.newBinaryArchiveWithDescriptor_error_(descriptor, None)
        if archive is None:
            _log.debug("%s: %s", self._path, _text(error))
        return archive

    def look_in(self, descriptor: Any) -> None:
        """Look for the function of a pipeline in the archive."""
        if self._archive is not None:
            descriptor.setBinaryArchives_([self._archive])

    def keep(self, descriptor: Any) -> None:
        """Add the function of a pipeline when the archive is saved."""
        self._descriptors.append(descriptor)

    def save(self) -> None:
        """Write a new archive."""
        if self._archive is None or not self._new:
            return
        for descriptor in self._descriptors:
            added, error = self._archive.addComputePipelineFunctionsWithDescriptor_error_(descriptor, None)
            if not added:
                _log.debug("%s: %s", self._path, _text(error))
                return
        written, error = self._archive.serializeToURL_error_(self._url, None)
        if not written:
            _log.debug("%s: %s", self._path, _text(error))


def _text(error: Any) -> str:
    return "no reason given" if error is None else str(error.localizedDescription()).strip()
