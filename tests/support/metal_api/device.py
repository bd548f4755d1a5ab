"""The GPU, and the modules through which a program finds it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from npu_compiler.support.errors import ToolchainError

from ...metal_emulator import MSLError
from ...metal_emulator.library import MAX_SHARED, MAX_THREADS
from ..metal_backend import library
from . import descriptors
from .commands import Queue
from .descriptors import MTLCaptureDescriptor
from .faults import NSError, require
from .indirect import IndirectCommandBuffer
from .names import CONSTANTS, SHARED
from .resources import (
    Archive,
    Buffer,
    CompiledLibrary,
    CounterSampleBuffer,
    CounterSet,
    Fence,
    Pipeline,
    ResidencySet,
    live,
)
from .validation import MTLSize

TICKS = 24  # of the GPU's clock in a microsecond


class Device:
    """``family``: of the GPU. ``order``: 'random' or 'reversed', of dispatches that no barrier separates. ``faults``:
    errors of command buffers that run a kernel, by its name, or "copy"; ``faults_last``: whether it fails each time.
    ``memory``: the bytes that buffers may take. ``not_indirect``: kernels that cannot be commands of an indirect
    command buffer; ``indirect_threads``: the threads of a threadgroup of those that can. ``counters``: whether encoders
    sample the clock; ``lost_samples``: those that fail. ``log``: the compute work that was encoded, in order.
    ``checks``: watch every access, as the emulator's own tests do."""

    def __init__(self, family: int = 9, order: str = "random", seed: int = 0, checks: bool = False):
        self.family, self.order, self._random = family, order, random.Random(seed)
        self.faults: dict[str, NSError] = {}
        self.faults_last = True
        self.memory, self.max_buffer = 1 << 33, 1 << 32
        self.max_threads, self.static_shared = MAX_THREADS, 0
        self.not_indirect: frozenset[str] = frozenset()
        self.indirect_threads = MAX_THREADS
        self.counters, self.lost_samples = True, frozenset[int]()
        self.log: list[tuple[str, ...]] = []
        self.compiled, self._lock = 0, threading.Lock()
        self.no_copies = 0
        self._indirect: list[weakref.ref[IndirectCommandBuffer]] = []
        self.checks = checks

    @property
    def indirect(self) -> list[IndirectCommandBuffer]:
        """The indirect command buffers that live, in the order in which they were made."""
        return [made for ref in self._indirect if (made := ref()) is not None]

    def ordered(self, work: list[Any]) -> list[Any]:
        return work[::-1] if self.order == "reversed" else self._random.sample(work, len(work))

    def fault(self, kernel: str) -> NSError | None:
        return self.faults.get(kernel) if self.faults_last else self.faults.pop(kernel, None)

    def ticks(self) -> int:
        return time.perf_counter_ns() * TICKS // 1000

    # -- what it is ---------------------------------------------------------------------------------------------------
    def name(self) -> str:
        return "Emulated Apple GPU"

    def supportsFamily_(self, family: int) -> bool:
        return 1000 < family <= 1000 + self.family or (family == 5001 and self.family >= 7)

    def maxThreadgroupMemoryLength(self) -> int:
        return MAX_SHARED

    def maxBufferLength(self) -> int:
        return self.max_buffer

    def recommendedMaxWorkingSetSize(self) -> int:
        return self.memory

    def supportsCounterSampling_(self, point: int) -> bool:
        return self.counters and point == CONSTANTS["MTLCounterSamplingPointAtStageBoundary"]

    def counterSets(self) -> list[CounterSet]:
        return [CounterSet(CONSTANTS[f"MTLCommonCounterSet{name}"]) for name in ("Statistic", "Timestamp")]

    def sampleTimestamps_gpuTimestamp_(self, cpu: None, gpu: None) -> tuple[int, int]:
        return time.perf_counter_ns(), self.ticks()

    # -- what it makes ------------------------------------------------------------------------------------------------
    def newResidencySetWithDescriptor_error_(
        self, descriptor: descriptors.MTLResidencySetDescriptor, error: None
    ) -> tuple[ResidencySet, None]:
        return ResidencySet(), None

    def newCommandQueue(self) -> Queue:
        return Queue(self)

    def newFence(self) -> Fence:
        return Fence()

    def newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(
        self, descriptor: descriptors.MTLIndirectCommandBufferDescriptor, count: int, options: int
    ) -> IndirectCommandBuffer | None:
        made = IndirectCommandBuffer(descriptor, count, options)
        if not self.memory:
            return None
        self._indirect.append(weakref.ref(made))
        return made

    def newCounterSampleBufferWithDescriptor_error_(
        self, descriptor: descriptors.MTLCounterSampleBufferDescriptor, error: None
    ) -> tuple[CounterSampleBuffer | None, NSError | None]:
        require(descriptor.storage == CONSTANTS["MTLStorageModeShared"], "the CPU reads the samples")
        name = None if descriptor.counters is None else descriptor.counters.name()
        require(name == CONSTANTS["MTLCommonCounterSetTimestamp"], f"samples of {name}")
        if not 0 < 8 * descriptor.count <= 32 << 10:
            return None, NSError(f"Invalid sample buffer length: {8 * descriptor.count} B. Expected at most 32768 B")
        return CounterSampleBuffer(self, descriptor.count), None

    def newBufferWithLength_options_(self, length: int, options: int) -> Buffer | None:
        require(0 < length <= self.max_buffer and options == SHARED, f"a shared buffer of {length} bytes")
        with live:
            if length > self.memory - sum(b.length() for b in Buffer.live):
                return None
        whole = np.frombuffer(mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
        return Buffer(whole[:length])

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, pages: np.ndarray, length: int, options: int, deallocator: None
    ) -> Buffer:
        require(pages.ctypes.data % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0, "these are not pages")
        require(0 < length <= pages.nbytes and options == SHARED and deallocator is None, "a buffer without a copy")
        self.no_copies += 1
        same = (ctypes.c_uint8 * length).from_address(pages.ctypes.data)
        return Buffer(np.frombuffer(same, np.uint8), pages)

    def newLibraryWithSource_options_error_(
        self, text: str, options: descriptors.MTLCompileOptions, error: None
    ) -> tuple[CompiledLibrary | None, NSError | None]:
        require(options.mode == CONSTANTS["MTLMathModeSafe"], "maths are safe")
        require("bfloat" not in text or options.version >= 0x30001, "bfloat came with Metal 3.1")
        try:
            version = 100 * (options.version >> 16) + 10 * (options.version & 0xFFFF)
            return CompiledLibrary(library(text, self.checks, version)), None
        except (MSLError, ToolchainError) as problem:
            return None, NSError(f"Compilation failed: {problem}")

    def newBinaryArchiveWithDescriptor_error_(
        self, descriptor: descriptors.MTLBinaryArchiveDescriptor, error: None
    ) -> tuple[Archive | None, NSError | None]:
        if descriptor.url is None:
            return Archive(set()), None
        kind, *names = descriptor.url.path.read_text().split()
        return (Archive(set(names)), None) if kind == "archive" else (None, NSError("Not an archive"))

    def newComputePipelineStateWithDescriptor_options_reflection_error_(
        self, descriptor: descriptors.MTLComputePipelineDescriptor, options: int, reflection: None, error: None
    ) -> tuple[Pipeline | None, NSError | None]:
        if descriptor.indirect and descriptor.function.name in self.not_indirect:
            return None, NSError("the function cannot be used with indirect command buffers")
        with self._lock:
            self.compiled += not any(descriptor.key in a.names for a in descriptor.archives)
        return Pipeline(self, descriptor), None


class MTLCaptureManager:
    """Writes the number of command buffers that were committed during the capture."""

    shared: MTLCaptureManager | None = None
    descriptor: Any = None

    @classmethod
    def sharedCaptureManager(cls) -> MTLCaptureManager:
        cls.shared = cls.shared or cls()
        return cls.shared

    def startCaptureWithDescriptor_error_(self, descriptor: MTLCaptureDescriptor, error: None) -> tuple[bool, Any]:
        if descriptor.url.path.exists():
            return False, NSError("Output URL already exists")
        self.descriptor, self._begin = descriptor, descriptor.queue.committed
        return True, None

    def stopCapture(self) -> None:
        self.descriptor.url.path.write_text(str(self.descriptor.queue.committed - self._begin))
        self.descriptor = None


def modules(device: Device | None) -> dict[str, ModuleType]:
    """The modules by name, on a machine whose GPU is ``device``."""
    made = {name: ModuleType(name) for name in ("Metal", "Foundation", "objc")}
    classes = {name: each for name, each in vars(descriptors).items() if name.startswith("MTL")}
    made["Metal"].__dict__.update(
        CONSTANTS, **classes, MTLCaptureManager=MTLCaptureManager, MTLSize=MTLSize,
        MTLCreateSystemDefaultDevice=lambda: device,
    )  # fmt: skip
    made["Foundation"].__dict__.update(NSURL=descriptors.NSURL)
    made["objc"].__dict__.update(autorelease_pool=contextlib.nullcontext)
    return made


@contextlib.contextmanager
def installed(device: Device | None) -> Iterator[Device | None]:
    """A context in which ``import Metal`` finds the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules(device).items():
            patch.setitem(sys.modules, name, module)
        yield device
