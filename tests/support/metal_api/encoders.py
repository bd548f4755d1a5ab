"""Encoders: they record the work of a command buffer, which runs when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .faults import require
from .indirect import IndirectCommandBuffer
from .names import CONCURRENT, CONSTANTS, MAX_BUFFERS
from .resources import Buffer, CounterSampleBuffer, Fence, Pipeline
from .validation import MTLSize, arguments, check_offset

if TYPE_CHECKING:
    from .commands import CommandBuffer
    from .descriptors import MTLComputePassDescriptor

ALIGNMENT = 4  # bytes, of copies


class Dispatch(NamedTuple):
    """``signposts``: how many of its encoder the GPU has passed when it runs."""

    pipeline: Pipeline
    buffers: Mapping[int, tuple[Buffer, int]]
    groups: MTLSize
    threads: MTLSize
    signposts: int


class Execute(NamedTuple):
    """Commands of an indirect command buffer, which are read when it runs."""

    commands: IndirectCommandBuffer
    begin: int
    count: int
    signposts: int


Item = Dispatch | Execute | Callable[[], None]


class Encoder:
    """Records work into segments. Segments run in order, the work in one in any order."""

    def __init__(self, owner: CommandBuffer):
        self.owner, self._ended, self.label = owner, False, ""
        self.segments: list[list[Item]] = [[]]
        self.signposts: list[str] = []
        self.waited: set[Fence] = set()
        self.updated: set[Fence] = set()
        self.used: set[Buffer] = set()
        self.samples: tuple[CounterSampleBuffer, int, int] | None = None
        owner.encoder = self
        owner.encoders.append(self)

    @property
    def indirect(self) -> bool:
        return any(isinstance(item, Execute) for segment in self.segments for item in segment)

    def check(self) -> None:
        require(not self._ended, "the encoder has ended")
        require(not self.owner.committed, "the command buffer is committed")

    def setLabel_(self, label: str) -> None:
        self.check()
        self.label = label

    def waitForFence_(self, fence: Fence) -> None:
        self.check()
        self.waited.add(fence)

    def updateFence_(self, fence: Fence) -> None:
        self.check()
        self.updated.add(fence)

    def endEncoding(self) -> None:
        self.check()
        self._ended, self.owner.encoder = True, None


class ComputeEncoder(Encoder):
    def __init__(self, owner: CommandBuffer, descriptor: MTLComputePassDescriptor | None = None):
        super().__init__(owner)
        if descriptor is not None:
            require(descriptor.kind == CONCURRENT, "the runtime dispatches concurrently")
            attachment = descriptor.attachments.objectAtIndexedSubscript_(0)
            require(attachment.samples is not None, "a pass descriptor without a sample buffer")
            assert attachment.samples is not None
            self.samples = attachment.samples, attachment.begin, attachment.end
        self._pipeline: Pipeline | None = None
        self._buffers: dict[int, tuple[Buffer, int]] = {}
        self.log(("encoder",))

    def log(self, entry: tuple[str, ...]) -> None:
        self.owner.device.log.append(entry)

    def setComputePipelineState_(self, pipeline: Pipeline) -> None:
        self.check()
        self._pipeline = pipeline

    def setBuffer_offset_atIndex_(self, buffer: Buffer, offset: int, index: int) -> None:
        self.check()
        check_offset(buffer, offset, index, MAX_BUFFERS)
        self._buffers[index] = buffer, offset

    def insertDebugSignpost_(self, name: str) -> None:
        self.check()
        self.signposts.append(name)

    def memoryBarrierWithScope_(self, scope: int) -> None:
        self.check()
        require(scope == CONSTANTS["MTLBarrierScopeBuffers"], "the scope has no buffers")
        self.segments.append([])
        self.log(("barrier",))

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: MTLSize, threads: MTLSize) -> None:
        self.check()
        pipeline = self._pipeline
        require(pipeline is not None, "a dispatch without a pipeline state")
        assert pipeline is not None
        bound = arguments(pipeline, self._buffers, groups, threads)
        self.segments[-1].append(Dispatch(pipeline, bound, groups, threads, len(self.signposts)))
        self.log(("dispatch", pipeline.function.name))

    def useResources_count_usage_(self, resources: Sequence[Buffer], count: int, usage: int) -> None:
        self.check()
        require(count == len(resources) > 0 and 0 < usage <= 3, f"{count} of {len(resources)} resources, usage {usage}")
        self.used |= set(resources)

    def executeCommandsInBuffer_withRange_(self, commands: IndirectCommandBuffer, where: tuple[int, int]) -> None:
        self.check()
        begin, count = where
        size = commands.size()
        require(begin >= 0 and 0 < count <= size - begin, f"commands {where} of an indirect buffer of {size}")
        self.segments[-1].append(Execute(commands, begin, count, len(self.signposts)))
        for command in commands.commands[begin : begin + count]:
            if command.barrier:
                self.log(("barrier",))
            self.log(("dispatch", command.checked()[0].function.name))


class BlitEncoder(Encoder):
    """Copies run in order, because Metal sees the memory of each."""

    def __init__(self, owner: CommandBuffer):
        super().__init__(owner)
        owner.device.log.append(("blit",))

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: Buffer, start: int, to: Buffer, at: int, size: int
    ) -> None:
        self.check()
        require(size > 0 and (start | at | size) % ALIGNMENT == 0, f"a copy of {size} bytes from {start} to {at}")
        require(start + size <= source.length() and at + size <= to.length(), "a copy past the end of a buffer")

        def copy() -> None:
            to.memory[at : at + size] = source.memory[start : start + size].copy()

        self.segments.append([copy])
