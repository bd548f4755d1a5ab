"""Queues and command buffers: running what encoders recorded, and finding out whether its order was left open."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, ClassVar

from ...metal_emulator import EmulatorError, Window
from ...metal_emulator.library import MAX_SHARED
from .encoders import BlitEncoder, ComputeEncoder, Dispatch, Encoder, Execute, Item
from .faults import APIMisuse, EncoderInfo, NSError, require
from .names import CONCURRENT, CONSTANTS
from .resources import Buffer, ResidencySet, live

if TYPE_CHECKING:
    from .descriptors import MTLCommandBufferDescriptor, MTLComputePassDescriptor
    from .device import Device

_COMPLETED, _ERROR = CONSTANTS["MTLCommandBufferStatusCompleted"], CONSTANTS["MTLCommandBufferStatusError"]
_STATE = {name: CONSTANTS[f"MTLCommandEncoderErrorState{name}"] for name in ("Completed", "Faulted", "Pending")}


class CommandBuffer:
    """``after``: the command buffer before it in the queue, if that had not finished when this one was committed."""

    live: ClassVar[weakref.WeakSet[CommandBuffer]] = weakref.WeakSet()

    def __init__(self, queue: Queue, error_options: int):
        with live:
            CommandBuffer.live.add(self)
        self.queue, self.device, self._error_options = queue, queue.device, error_options
        self.encoders: list[Encoder] = []
        self.encoder: Encoder | None = None
        self.after: Encoder | None = None
        self.committed, self._status, self._error, self._span = False, 0, None, (0.0, 0.0)

    def computeCommandEncoderWithDispatchType_(self, kind: int) -> ComputeEncoder:
        self._check()
        require(kind == CONCURRENT, "the runtime dispatches concurrently")
        return ComputeEncoder(self)

    def computeCommandEncoderWithDescriptor_(self, descriptor: MTLComputePassDescriptor) -> ComputeEncoder:
        self._check()
        return ComputeEncoder(self, descriptor)

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
        before = [e for b in self.queue.waiting for e in b.encoders]
        self.after = before[-1] if before else None
        self.queue.waiting.append(self)
        self._count(1)

    def _count(self, change: int) -> None:
        for item in (i for e in self.encoders for s in e.segments for i in s):
            if isinstance(item, Execute):
                item.commands.in_flight += change

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
            self._check_fences()
            self._error = self._run()
        finally:
            self._status = _COMPLETED if self._error is None else _ERROR
            self._count(-1)
            self._span, self.encoders, self.after = (begin, time.perf_counter()), [], None

    def _run(self) -> NSError | None:
        for n, encoder in enumerate(self.encoders):
            if encoder.samples is not None:
                encoder.samples[0].sample(encoder.samples[1])
            found = self._run_encoder(encoder)
            if found is not None:
                return self._described(*found, n)
            if encoder.samples is not None:
                encoder.samples[0].sample(encoder.samples[2])
        return None

    def _run_encoder(self, encoder: Encoder) -> tuple[NSError, int] | None:
        """Run an encoder's work; return (error, signposts passed) if a kernel fails."""
        for segment in self._expanded(encoder):
            self._check_hazards(segment)
            for work in self.device.ordered(segment):
                if isinstance(work, Dispatch):
                    error, passed = self.device.fault(work.pipeline.function.name), work.signposts
                else:
                    error, passed = self.device.fault("copy"), 0
                if error is not None:
                    return error, passed
                if isinstance(work, Dispatch):
                    self._dispatch(work)
                else:
                    work()
        return None

    def _described(self, error: NSError, signposts: int, failed: int) -> NSError:
        if self._error_options != CONSTANTS["MTLCommandBufferErrorOptionEncoderExecutionStatus"]:
            return error
        infos = []
        for n, e in enumerate(self.encoders):
            state = "Faulted" if n == failed else "Completed" if n < failed else "Pending"
            passed = e.signposts[:signposts] if n == failed else e.signposts if n < failed else []
            infos.append(EncoderInfo(e.label, _STATE[state], passed))
        return error.with_encoders(infos)

    def _expanded(self, encoder: Encoder) -> list[list[Item]]:
        """The segments of an encoder with the commands of its indirect command buffers in them."""
        segments: list[list[Item]] = []
        for segment in encoder.segments:
            segments.append([])
            for item in segment:
                if not isinstance(item, Execute):
                    segments[-1].append(item)
                    continue
                for command in item.commands.commands[item.begin : item.begin + item.count]:
                    if command.barrier:
                        segments.append([])
                    pipeline, buffers, groups, threads = command.checked()
                    self._check_resident(encoder, pipeline.label, [b for b, _ in buffers.values()])
                    segments[-1].append(Dispatch(pipeline, buffers, groups, threads, item.signposts))
        return segments

    def _check_resident(self, encoder: Encoder, label: str, buffers: list[Buffer]) -> None:
        """Refuse indirect commands whose memory is not mapped: Metal maps by itself only what is bound directly."""
        mapped = encoder.used.union(*(s.resident for s in self.queue.sets))
        require(mapped.issuperset(buffers), f"{label}: memory of an indirect command is not resident")

    def _check_fences(self) -> None:
        """Refuse neighbouring encoders that no fence orders, if one executes indirect commands: Metal does not see
        what these use."""
        before = self.after
        for encoder in self.encoders:
            if before is not None and (before.indirect or encoder.indirect):
                ordered = before.updated & encoder.waited
                require(ordered, f"no fence between {before.label!r} and {encoder.label!r}")
            before = encoder

    def _check_hazards(self, segment: list[Item]) -> None:
        """Refuse dispatches that no barrier separates, if one writes what another one is given."""
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
        windows = {n: Window(b.memory.ctypes.data + at, b.length() - at, at) for n, (b, at) in work.buffers.items()}
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

    def commandBufferWithDescriptor_(self, descriptor: MTLCommandBufferDescriptor) -> CommandBuffer:
        require(len(self.waiting) < 64, "a queue has room for 64 command buffers")
        return CommandBuffer(self, descriptor.options)

    def commandBuffer(self) -> CommandBuffer:
        require(len(self.waiting) < 64, "a queue has room for 64 command buffers")
        return CommandBuffer(self, 0)
