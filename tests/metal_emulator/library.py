"""Compiles Metal texts and runs their kernels over grids of threadgroups."""

from __future__ import annotations

import ctypes
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .build import build, build_runtime, preprocess
from .kernels import MAX_BUFFERS, KernelSignature
from .msl import translate
from .tokens import NEWEST

ORDERS = ("ascending", "descending", "shuffled")
MAX_THREADS = 1024
MAX_SHARED = 32768
_MESSAGE = 512


class EmulatorError(Exception):
    """A kernel did what no kernel may do, or was launched as Metal would not launch it."""


@dataclass(frozen=True)
class Window:
    """Memory for one buffer argument, where it is not a whole array: ``nbytes`` from ``address`` on, and ``before``
    bytes in front of it."""

    address: int
    nbytes: int
    before: int = 0


class _CWindow(ctypes.Structure):  # emu_Window
    _fields_ = [
        ("base", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("argument", ctypes.c_void_p),
        ("element", ctypes.c_uint32), ("index", ctypes.c_uint32), ("written", ctypes.c_uint32),
        ("coherent", ctypes.c_uint32),
    ]  # fmt: skip


class _CLaunch(ctypes.Structure):  # emu_Launch
    _fields_ = [
        ("kernel", ctypes.c_void_p), ("windows", _CWindow * MAX_BUFFERS), ("window_count", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32 * MAX_BUFFERS), ("groups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3), ("first", ctypes.c_uint64), ("last", ctypes.c_uint64),
        ("order", ctypes.c_uint32), ("seed", ctypes.c_uint32), ("divergent", ctypes.c_uint32),
        ("failed", ctypes.c_uint32), ("shared_used", ctypes.c_uint32), ("fibres", ctypes.c_uint32),
        ("shadow", ctypes.c_void_p), ("message", ctypes.c_char * _MESSAGE),
    ]  # fmt: skip


def _load(image: bytes, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(image)
        file.flush()
        return ctypes.CDLL(file.name, mode)


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    """What kernels call; one for all libraries."""
    runtime = _load(build_runtime(), ctypes.RTLD_GLOBAL)
    runtime.emu_run.restype = None
    return runtime


class Library:
    """Compiled kernels by name: ``Library(text)["scale"]({0: x, 1: y}, groups=(4,), threads=(64,))``.

    ``source`` is one Metal text, or texts by file name. With ``checks`` off, accesses are not watched: faster, and
    good for nothing but numbers. ``version``: of the language, such as 310. Raises ``MSLError`` and ``ToolchainError``.
    """

    def __init__(self, source: str | Mapping[str, str], checks: bool = True, version: int = NEWEST):
        sources = {"kernel": source} if isinstance(source, str) else dict(source)
        units, signatures = {}, []
        for name, text in sources.items():
            translation = translate(preprocess(text, name, version), name, version)
            units[re.sub(r"\W", "_", name)] = f'#include "msl.h"\n#line 1 "{name}"\n{translation.text}'
            signatures += translation.kernels
        self.checks = checks
        self.run = _runtime().emu_run
        self._library = _load(build(units, checks))
        self.functions = {s.name: Function(self, s) for s in signatures}

    def __getitem__(self, name: str) -> Function:
        return self.functions[name]


class Function:
    """One kernel. ``element_sizes``: bytes of an element of each buffer argument. ``shared_used`` (bytes of threadgroup
    memory) is known after a launch."""

    def __init__(self, library: Library, signature: KernelSignature):
        self.library, self.signature, self.name = library, signature, signature.name
        self.shared_used = 0
        handle = library._library
        self._entry = ctypes.cast(getattr(handle, f"emu_kernel_{self.name}"), ctypes.c_void_p).value
        count = max(1, len(signature.buffers))
        self.element_sizes = list((ctypes.c_uint32 * count).in_dll(handle, f"emu_sizes_{self.name}"))

    def __call__(
        self,
        buffers: Mapping[int, np.ndarray | Window | bytes],
        groups: Sequence[int],
        threads: Sequence[int],
        shared: Mapping[int, int] | None = None,
        *,
        order: str = "ascending",
        seed: int = 0,
        divergent: bool = False,
        jobs: int = 1,
    ) -> None:
        """Run ``groups`` threadgroups of ``threads`` threads (up to three dims each), as dispatchThreadgroups does.

        ``buffers`` by index: C-contiguous arrays, windows, or bytes (as setBytes takes). ``shared``: bytes of
        threadgroup arguments. ``order`` of threads and groups: 'ascending', 'descending' or 'shuffled' by ``seed``.
        ``divergent`` permits simdgroup functions that part of a simdgroup reaches. ``jobs`` host threads share the
        groups. Raises :class:`EmulatorError`.
        """
        grid, group = _three(groups), _three(threads)
        shared = dict(shared or {})
        self._check_launch(buffers, grid, group, shared)
        keep: list[Any] = []
        base, written = self._windows(buffers, keep)
        shadow = np.zeros(max(1, 2 * written) if self.library.checks else 1, np.uint64)
        total = math.prod(grid)
        jobs = max(1, min(jobs, total))
        launches = []
        for job in range(jobs):
            launch = _CLaunch.from_buffer_copy(base)
            launch.kernel = self._entry
            launch.groups[:], launch.threads[:] = grid, group
            for index, size in shared.items():
                launch.shared_bytes[index] = size
            launch.first, launch.last = total * job // jobs, total * (job + 1) // jobs
            launch.order, launch.seed, launch.divergent = ORDERS.index(order), seed, divergent
            launch.shadow = shadow.ctypes.data if self.library.checks else None
            launches.append(launch)
        run = self.library.run
        if jobs == 1:
            run(ctypes.byref(launches[0]))
        else:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda launch: run(ctypes.byref(launch)), launches))
        for launch in launches:
            if launch.failed:
                raise EmulatorError(f"{self.name}: {self._named(launch.message.decode())}")
        self.shared_used = max(launch.shared_used for launch in launches)
        if self.shared_used > MAX_SHARED:
            raise EmulatorError(f"{self.name}: {self.shared_used} bytes of threadgroup memory; Metal has {MAX_SHARED}")

    def _check_launch(
        self, buffers: Mapping[int, Any], grid: Sequence[int], group: Sequence[int], shared: Mapping[int, int]
    ) -> None:
        limit = min(MAX_THREADS, self.signature.max_threads)
        if not 0 < math.prod(group) <= limit:
            raise EmulatorError(f"{self.name}: {math.prod(group)} threads in a group; 1 to {limit} are possible")
        if math.prod(grid) < 1:
            raise EmulatorError(f"{self.name}: a launch of {tuple(grid)} groups; Metal wants at least one")
        known = {p.index: p for p in self.signature.buffers}
        for index in known.keys() - buffers.keys():
            raise EmulatorError(f"{self.name}: nothing is bound to {known[index].name} [[buffer({index})]]")
        for index in buffers.keys() - known.keys():
            raise EmulatorError(f"{self.name}: the kernel has no [[buffer({index})]]")
        wanted = {p.index for p in self.signature.parameters if p.role == "threadgroup"}
        if wanted != set(shared):
            raise EmulatorError(f"{self.name}: threadgroup arguments {sorted(wanted)}, lengths for {sorted(shared)}")

    def _windows(self, buffers: Mapping[int, Any], keep: list[Any]) -> tuple[_CLaunch, int]:
        """A launch with the buffers in it, and the number of elements that the kernel may write."""
        launch, written = _CLaunch(), 0
        for n, (p, size) in enumerate(zip(self.signature.buffers, self.element_sizes, strict=False)):
            b = buffers[p.index]
            if isinstance(b, bytes):
                if p.written or len(b) > 4096:
                    raise EmulatorError(f"{self.name}: setBytes serves constants of up to 4096 bytes, not {p.name}")
                b = np.frombuffer(b, np.uint8)
            if isinstance(b, np.ndarray):
                if not b.flags.c_contiguous or (p.written and not b.flags.writeable):
                    raise EmulatorError(f"{self.name}: the array for {p.name} is not contiguous, or cannot be written")
                keep.append(b)
                b = Window(b.ctypes.data, b.nbytes)
            if p.reference and b.nbytes < size:
                raise EmulatorError(f"{self.name}: {p.name} takes {size} bytes and is given {b.nbytes}")
            covered = b.before + b.nbytes
            launch.windows[n] = _CWindow(b.address - b.before, covered, b.address, size, p.index, p.written, p.coherent)
            written += -(-covered // size) if p.written else 0
        launch.window_count = len(self.signature.buffers)
        return launch, written

    def _named(self, message: str) -> str:
        """The message with parameters' names in place of their indices."""
        for p in self.signature.parameters:
            if p.role in ("buffer", "threadgroup"):
                message = message.replace(f"{p.role}({p.index})", f"{p.name} [[{p.role}({p.index})]]")
        return message


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return int(x), int(y), int(z)
