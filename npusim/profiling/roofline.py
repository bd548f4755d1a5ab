"""The roofline of a device: from its row, its driver, or measured on this CPU."""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.cache import open_cache
from npu_compiler.support.errors import ConfigError, ToolchainError
from npu_compiler.target_config import Roofline, target_config
from npu_compiler.targets.cpu.compilers import find_compiler
from npu_compiler.targets.cpu.host import host_cpu
from npu_runtime.backends.base import Backend
from npu_runtime.profiler import elapsed

PROBE = Path(__file__).with_name("probe.cpp")
_SECONDS = 0.02  # of one measurement
_REPEATS = 4
_MOST = 192 << 20  # bytes that stand for memory, unless the caches are larger
_DTYPES = ("float32", "bfloat16", "float64", "int8")  # of the products that are measured


def roofline_of(program: CompiledProgram, backend: Backend) -> Roofline | None:
    """Return the roofline of the device on which ``backend`` runs ``program``; None if it is unknown and cannot be
    measured.

    The figures of a GPU are those of its row; the bandwidth is that of the actual chip if its driver reports it. A CPU
    is measured with the threads of the backend, at first for half a second. Each later call adds a short measurement
    and keeps the better one, because another process may have disturbed an earlier one.
    """
    try:
        device = target_config(program.device or program.target).device
    except ConfigError:  # a CPU of another machine, or a device that is not registered here
        device = target_config(program.target).device
    found = device.roofline if device is not None else None
    if found is not None and backend.bandwidth:
        source = f"{found.source}; bandwidth from the clock and width of its memory bus"
        return replace(found, bandwidths=((math.inf, backend.bandwidth),), source=source)
    return measured_cpu(getattr(backend, "threads", 1)) if found is None and program.target == "cpu" else found


@cache
def measured_cpu(threads: int) -> Roofline | None:
    """Return the roofline of this CPU with ``threads`` threads; None without a C++ compiler."""
    try:
        find_compiler()
    except ToolchainError:
        return None
    probe, cpu = _Probe(threads), host_cpu()
    store, key = open_cache("rooflines"), f"{cpu.name} {sorted(cpu.features)} {threads} {PROBE.read_text()}"
    known: dict[str, Any] = json.loads(store.get(key) or b"{}")
    flops = {dtype: max(probe.flops(dtype), known.get("flops", {}).get(dtype, 0.0)) for dtype in _DTYPES}
    flops["float16"] = flops["float32"]  # a storage type: arithmetic is float32
    flops["uint8"] = flops["int8"]
    flops["bfloat16"] = max(flops["bfloat16"], flops["float32"])  # is unpacked to float32 where that is faster
    rates = [[size, probe.bandwidth(size)] for size in [*_caches(threads), math.inf]]
    for rate, (_, before) in zip(rates, known.get("bandwidths", []), strict=False):
        rate[1] = max(rate[1], before)
    for nearer, farther in zip(rates[-2::-1], rates[:0:-1], strict=True):  # not slower than the next level
        nearer[1] = max(nearer[1], farther[1])
    plain = [[size if math.isfinite(size) else 0, rate] for size, rate in rates]
    store.put(key, json.dumps({"flops": flops, "bandwidths": plain}).encode())
    return Roofline(flops, tuple((size, rate) for size, rate in rates), f"measured here with {threads} thread(s)")


def _caches(threads: int) -> list[int]:
    """Return the bytes of the caches after the first level that ``threads`` threads share, as Linux reports them; an
    empty list on other systems."""
    found: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind = int((index / "level").read_text()), (index / "type").read_text().strip()
            size, shared = (index / "size").read_text().strip(), (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if level > 1 and kind != "Instruction" and size[:-1].isdigit():
            nbytes = int(size[:-1]) << {"K": 10, "M": 20}.get(size[-1], 0)
            found[level] = nbytes if "-" in shared or "," in shared else nbytes * threads
    return [found[level] for level in sorted(found)]


class _Probe:
    """The compiled probe and the memory that it reads."""

    def __init__(self, threads: int):
        from npu_compiler.targets.cpu.target import KERNELS
        from npu_compiler.targets.cpu.toolchain import build_shared

        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(build_shared({"probe.cpp": PROBE.read_text()}, KERNELS))
            file.flush()
            self._library = ctypes.CDLL(file.name)
        self._library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
        self._library.read_all.restype = ctypes.c_float
        for dtype in _DTYPES:
            function = getattr(self._library, f"multiply_{dtype}")
            function.argtypes, function.restype = (ctypes.c_long, ctypes.c_float), ctypes.c_float
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self._memory = np.ones(max(_MOST, 4 * max(_caches(threads), default=0)), np.uint8)

    def flops(self, dtype: str) -> float:
        """Return FLOP/s of multiplications of ``dtype`` by the threads' CPU time, so that other processes do not
        count."""
        function, steps, seconds = getattr(self._library, f"multiply_{dtype}"), 1000, [0.0]
        while min(seconds) < _SECONDS / 2:
            steps *= 4
            work = partial(function, steps, 0.1)
            seconds = list(self._pool.map(_cpu_seconds, [work] * self._threads))
        return sum(getattr(self._library, f"step_flops_{dtype}")() * steps / s for s in seconds)

    def bandwidth(self, size: float) -> float:
        """Return the bytes per second that all threads together read from ``size`` bytes of cache (half of it) or
        memory."""
        whole = self._memory.nbytes if math.isinf(size) else int(size) // 2
        part = whole // self._threads // 4096 * 4096
        starts = [self._memory.ctypes.data + thread * part for thread in range(self._threads)]

        def read(times: int, streams: int) -> float:
            def of_thread(start: int) -> None:
                for _ in range(times):
                    self._library.read_all(start, part, streams)

            return elapsed(lambda: list(self._pool.map(of_thread, starts)))

        best = 0.0
        for streams in (1, 2, 4):
            times = 1
            for _ in range(_REPEATS):
                seconds = read(times, streams)
                best = max(best, times * part * self._threads / seconds)
                times = max(1, int(times * _SECONDS / seconds))
        return best


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call in this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
