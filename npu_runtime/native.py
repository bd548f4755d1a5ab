"""Native code of CPU programs: checks that it fits this machine, loads it, calls it and unloads it.

:mod:`npu_compiler.artifact.spec` describes the interface that it exports.
"""

from __future__ import annotations

import _ctypes
import ctypes
import logging
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from npu_compiler.artifact.program import ABI_VERSION, LAYOUT_MARKER, CompiledProgram
from npu_compiler.artifact.serialize import layout_digest
from npu_compiler.support.errors import ArtifactError, BackendError, ToolchainError
from npu_compiler.support.text import si
from npu_compiler.targets.cpu.devices import device_at_hand
from npu_compiler.targets.cpu.host import host_cpu, object_kind

_log = logging.getLogger(__name__)


def obstacle(program: CompiledProgram) -> str:
    """Return in words why the binary cannot run on this machine; '' if no reason is known."""
    if not program.binary:
        return "it holds no binary"
    host = host_cpu()
    system, arch = object_kind(program.binary)
    made_for = f"it was compiled for {program.device}" if program.device else "it was compiled for another machine"
    if (system, arch) != (sys.platform, host.arch):
        return f"{made_for} on {system or 'an unknown system'}/{arch or '?'}, this is {sys.platform}/{host.arch}"
    missing = host.missing(program.requires)
    if missing:
        return f"{made_for} and needs the CPU features {', '.join(missing)}, which this CPU, {device_at_hand()}, lacks"
    return ""


class NativeLibrary:
    """A program's shared object in this process, with its own pool of ``threads`` threads."""

    def __init__(self, program: CompiledProgram, threads: int):
        self.program = program
        self._library, descriptor = _open_or_rebuild(program)
        self._unload = weakref.finalize(self, _close, self._library, descriptor)
        self._unload.atexit = False  # at exit a run may still be in progress; the object's own destructor handles that
        self._check()
        self.threads = int(self._library.npu_start(threads))
        if self.threads < 1:
            raise BackendError(f"program {program.name!r} cannot start: {self._start_failure(threads)}")

    def _start_failure(self, threads: int) -> str:
        if self.threads < 0:
            return (
                "the system refuses the AMX tile registers to this process (arch_prctl, since Linux 5.16); "
                "compile the model with --target cpu:avx512"
            )
        if not hasattr(self._library, "npu_scratch_bytes"):
            return f"its thread pool of {threads} threads is refused"
        self._library.npu_scratch_bytes.restype = ctypes.c_long
        each = self._library.npu_scratch_bytes()
        return (
            f"the system refuses {si(each * threads, 'B')} of scratch memory, {si(each, 'B')} for each of {threads} "
            "thread(s); use fewer threads, or smaller inputs"
        )

    def _check(self) -> None:
        where = f"the binary of program {self.program.name!r}"
        for symbol in ("npu_abi", "npu_start", "npu_stop", *(e.symbol for e in self.program.entries.values())):
            if not hasattr(self._library, symbol):
                raise ArtifactError(f"{where} lacks the symbol {symbol}; compile the model again")
        abi = self._library.npu_abi()
        if abi != ABI_VERSION:
            raise ArtifactError(f"{where} has ABI {abi}, this build has {ABI_VERSION}; compile the model again")
        if not hasattr(self._library, "npu_layout"):
            return
        layout = bytes((ctypes.c_char * 64).in_dll(self._library, "npu_layout"))
        if layout not in (LAYOUT_MARKER.encode(), layout_digest(self.program).encode()):
            raise ArtifactError(f"{where} was built for other buffers than the file lists; compile the model again")

    def function(self, symbol: str) -> Callable[..., int]:
        """Return an entry point: ``(buffer table address, arena address, times address or None) -> status``."""
        function: Callable[..., int] = self._library[symbol]  # a new object each time, so its types are its own
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)  # type: ignore[attr-defined]
        function.restype = ctypes.c_int  # type: ignore[attr-defined]
        return function


def from_source(program: CompiledProgram) -> CompiledProgram:
    """Return ``program`` with native code compiled from its sources now, instead of the code in the file.

    Raises ``BackendError`` if the program is not for the CPU, has no sources, or the sources do not compile."""
    if program.target != "cpu":
        raise BackendError(
            f"program {program.name!r} is for target {program.target!r}; only programs for the CPU are rebuilt from "
            "source, so compile the model again"
        )
    return replace(program, binary=_build(program, "its binary is not to be used"), requires=())


def _open_or_rebuild(program: CompiledProgram) -> tuple[ctypes.CDLL, int]:
    """Return what :func:`_open` does for the program's own binary or, if that fails, for one built from its sources."""
    reason = obstacle(program)
    if not reason:
        try:
            return _open(program.binary)
        except OSError as error:
            reason = f"it does not load: {error}"
    try:
        return _open(_rebuild(program, reason))
    except OSError as error:
        raise BackendError(f"program {program.name!r} was rebuilt, but does not load: {error}") from None


def _rebuild(program: CompiledProgram, reason: str) -> bytes:
    """Return a binary for this CPU; the program's own cannot be used."""
    binary = _build(program, reason)
    _log.warning("program %r was rebuilt from source: %s", program.name, reason)
    return binary


def _build(program: CompiledProgram, reason: str) -> bytes:
    if not program.sources:
        raise BackendError(
            f"program {program.name!r} cannot run here: {reason}; it holds no source to rebuild it from, "
            f"so compile the model on this machine, or with --target {device_at_hand().spec}"
        )
    from npu_compiler.targets.cpu import toolchain

    try:
        kernels = Path(toolchain.__file__).parent / "kernels"
        return toolchain.build_shared(program.sources, kernels, more_flags=device_at_hand().flags)
    except (ToolchainError, ValueError) as error:
        raise BackendError(
            f"program {program.name!r} cannot run here: {reason}; it could not be rebuilt from its source either: "
            f"{error}. Install a C++ compiler, or compile the model for this CPU"
        ) from None


def _open(binary: bytes) -> tuple[ctypes.CDLL, int]:
    """Return the loaded object and the descriptor of the memory file behind it (-1 for a temporary file).

    The descriptor stays open. The dynamic loader identifies objects by path, which contains the descriptor's number,
    and a closed descriptor's number is used again.
    """
    if hasattr(os, "memfd_create"):
        descriptor = -1
        try:
            descriptor = os.memfd_create("npu-program", os.MFD_CLOEXEC)
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(binary)
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}"), descriptor
        except OSError as error:
            _log.debug("no loading from memory (%s); trying a temporary file", error)
            if descriptor >= 0:
                os.close(descriptor)
    with tempfile.NamedTemporaryFile(prefix="npu-", suffix=".so") as file:
        file.write(binary)
        file.flush()
        return ctypes.CDLL(file.name), -1


def _close(library: ctypes.CDLL, descriptor: int) -> None:
    if hasattr(library, "npu_stop"):
        library.npu_stop()
    _ctypes.dlclose(library._handle)
    if descriptor >= 0:
        os.close(descriptor)
