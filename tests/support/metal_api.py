"""A stand-in for pyobjc's ``Metal``, ``Foundation`` and ``objc``, over the Metal emulator. For tests on Linux.

It has the methods that ``npu_runtime/backends/metal`` calls, under pyobjc's names and with its results: a method whose
last argument is an error returns a tuple. Work runs when it is waited for, so a missing wait shows as a stale result;
dispatches that no barrier separates run in any order; and a mistake that Apple's API validation would stop is an
``APIMisuse``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from npu_compiler.support.errors import ToolchainError

from ..metal_emulator import EmulatorError, Library, MSLError, Window
from ..metal_emulator.library import MAX_SHARED, MAX_THREADS
from .metal_backend import library

MAX_BUFFERS = 31
ALIGNMENT = 4  # bytes, of copies

CONSTANTS = {  # the values of Apple's headers
    "MTLResourceStorageModeShared": 0, "MTLDispatchTypeConcurrent": 1, "MTLBarrierScopeBuffers": 1,
    "MTLGPUFamilyApple6": 1006, "MTLGPUFamilyMetal3": 5001, "MTLLanguageVersion3_0": 0x30000,
    "MTLLanguageVersion3_1": 0x30001, "MTLMathModeSafe": 0, "MTLCommandBufferStatusCompleted": 4,
    "MTLCommandBufferErrorTimeout": 2, "MTLCommandBufferErrorPageFault": 3, "MTLCommandBufferErrorAccessRevoked": 4,
    "MTLCommandBufferErrorOutOfMemory": 8, "MTLCommandBufferErrorDeviceRemoved": 11,
    "MTLCaptureDestinationGPUTraceDocument": 2,
}  # fmt: skip
_COMPLETED, _ERROR = 4, 5  # MTLCommandBufferStatus


_live = threading.RLock()  # of the sets of living objects


class APIMisuse(AssertionError):
    """A call that Metal's API validation refuses."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise APIMisuse(message)


class MTLSize(NamedTuple):
    width: int
    height: int
    depth: int


class NSError:
    def __init__(self, text: str, code: int = 1):
        self._text, self._code = text, code

    def localizedDescription(self) -> str:
        return self._text

    def code(self) -> int:
        return self._code


class NSURL:
    def __init__(self, path: str):
        self.path = Path(path)

    @classmethod
    def fileURLWithPath_(cls, path: str) -> NSURL:
        return cls(path)


class _Plain:
    """An object that is made by ``alloc().init()`` and has setters."""

    @classmethod
    def alloc(cls) -> _Plain:
        return cls()

    def init(self) -> _Plain:
        return self


class MTLCompileOptions(_Plain):
    version = mode = -1

    def setLanguageVersion_(self, version: int) -> None:
        self.version = version

    def setMathMode_(self, mode: int) -> None:
        self.mode = mode


class MTLComputePipelineDescriptor(_Plain):
    function: Any = None
    label = ""
    archives: Sequence[Archive] = ()

    def setComputeFunction_(self, function: Any) -> None:
        self.function = function

    def setLabel_(self, label: str) -> None:
        self.label = label

    def setBinaryArchives_(self, archives: Sequence[Archive]) -> None:
        self.archives = archives


class MTLBinaryArchiveDescriptor(_Plain):
    url: NSURL | None = None

    def setUrl_(self, url: NSURL) -> None:
        self.url = url


class MTLResidencySetDescriptor(_Plain):
    pass


class ResidencySet:
    """``resident``: what the last commit left in the set."""

    def __init__(self) -> None:
        self._allocations: set[Buffer] = set()
        self.resident: frozenset[Buffer] = frozenset()

    def addAllocation_(self, buffer: Buffer) -> None:
        self._allocations.add(buffer)

    def removeAllocation_(self, buffer: Buffer) -> None:
        self._allocations.remove(buffer)

    def commit(self) -> None:
        self.resident = frozenset(self._allocations)

    def requestResidency(self) -> None:
        require(self.resident == self._allocations, "the residency set is not committed")


class MTLCaptureDescriptor(_Plain):
    def setCaptureObject_(self, queue: Queue) -> None:
        self.queue = queue

    def setDestination_(self, destination: int) -> None:
        require(destination == 2, "a capture goes to a document")

    def setOutputURL_(self, url: NSURL) -> None:
        self.url = url


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


class _Contents:
    """What pyobjc returns for a pointer of unknown length. It does not keep the memory alive."""

    def __init__(self, address: int, length: int):
        self._address, self._length = address, length

    def as_buffer(self, count: int) -> memoryview:
        require(count <= self._length, f"{count} bytes of a buffer of {self._length}")
        return memoryview((ctypes.c_uint8 * count).from_address(self._address))


class Buffer:
    live: ClassVar[weakref.WeakSet[Buffer]] = weakref.WeakSet()

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        with _live:
            Buffer.live.add(self)

    def contents(self) -> _Contents:
        return _Contents(self.memory.ctypes.data, self.memory.nbytes)

    def length(self) -> int:
        return self.memory.nbytes


class CompiledLibrary:
    def __init__(self, library: Library):
        self._library = library

    def newFunctionWithName_(self, name: str) -> Any:
        return self._library.functions.get(name)


class Pipeline:
    def __init__(self, device: Device, function: Any, label: str):
        self.device, self.function, self.label = device, function, label

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return min(self.device.max_threads, self.function.signature.max_threads)

    def staticThreadgroupMemoryLength(self) -> int:
        return self.device.static_shared


class Archive:
    def __init__(self, names: set[str]):
        self.names = names

    def addComputePipelineFunctionsWithDescriptor_error_(
        self, descriptor: MTLComputePipelineDescriptor, error: None
    ) -> tuple[bool, Any]:
        self.names.add(descriptor.function.name)
        return True, None

    def serializeToURL_error_(self, url: NSURL, error: None) -> tuple[bool, Any]:
        url.path.write_text("archive " + " ".join(sorted(self.names)))
        return True, None


class Dispatch(NamedTuple):
    pipeline: Pipeline
    buffers: Mapping[int, tuple[Buffer, int]]
    groups: MTLSize
    threads: MTLSize


class _Encoder:
    """Records work into the segments of its command buffer. Segments run in order, the work in one in any order."""

    def __init__(self, owner: CommandBuffer):
        self.owner, self._ended = owner, False
        owner.encoder = self
        owner.segments.append([])

    def _check(self) -> None:
        require(not self._ended, "the encoder has ended")
        require(not self.owner.committed, "the command buffer is committed")

    def endEncoding(self) -> None:
        self._check()
        self._ended, self.owner.encoder = True, None


class ComputeEncoder(_Encoder):
    def __init__(self, owner: CommandBuffer):
        super().__init__(owner)
        self._pipeline: Pipeline | None = None
        self._buffers: dict[int, tuple[Buffer, int]] = {}
        self.owner.device.log.append(("encoder",))

    def setComputePipelineState_(self, pipeline: Pipeline) -> None:
        self._check()
        self._pipeline = pipeline

    def setBuffer_offset_atIndex_(self, buffer: Buffer, offset: int, index: int) -> None:
        self._check()
        require(isinstance(buffer, Buffer), f"{buffer!r} is not a buffer")
        require(0 <= index < MAX_BUFFERS, f"buffer index {index}; there are {MAX_BUFFERS}")
        require(0 <= offset < buffer.length(), f"offset {offset} in a buffer of {buffer.length()} bytes")
        self._buffers[index] = buffer, offset

    def memoryBarrierWithScope_(self, scope: int) -> None:
        self._check()
        require(scope == CONSTANTS["MTLBarrierScopeBuffers"], "the scope has no buffers")
        self.owner.segments.append([])
        self.owner.device.log.append(("barrier",))

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: MTLSize, threads: MTLSize) -> None:
        self._check()
        pipeline = self._pipeline
        require(pipeline is not None, "a dispatch without a pipeline state")
        assert pipeline is not None
        require(min(*groups, *threads) > 0, f"a grid of {tuple(groups)} threadgroups of {tuple(threads)} threads")
        count = threads.width * threads.height * threads.depth
        limit = pipeline.maxTotalThreadsPerThreadgroup()
        require(count <= limit, f"{count} threads in a threadgroup; {pipeline.label} takes {limit}")
        wanted = [p.index for p in pipeline.function.signature.buffers]
        require(all(n in self._buffers for n in wanted), f"{pipeline.label}: a buffer is missing")
        bound = {n: self._buffers[n] for n in wanted}
        for n, size in zip(wanted, pipeline.function.element_sizes, strict=False):
            require(bound[n][1] % size == 0, f"{pipeline.label}: offset {bound[n][1]} for elements of {size} bytes")
        self.owner.segments[-1].append(Dispatch(pipeline, bound, groups, threads))
        self.owner.device.log.append(("dispatch", pipeline.function.name))


class BlitEncoder(_Encoder):
    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: Buffer, start: int, to: Buffer, at: int, size: int
    ) -> None:
        self._check()
        require(size > 0 and (start | at | size) % ALIGNMENT == 0, f"a copy of {size} bytes from {start} to {at}")
        require(start + size <= source.length() and at + size <= to.length(), "a copy past the end of a buffer")

        def copy() -> None:
            to.memory[at : at + size] = source.memory[start : start + size].copy()

        self.owner.segments[-1].append(copy)


class CommandBuffer:
    live: ClassVar[weakref.WeakSet[CommandBuffer]] = weakref.WeakSet()

    def __init__(self, queue: Queue):
        with _live:
            CommandBuffer.live.add(self)
        self.queue, self.device = queue, queue.device
        self.segments: list[list[Dispatch | Callable[[], None]]] = []
        self.encoder: _Encoder | None = None
        self.committed, self._status, self._error, self._span = False, 0, None, (0.0, 0.0)

    def computeCommandEncoderWithDispatchType_(self, kind: int) -> ComputeEncoder:
        self._check()
        require(kind == CONSTANTS["MTLDispatchTypeConcurrent"], "the runtime dispatches concurrently")
        return ComputeEncoder(self)

    def blitCommandEncoder(self) -> BlitEncoder:
        self._check()
        return BlitEncoder(self)

    def _check(self) -> None:
        require(not self.committed, "the command buffer is committed")
        require(self.encoder is None, "another encoder has not ended")

    def commit(self) -> None:
        self._check()
        self.committed, self._status = True, 2
        self.queue.committed += 1
        self.queue.waiting.append(self)

    def waitUntilCompleted(self) -> None:
        require(self.committed, "a wait for a command buffer that is not committed")
        with self.queue.lock:
            while self in self.queue.waiting:
                self.queue.waiting.pop(0).run()

    def status(self) -> int:
        return self._status

    def error(self) -> NSError | None:
        return self._error

    def GPUStartTime(self) -> float:
        return self._span[0]

    def GPUEndTime(self) -> float:
        return self._span[1]

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            self._check_hazards()
            self._error = self._run()
        finally:
            self._status = _COMPLETED if self._error is None else _ERROR
            self._span, self.segments = (begin, time.perf_counter()), []

    def _run(self) -> NSError | None:
        for segment in self.segments:
            for work in self.device.ordered(segment):
                if isinstance(work, Dispatch):
                    if work.pipeline.function.name in self.device.faults:
                        return self.device.faults[work.pipeline.function.name]
                    self._dispatch(work)
                else:
                    work()
        return None

    def _check_hazards(self) -> None:
        """Refuse dispatches that no barrier separates, if one writes what another one is given."""
        for segment in self.segments:
            given: dict[int, tuple[Dispatch, bool]] = {}  # by address: a dispatch, and whether one writes there
            for work in (w for w in segment if isinstance(w, Dispatch)):
                uses = [(p.written, *work.buffers[p.index]) for p in work.pipeline.function.signature.buffers]
                places = {b.memory.ctypes.data + at: written for written, b, at in sorted(uses, key=lambda u: u[0])}
                for place, written in places.items():
                    other, wrote = given.get(place, (work, False))
                    names = f"{other.pipeline.label} and {work.pipeline.label}"
                    require(other is work or not (written or wrote), f"no barrier between {names}")
                    given[place] = work, written or wrote

    def _dispatch(self, work: Dispatch) -> None:
        windows = {
            n: Window(b.memory.ctypes.data + at, b.length() - at, at) for n, (b, at) in work.buffers.items()
        }
        try:
            work.pipeline.function(windows, work.groups, work.threads)
        except EmulatorError as error:
            raise APIMisuse(str(error)) from None
        require(work.pipeline.function.shared_used <= MAX_SHARED, "too much threadgroup memory")


class Queue:
    def __init__(self, device: Device):
        self.device, self.waiting, self.committed = device, list[CommandBuffer](), 0
        self.sets: list[ResidencySet] = []
        self.lock = threading.RLock()  # of the GPU: several threads may wait

    def addResidencySet_(self, residency: ResidencySet) -> None:
        self.sets.append(residency)
        require(len(self.sets) <= 32, "a queue has at most 32 residency sets")

    def commandBuffer(self) -> CommandBuffer:
        require(len(self.waiting) < 64, "a queue has room for 64 command buffers")
        return CommandBuffer(self)


class Device:
    """``family``: of the GPU. ``order``: 'random' or 'reversed', of dispatches that no barrier separates. ``faults``:
    errors of command buffers that run a kernel, by its name. ``memory``: the bytes that buffers may take.
    ``log``: the compute work that was encoded, in order. ``checks``: watch every access, as the emulator's own tests
    do."""

    def __init__(self, family: int = 9, order: str = "random", seed: int = 0, checks: bool = False):
        self.family, self.order, self._random = family, order, random.Random(seed)
        self.faults: dict[str, NSError] = {}
        self.memory, self.max_buffer = 1 << 33, 1 << 32
        self.max_threads, self.static_shared = MAX_THREADS, 0
        self.log: list[tuple[str, ...]] = []
        self.compiled, self._lock = 0, threading.Lock()
        self.no_copies = 0
        self.checks = checks

    def ordered(self, work: list[Any]) -> list[Any]:
        return work[::-1] if self.order == "reversed" else self._random.sample(work, len(work))

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

    def newResidencySetWithDescriptor_error_(
        self, descriptor: MTLResidencySetDescriptor, error: None
    ) -> tuple[ResidencySet, None]:
        return ResidencySet(), None

    def newCommandQueue(self) -> Queue:
        return Queue(self)

    def newBufferWithLength_options_(self, length: int, options: int) -> Buffer | None:
        require(0 < length <= self.max_buffer and options == 0, f"a shared buffer of {length} bytes")
        with _live:
            if length > self.memory - sum(b.length() for b in Buffer.live):
                return None
        whole = np.frombuffer(mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
        return Buffer(whole[:length])

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, pages: np.ndarray, length: int, options: int, deallocator: None
    ) -> Buffer:
        require(pages.ctypes.data % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0, "these are not pages")
        require(0 < length <= pages.nbytes and options == 0 and deallocator is None, "a buffer without a copy")
        self.no_copies += 1
        return Buffer(pages[:length])

    def newLibraryWithSource_options_error_(
        self, text: str, options: MTLCompileOptions, error: None
    ) -> tuple[CompiledLibrary | None, NSError | None]:
        require(options.mode == CONSTANTS["MTLMathModeSafe"], "maths are safe")
        require("bfloat" not in text or options.version >= 0x30001, "bfloat came with Metal 3.1")
        try:
            return CompiledLibrary(library(text, self.checks)), None
        except (MSLError, ToolchainError) as problem:
            return None, NSError(f"Compilation failed: {problem}")

    def newBinaryArchiveWithDescriptor_error_(
        self, descriptor: MTLBinaryArchiveDescriptor, error: None
    ) -> tuple[Archive | None, NSError | None]:
        if descriptor.url is None:
            return Archive(set()), None
        kind, *names = descriptor.url.path.read_text().split()
        return (Archive(set(names)), None) if kind == "archive" else (None, NSError("Not an archive"))

    def newComputePipelineStateWithDescriptor_options_reflection_error_(
        self, descriptor: MTLComputePipelineDescriptor, options: int, reflection: None, error: None
    ) -> tuple[Pipeline, None]:
        with self._lock:
            self.compiled += not any(descriptor.function.name in a.names for a in descriptor.archives)
        return Pipeline(self, descriptor.function, descriptor.label), None


def modules(device: Device | None) -> dict[str, ModuleType]:
    """The modules by name, on a machine whose GPU is ``device``."""
    made = {name: ModuleType(name) for name in ("Metal", "Foundation", "objc")}
    made["Metal"].__dict__.update(CONSTANTS, MTLSize=MTLSize, MTLCreateSystemDefaultDevice=lambda: device)
    for each in (
        MTLCompileOptions, MTLComputePipelineDescriptor, MTLBinaryArchiveDescriptor, MTLCaptureDescriptor,
        MTLCaptureManager, MTLResidencySetDescriptor,
    ):  # fmt: skip
        setattr(made["Metal"], each.__name__, each)
    made["Foundation"].__dict__.update(NSURL=NSURL)
    made["objc"].__dict__.update(autorelease_pool=contextlib.nullcontext)
    return made


@contextlib.contextmanager
def installed(device: Device | None) -> Iterator[Device | None]:
    """A context in which ``import Metal`` finds the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules(device).items():
            patch.setitem(sys.modules, name, module)
        yield device
