"""Entry points on a GPU: a run is one command buffer, whose commands are encoded by the first run on its memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import EntryPoint
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.simt.lang import program as simt

from ...gpu_entry import STEPWISE, GPUEntry
from ..base import DeviceBuffer, Launch, status_of
from . import indirect
from .buffers import MetalBuffer, allocate
from .commands import Pass, Work
from .device import frameworks
from .hazards import Range, barriers
from .indirect import IndirectCommands
from .library import Code
from .steps import Step, encode_step, list_encoder
from .timestamps import MAX_KERNELS

if TYPE_CHECKING:
    from .backend import MetalBackend

_log = logging.getLogger(__name__)

_SPARE = 4  # the most indirect command buffers that an entry point keeps for its next binding


class _Recording:
    """Indirect commands that a run is bound to. When the run is gone and the GPU has finished, they are kept for the
    next binding, which encodes only the commands whose memory is another."""

    def __init__(self, commands: IndirectCommands, spare: list[IndirectCommands]):
        weakref.finalize(self, _keep, commands, spare).atexit = False


def _keep(commands: IndirectCommands, spare: list[IndirectCommands]) -> None:
    if len(spare) < _SPARE:
        commands.release()
        spare.append(commands)


class MetalEntry(GPUEntry["MetalBackend"]):
    """An entry point with its arena. ``obstacle``: why a run is not an indirect command buffer but is encoded again
    each time; None: it is one."""

    def __init__(self, backend: MetalBackend, code: Code, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]):
        super().__init__(backend, code.program, code.entries, entry, fixed)
        self._code = code
        arena = allocate(backend.mtl, entry.arena_bytes, self._arena_name)
        self._arena = MetalBuffer(backend, arena, (entry.arena_bytes,), _BYTE)
        self._bad = allocate(backend.mtl, 8 * len(self._launches), self._arena_name)
        fixed_memory = {id(m): m for m in (b.memory for b in fixed.values() if isinstance(b, MetalBuffer))}
        self._memories = [self._arena.memory, self._bad, *fixed_memory.values()]
        backend.residency.add(self._memories)
        weakref.finalize(self, backend.residency.remove, self._memories).atexit = False
        self.obstacle = indirect.obstacle(backend.mtl, self._launches, code.pipelines)
        self._spare: list[IndirectCommands] = []
        if self.obstacle is not None:
            _log.debug("%s is encoded for each run: %s", entry.name, self.obstacle)

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        steps = self._steps({**self._fixed, **buffers}, buffers.keys())
        backend, stepwise = self._backend, env.debug() >= STEPWISE
        work = cache(partial(self._work, steps, tuple(buffers.values())))  # many bindings of a model are never run

        def launch(times: np.ndarray | None) -> int:
            backend.start_capture()
            if times is not None:
                self._timed(steps, times)
            elif stepwise:
                self._one_by_one(steps)
            elif steps:
                backend.commands.launch(work())
            return 0

        return launch

    def _work(self, steps: Sequence[Step], bound: Sequence[DeviceBuffer]) -> Work:
        """Return a run: one encoder with an indirect command buffer, or with a list of dispatches."""
        recording = self._recorded(steps)
        if recording is None:
            encode, held = list_encoder(steps), None
        else:
            commands, held = recording
            encode = commands.encoder(self._listed(steps))
        first, last = steps[0].name, steps[-1].name
        kernels = f"kernels {first} to {last}" if first != last else f"kernel {first}"
        repeat, passes = partial(self._one_by_one, steps), (Pass(self._what, encode),)
        return Work(self._what, passes, (self, bound, held), kernels, repeat, self._clear)

    def _clear(self) -> None:
        """Make the arena as it was before the first run: counters between workgroups are zero when a kernel begins,
        and a kernel that has not finished leaves other values."""
        self._arena.whole.fill(0)

    def _recorded(self, steps: Sequence[Step]) -> tuple[IndirectCommands, _Recording] | None:
        """Return indirect commands for ``steps``, and the object by which they are in use; None if there can be
        none."""
        if self.obstacle is not None:
            return None
        try:
            commands: IndirectCommands | None = self._spare.pop()
        except IndexError:
            commands = IndirectCommands.create(self._backend.mtl, steps)
        if commands is None:
            return None
        commands.encode(steps)
        return commands, _Recording(commands, self._spare)

    def _listed(self, steps: Sequence[Step]) -> list[Any]:
        """Return the Metal buffers that a run has to list because no residency set keeps them mapped."""
        mapped = {id(m.buffer) for m in self._memories} if self._backend.residency.exists else set()
        used = {id(b): b for s in steps for b, _, _ in s.bindings}
        return [b for key, b in used.items() if key not in mapped]

    def _steps(self, memory: Mapping[int, DeviceBuffer], bound: Iterable[int]) -> list[Step]:
        """Return the dispatches of a run on ``memory``, by buffer id; ``bound``: those of this binding."""
        metal, places = frameworks(), {id: self._placed(id, b) for id, b in memory.items()}
        numbers = [n for n, x in enumerate(self._launches) if x.workgroups]
        ranges = {id: self._range(id, places) for id in self._specs if self._specs[id].kind == "arena" or id in places}
        calls = [self._entry.calls[n] for n in numbers]
        waits = barriers(
            ([ranges[id] for id in c.inputs if id in ranges], [ranges[id] for id in c.outputs if id in ranges])
            for c in calls
        )
        places[simt.ARENA] = self._arena
        changing = set(bound)
        steps: list[Step] = []
        for number, barrier in zip(numbers, waits, strict=True):
            x = self._launches[number]
            arguments = [(places[id].native_handle, places[id].offset + at) for id, at in x.arguments]
            if x.checks:
                arguments.append((self._bad.buffer, 8 * number))
            steps.append(
                Step(
                    number=number,
                    name=f"{self._entry.calls[number].name} ({x.function})",
                    barrier=barrier,
                    pipeline=self._code.pipelines[x.function],
                    bindings=tuple((buffer, offset, index) for index, (buffer, offset) in enumerate(arguments)),
                    bound=any(id in changing for id, _ in x.arguments),
                    groups=metal.MTLSize(x.workgroups, 1, 1),
                    threads=metal.MTLSize(x.threads, 1, 1),
                )
            )
        return steps

    def _placed(self, id: int, buffer: DeviceBuffer) -> MetalBuffer:
        name = self._specs[id].name
        if not isinstance(buffer, MetalBuffer):
            raise BackendError(f"{name!r}: {buffer!r} is not in Metal memory; allocate it with this backend")
        if not self._backend.aligned(buffer):
            raise BackendError(f"{name!r}: its memory is not at a multiple of 16 bytes")
        return buffer

    def _range(self, id: int, places: Mapping[int, MetalBuffer]) -> Range:
        """Return the memory of a buffer as addresses, because two buffers may lie in the same memory."""
        spec = self._specs[id]
        if spec.kind != "arena":
            begin = places[id].memory.address + places[id].offset
            return begin, begin + places[id].size_bytes
        begin = self._arena.memory.address + spec.offset
        return begin, begin + int(np.prod(spec.shape)) * dtypes.numpy_dtype(spec.dtype).itemsize

    # -- kernel by kernel ---------------------------------------------------------------------------------------------
    def _one_by_one(self, steps: Sequence[Step]) -> list[Any]:
        """Run each kernel in a command buffer of its own and return these."""
        done = []
        for step in steps:
            alone = self._pass(step)
            done.append(self._backend.commands.launch(Work(alone.label, (alone,), reset=self._clear)))
            self._backend.commands.wait()
        return done

    def _pass(self, step: Step, descriptor: Any = None) -> Pass:
        """Return an encoder for one kernel."""
        label = f"kernel {step.name} of program {self._code.program.name!r}"
        return Pass(label, partial(encode_step, step), descriptor)

    def _timed(self, steps: Sequence[Step], times: np.ndarray) -> None:
        """Run the kernels one after the other, and store the GPU's time after each in seconds; times[0] is 0."""
        spans = np.zeros(len(self._launches))
        for step, seconds in zip(steps, self._seconds(steps), strict=True):
            spans[step.number] = seconds
        times[0] = 0
        np.cumsum(spans, out=times[1:])

    def _seconds(self, steps: Sequence[Step]) -> Iterator[float]:
        """Run the kernels and return the time of each: by the GPU's clock where an encoder begins and ends, or from
        command buffers if it has no such samples."""
        clock, commands = self._backend.timestamps, self._backend.commands
        for begin in range(0, len(steps), MAX_KERNELS):
            part = steps[begin : begin + MAX_KERNELS]
            spans = None
            if clock is not None:
                with commands.lock:  # the sample buffer is the backend's
                    passes = [self._pass(s, clock.descriptor(n)) for n, s in enumerate(part)]
                    commands.launch(Work(self._what, tuple(passes), reset=self._clear))
                    commands.wait()
                    spans = clock.seconds(len(part))
            if spans is None:
                yield from (b.GPUEndTime() - b.GPUStartTime() for b in self._one_by_one(part))
            else:
                yield from spans.tolist()

    def failed(self) -> int:
        return status_of(self._bad.array(0, (len(self._launches), 2), np.dtype(np.int32)))

    def arena_buffer(self, id: int) -> MetalBuffer:
        spec = self._specs[id]
        dtype = dtypes.numpy_dtype(spec.dtype)
        return MetalBuffer(self._backend, self._arena.memory, spec.shape, dtype, offset=spec.offset)


_BYTE = np.dtype(np.uint8)
