"""Indirect command buffers. Like Metal's, they do not keep alive what their commands use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .faults import require
from .names import CONSTANTS, MAX_BUFFERS, SHARED
from .resources import Buffer, Pipeline
from .validation import MTLSize, arguments, check_offset

if TYPE_CHECKING:
    from .descriptors import MTLIndirectCommandBufferDescriptor

MAX_COMMANDS = 16384
Checked = tuple[Pipeline, dict[int, tuple[Buffer, int]], MTLSize, MTLSize]


class IndirectCommandBuffer:
    """``in_flight``: the command buffers that are committed and will execute it. ``encoded``: how often its commands
    were encoded."""

    def __init__(self, descriptor: MTLIndirectCommandBufferDescriptor, count: int, options: int):
        require(0 < count <= MAX_COMMANDS, f"an indirect command buffer of {count} commands")
        require(options == SHARED, "the CPU encodes the commands, so their memory is shared")
        require(
            descriptor.types == CONSTANTS["MTLIndirectCommandTypeConcurrentDispatch"],
            "the runtime's commands are concurrent dispatches",
        )
        require(0 < descriptor.buffers <= MAX_BUFFERS, f"commands with {descriptor.buffers} buffers")
        require(not descriptor.pipeline_inherited and not descriptor.buffers_inherited, "commands inherit nothing")
        self.buffers, self.in_flight, self.encoded = descriptor.buffers, 0, 0
        self.commands = [IndirectComputeCommand(self) for _ in range(count)]

    def size(self) -> int:
        return len(self.commands)

    def indirectComputeCommandAtIndex_(self, index: int) -> IndirectComputeCommand:
        require(0 <= index < len(self.commands), f"command {index} of {len(self.commands)}")
        return self.commands[index]


class IndirectComputeCommand:
    def __init__(self, owner: IndirectCommandBuffer):
        self._owner = weakref.ref(owner)
        self._clear()

    def _clear(self) -> None:
        self.barrier = False
        self._pipeline: weakref.ref[Pipeline] | None = None
        self._buffers: dict[int, tuple[weakref.ref[Buffer], int]] = {}
        self._grid: tuple[MTLSize, MTLSize] | None = None

    def _change(self) -> IndirectCommandBuffer:
        owner = self._owner()
        require(owner is not None, "the indirect command buffer was freed")
        assert owner is not None
        require(not owner.in_flight, "a command changes while the GPU may execute it")
        return owner

    def reset(self) -> None:
        self._change()
        self._clear()

    def setComputePipelineState_(self, pipeline: Pipeline) -> None:
        self._change()
        require(pipeline.supportIndirectCommandBuffers(), f"{pipeline.label} is not for indirect command buffers")
        self._pipeline = weakref.ref(pipeline)

    def setKernelBuffer_offset_atIndex_(self, buffer: Buffer, offset: int, index: int) -> None:
        check_offset(buffer, offset, index, self._change().buffers)
        self._buffers[index] = weakref.ref(buffer), offset

    def setBarrier(self) -> None:
        self._change()
        self.barrier = True

    def clearBarrier(self) -> None:
        self._change()
        self.barrier = False

    def concurrentDispatchThreadgroups_threadsPerThreadgroup_(self, groups: MTLSize, threads: MTLSize) -> None:
        owner = self._change()
        self._grid = groups, threads
        self.checked()
        owner.encoded += 1

    def checked(self) -> Checked:
        """What the command dispatches: its pipeline, buffers by index, and grid."""
        pipeline = None if self._pipeline is None else self._pipeline()
        require(pipeline is not None and self._grid is not None, "an indirect command that is not encoded")
        assert pipeline is not None and self._grid is not None
        buffers = {n: (found, offset) for n, (ref, offset) in self._buffers.items() if (found := ref()) is not None}
        require(buffers.keys() == self._buffers.keys(), f"{pipeline.label}: a buffer of an indirect command was freed")
        return pipeline, arguments(pipeline, buffers, *self._grid), *self._grid
