"""Indirect command buffers: the dispatches of a run are encoded once, and each run executes all of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from npu_compiler.support import env
from npu_compiler.targets.simt.lang.program import Launch

from .device import frameworks
from .steps import Step

# Source: Apple's Metal Feature Set Tables, and the documentation of MTLIndirectCommandBufferDescriptor.
_MAX_COMMANDS = 16384
_MAX_BUFFERS = 31


def available(device: Any) -> bool:
    """Whether pipeline states are made for indirect command buffers: macOS has them, and ``NPU_METAL_INDIRECT`` does
    not switch them off."""
    return env.metal_indirect() and hasattr(device, "newIndirectCommandBufferWithDescriptor_maxCommandCount_options_")


def obstacle(device: Any, launches: Sequence[Launch], pipelines: Mapping[str, Any]) -> str | None:
    """Return why an indirect command buffer cannot hold ``launches``, or None."""
    if not available(device):
        return "macOS has no indirect command buffers, or NPU_METAL_INDIRECT=0"
    dispatches = [x for x in launches if x.workgroups]
    if len(dispatches) > _MAX_COMMANDS:
        return f"it has {len(dispatches)} kernels; an indirect command buffer takes {_MAX_COMMANDS}"
    for x in dispatches:
        if len(x.arguments) + x.checks > _MAX_BUFFERS:
            return f"{x.function} has {len(x.arguments) + x.checks} arguments; a command takes {_MAX_BUFFERS}"
        if not pipelines[x.function].supportIndirectCommandBuffers():
            return f"{x.function} cannot be a command of an indirect command buffer"
    return None


class IndirectCommands:
    """An indirect command buffer for the steps of an entry point. It may be encoded again when no run uses it."""

    def __init__(self, buffer: Any, count: int):
        self._buffer, self._count = buffer, count
        self._encoded: list[Step | None] = [None] * count

    @classmethod
    def create(cls, device: Any, steps: Sequence[Step]) -> IndirectCommands | None:
        """Return one with room for ``steps``; None if the GPU has no memory for it."""
        metal = frameworks()
        descriptor = metal.MTLIndirectCommandBufferDescriptor.alloc().init()
        descriptor.setCommandTypes_(metal.MTLIndirectCommandTypeConcurrentDispatch)
        descriptor.setInheritPipelineState_(False)
        descriptor.setInheritBuffers_(False)
        descriptor.setMaxKernelBufferBindCount_(max(len(s.bindings) for s in steps))
        buffer = device.newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(
            descriptor, len(steps), metal.MTLResourceStorageModeShared
        )
        return None if buffer is None else cls(buffer, len(steps))

    def encode(self, steps: Sequence[Step]) -> int:
        """Encode the steps that are not encoded already. Return how many these were."""
        changed = [n for n, s in enumerate(steps) if self._encoded[n] is not s and self._encoded[n] != s]
        for n in changed:
            self._encode(self._buffer.indirectComputeCommandAtIndex_(n), steps[n])
            self._encoded[n] = steps[n]
        return len(changed)

    def release(self) -> None:
        """Forget the commands that use memory of a run, so that it can be freed."""
        self._encoded = [s if s is not None and not s.bound else None for s in self._encoded]

    def encoder(self, resources: Iterable[Any]) -> Callable[[Any], None]:
        """Return a function that encodes a run. ``resources``: the Metal buffers that the commands use, except those
        that a residency set keeps mapped."""
        listed, buffer, everything = list(resources), self._buffer, (0, self._count)
        metal = frameworks()
        usage = metal.MTLResourceUsageRead | metal.MTLResourceUsageWrite

        def encode(encoder: Any) -> None:
            if listed:
                encoder.useResources_count_usage_(listed, len(listed), usage)
            encoder.executeCommandsInBuffer_withRange_(buffer, everything)

        return encode

    @staticmethod
    def _encode(command: Any, step: Step) -> None:
        command.reset()
        command.setComputePipelineState_(step.pipeline)
        for buffer, offset, index in step.bindings:
            command.setKernelBuffer_offset_atIndex_(buffer, offset, index)
        if step.barrier:
            command.setBarrier()
        else:
            command.clearBarrier()
        command.concurrentDispatchThreadgroups_threadsPerThreadgroup_(step.groups, step.threads)
