"""Entry points on a GPU: a run is one command buffer, encoded from a list that is prepared when memory is bound."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npu_compiler.artifact.program import EntryPoint
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.simt.lang import program as simt

from ...gpu_entry import STEPWISE, GPUEntry
from ..base import DeviceBuffer, Launch
from .buffers import MetalBuffer, allocate
from .device import frameworks
from .hazards import Range, barriers
from .library import Code

if TYPE_CHECKING:
    from .backend import MetalBackend

_ALIGNMENT = 16  # bytes: kernels load vectors of this size


class Step(NamedTuple):
    """A dispatch. ``bindings``: (MTLBuffer, offset, index) of all arguments; ``changed``: of those that differ from the
    previous dispatch's. ``pipeline`` is repeated, and set only if ``switch``."""

    number: int
    barrier: bool
    switch: bool
    pipeline: Any
    changed: tuple[tuple[Any, int, int], ...]
    bindings: tuple[tuple[Any, int, int], ...]
    groups: Any
    threads: Any


class MetalEntry(GPUEntry["MetalBackend"]):
    """An entry point with its arena."""

    def __init__(self, backend: MetalBackend, code: Code, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]):
        super().__init__(backend, code.program, code.entries, entry, fixed)
        self._code = code
        arena = allocate(backend.mtl, entry.arena_bytes, self._arena_name)
        self._arena = MetalBuffer(backend, arena, (entry.arena_bytes,), _BYTE)
        self._bad = allocate(backend.mtl, 4 * len(self._launches), self._arena_name)
        fixed_memory = {id(m): m for m in (b.memory for b in fixed.values() if isinstance(b, MetalBuffer))}
        memories = [self._arena.memory, self._bad, *fixed_memory.values()]
        backend.residency.add(memories)
        weakref.finalize(self, backend.residency.remove, memories).atexit = False

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        steps = self._steps({**self._fixed, **buffers})
        backend, what, held = self._backend, self._what, tuple(buffers.values())
        stepwise, scope = env.debug() >= STEPWISE, frameworks().MTLBarrierScopeBuffers

        def encode(encoder: Any) -> None:
            set_pipeline, set_buffer = encoder.setComputePipelineState_, encoder.setBuffer_offset_atIndex_
            barrier, dispatch = encoder.memoryBarrierWithScope_, encoder.dispatchThreadgroups_threadsPerThreadgroup_
            for _, waits, switch, pipeline, changed, _, groups, threads in steps:
                if waits:
                    barrier(scope)
                if switch:
                    set_pipeline(pipeline)
                for buffer, offset, index in changed:
                    set_buffer(buffer, offset, index)
                dispatch(groups, threads)

        def launch(times: np.ndarray | None, _keep_alive: Any = held) -> int:
            backend.start_capture()
            if times is not None:
                self._timed(steps, times)
            elif stepwise:
                self._one_by_one(steps)
            elif steps:
                backend.commands.encode(what, encode)
            return 0

        return launch

    def _steps(self, memory: Mapping[int, DeviceBuffer]) -> list[Step]:
        """Return the dispatches of a run on ``memory``, by buffer id."""
        metal, places = frameworks(), {id: self._placed(id, b) for id, b in memory.items()}
        numbers = [n for n, x in enumerate(self._launches) if x.workgroups]
        ranges = {id: self._range(id, places) for id in self._specs if self._specs[id].kind == "arena" or id in places}
        calls = [self._entry.calls[n] for n in numbers]
        waits = barriers(
            ([ranges[id] for id in c.inputs if id in ranges], [ranges[id] for id in c.outputs if id in ranges])
            for c in calls
        )
        places[simt.ARENA] = self._arena
        steps: list[Step] = []
        bound: dict[int, tuple[Any, int, int]] = {}
        last = None
        for number, barrier in zip(numbers, waits, strict=True):
            x = self._launches[number]
            arguments = [(places[id].native_handle, places[id].offset + at) for id, at in x.arguments]
            if x.checks:
                arguments.append((self._bad.buffer, 4 * number))
            bindings = tuple((buffer, offset, index) for index, (buffer, offset) in enumerate(arguments))
            changed = tuple(b for b in bindings if not _same(bound.get(b[2]), b))
            bound.update((b[2], b) for b in changed)
            pipeline = self._code.pipelines[x.function]
            groups, threads = metal.MTLSize(x.workgroups, 1, 1), metal.MTLSize(x.threads, 1, 1)
            steps.append(Step(number, barrier, pipeline is not last, pipeline, changed, bindings, groups, threads))
            last = pipeline
        return steps

    def _placed(self, id: int, buffer: DeviceBuffer) -> MetalBuffer:
        name = self._specs[id].name
        if not isinstance(buffer, MetalBuffer):
            raise BackendError(f"{name!r}: {buffer!r} is not in Metal memory; allocate it with this backend")
        if (buffer.memory.address + buffer.offset) % _ALIGNMENT or buffer.offset % _ALIGNMENT:
            raise BackendError(f"{name!r}: its memory is not at a multiple of {_ALIGNMENT} bytes")
        return buffer

    def _range(self, id: int, places: Mapping[int, MetalBuffer]) -> Range:
        """Return the memory of a buffer as addresses, because two buffers may lie in the same memory."""
        spec = self._specs[id]
        if spec.kind != "arena":
            begin = places[id].memory.address + places[id].offset
            return begin, begin + places[id].size_bytes
        begin = self._arena.memory.address + spec.offset
        return begin, begin + int(np.prod(spec.shape)) * dtypes.numpy_dtype(spec.dtype).itemsize

    def _one_by_one(self, steps: Sequence[Step]) -> list[Any]:
        """Run each kernel in a command buffer of its own and return these."""
        done = []
        for step in steps:

            def encode(encoder: Any, step: Step = step) -> None:
                encoder.setComputePipelineState_(step.pipeline)
                for buffer, offset, index in step.bindings:
                    encoder.setBuffer_offset_atIndex_(buffer, offset, index)
                encoder.dispatchThreadgroups_threadsPerThreadgroup_(step.groups, step.threads)

            call, function = self._entry.calls[step.number], self._launches[step.number].function
            name = f"kernel {call.name} ({function}) of program {self._code.program.name!r}"
            done.append(self._backend.commands.encode(name, encode))
            self._backend.commands.wait()
        return done

    def _timed(self, steps: Sequence[Step], times: np.ndarray) -> None:
        """Run the kernels one by one, and store the GPU's time after each in seconds; times[0] is 0."""
        spans = np.zeros(len(self._launches))
        for step, buffer in zip(steps, self._one_by_one(steps), strict=True):
            spans[step.number] = buffer.GPUEndTime() - buffer.GPUStartTime()
        times[0] = 0
        np.cumsum(spans, out=times[1:])

    def failed(self) -> int:
        bad = self._bad.array(0, (len(self._launches),), np.dtype(np.int32))
        if not bad.any():
            return 0
        first = int(np.flatnonzero(bad)[0])
        bad.fill(0)
        return 1 + first

    def arena_buffer(self, id: int) -> MetalBuffer:
        spec = self._specs[id]
        dtype = dtypes.numpy_dtype(spec.dtype)
        return MetalBuffer(self._backend, self._arena.memory, spec.shape, dtype, offset=spec.offset)


_BYTE = np.dtype(np.uint8)


def _same(a: tuple[Any, int, int] | None, b: tuple[Any, int, int]) -> bool:
    return a is not None and a[0] is b[0] and a[1] == b[1]
