"""Execution of one entry point of a program. ``__init__`` prepares everything; a run is one native call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, IOSpec
from npu_compiler.support import dtypes
from npu_compiler.support.errors import BackendError, InputError, WeightError
from npu_compiler.support.host_arrays import is_memory_of

from .arguments import Inputs, check_order, host_array, host_input, ordered
from .device import DeviceBuffer, HostLaunch, Launch, LoadedEntry
from .host_run import host_run
from .locks import RunLock, reentered
from .profiler import EntryProfile, measure
from .registry import get_backend
from .state import State
from .weight_loader import TakesWeights, WeightStore, load_weights

if TYPE_CHECKING:
    from .backends.base import Backend


class BoundRun:
    """A run with fixed inputs and outputs. A call reads the inputs and overwrites the outputs; it allocates nothing."""

    def __init__(self, executor: Executor, launch: Launch, copies: Sequence[tuple[DeviceBuffer, DeviceBuffer]]):
        self._executor, self._launch, self._copies = executor, launch, copies
        self._loaded, self._lock = executor._loaded, executor.state.lock  # load_weights() replaces them

    def __call__(self, times: np.ndarray | None = None) -> None:
        """Run once. ``times``: None, or float64 [len(calls) + 1] that receives the start and each kernel's end in
        seconds."""
        executor, lock = self._executor, self._lock
        with lock.mutex:
            if lock.busy:
                raise reentered()
            try:
                lock.busy = True
                status = self._launch(times)
                if status:
                    raise executor.failure(status)
                for target, source in self._copies:
                    executor.backend.copy(target, source)
            finally:
                lock.busy = False

    def finish(self) -> None:
        """Wait for the end of the run. Raises the error that it reports."""
        self._executor.backend.synchronize()
        status = self._loaded.failed()
        if status:
            raise self._executor.failure(status)


@dataclass
class _Own:
    """An entry point's own inputs and outputs for single runs, and the run that is bound to them."""

    inputs: Sequence[DeviceBuffer]
    outputs: Sequence[DeviceBuffer]
    run: BoundRun
    lock: RunLock = field(default_factory=RunLock)


class Executor(TakesWeights):
    """One entry point, ready to run. Several threads may call it; runs that share state take turns.

    ``weights``: a :class:`WeightStore`, which is shared and not copied, or what :func:`load_weights` takes. Weights may
    also come later, by :meth:`load_weights` or with :meth:`run`. ``entry``: may be omitted if the program has one entry
    point. ``state``: that of another executor, to share it.
    """

    def __init__(
        self,
        program: CompiledProgram,
        weights: Any = None,
        backend: Backend | None = None,
        entry: str | None = None,
        state: State | None = None,
    ):
        check_order(program, weights, backend)
        self.program = program
        self.backend = backend or get_backend(program.target)
        if self.backend.name != program.target:
            raise BackendError(f"program {program.name!r} is for {program.target!r}, not for {self.backend.name!r}")
        self.entry = program.entry(entry)
        self._names, self._output_names = [s.name for s in self.inputs], [s.name for s in self.outputs]
        self._specs = {b.id: b for b in program.buffers}
        self._shared_state = state
        if weights is None and program.weights:
            self._prepare(WeightStore({}, {}), complete=False)
        else:
            self.load_weights(weights)

    def load_weights(self, weights: Any) -> None:
        """Replace the weights and return to the initial state; state that another executor shares stays as it is. Runs
        that are already bound keep the old weights. Raises ``WeightError`` before it changes anything."""
        store = weights if isinstance(weights, WeightStore) else load_weights(self.program, weights, self.backend)
        self._prepare(store)

    def _prepare(self, store: WeightStore, complete: bool = True) -> None:
        """Load the entry point. ``complete``: whether ``store`` has the weights; otherwise they come later."""
        state = State(self.program, self.backend, store.state) if self._shared_state is None else self._shared_state
        if complete:
            fixed = self._fixed_buffers(store, state)
            loaded = self.backend.load_entry(self.program, self.entry, fixed)
        else:
            fixed, loaded = {}, _WithoutWeights(self.program)
        self.weights, self.state, self._fixed, self._loaded = store, state, fixed, loaded
        self._taken = None
        self._own = self._own_run()
        self._host_run = host_run(self) if self._own is None else None

    def __reduce__(self) -> tuple[Any, ...]:
        weights = None if isinstance(self._loaded, _WithoutWeights) else self.weights
        shares = self._shared_state is not None
        return _restored, (self.program, weights, self.backend, self.entry.name, self.state, shares)

    @property
    def inputs(self) -> tuple[IOSpec, ...]:
        """The entry point's inputs, in order."""
        return self.entry.inputs

    @property
    def outputs(self) -> tuple[IOSpec, ...]:
        """The entry point's outputs, in order."""
        return self.entry.outputs

    def _fixed_buffers(self, weights: WeightStore, state: State) -> dict[int, DeviceBuffer]:
        """Return the buffers that are the same in every run: weights, state, and outputs that are not among
        ``outputs``."""
        used = {id for call in self.entry.calls for id in (*call.inputs, *call.outputs)}
        used |= {o.buffer for o in self.outputs} | {id for _, id in self.entry.updates}
        asked = {o.buffer for o in self.outputs}
        fixed: dict[int, DeviceBuffer] = {}
        for id in sorted(used):
            b = self._specs[id]
            if b.constant:
                fixed[id] = _weight(weights, b.name, b.shape, b.dtype)
            elif b.kind == "state":
                fixed[id] = state[b.name]
            elif b.kind == "output" and id not in asked:
                fixed[id] = self.backend.allocate_empty(b.shape, dtypes.numpy_dtype(b.dtype))
        return fixed

    def _own_run(self) -> _Own | None:
        """Return a run that is bound once, if the device has inputs and outputs of its own."""
        io = self._loaded.io()
        if io is None:
            return None
        inputs = [io[s.buffer] for s in self.inputs]
        outputs = [
            io[s.buffer]
            if s.buffer in io and self._specs[s.buffer].kind == "output"
            else self.backend.allocate_empty(s.shape, dtypes.numpy_dtype(s.dtype))
            for s in self.outputs
        ]
        return _Own(inputs, outputs, self._bind(inputs, outputs))

    # -- running ----------------------------------------------------------------------------------------------------
    def run(self, inputs: Inputs, weights: Any = None) -> dict[str, np.ndarray]:
        """Run once and return the outputs by name, in new arrays.

        ``inputs``: numpy arrays, torch tensors or DeviceBuffers, by name or in order. Shapes must be exact. Dtypes must
        be exact too, except that a float or integer type is widened if that keeps every value (float16 to float32,
        int32 to int64). ``weights``: passed to :meth:`load_weights` first, unless the previous run had the same object.

        Raises ``InputError`` with the tensor's name, what it is and what was expected.
        """
        if weights is not None:
            self.take_weights(weights)
        return dict(zip(self._output_names, self.run_ordered(self._ordered(inputs)), strict=True))

    def run_ordered(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """Run once with all inputs in order; return the outputs in order. See :meth:`run`."""
        if self._host_run is not None:
            return self._host_run(inputs)
        return [buffer.to_numpy(copy=False) for buffer in self._run_device(inputs)]

    def run_device(self, inputs: Inputs, times: np.ndarray | None = None) -> dict[str, DeviceBuffer]:
        """Run once and leave the outputs in device memory. See :meth:`run`; ``times``: see :class:`BoundRun`."""
        return dict(zip(self._output_names, self._run_device(self._ordered(inputs), times), strict=True))

    def _run_device(self, inputs: Sequence[Any], times: np.ndarray | None = None) -> list[DeviceBuffer]:
        given = [self._input(spec, value) for spec, value in zip(self.inputs, inputs, strict=True)]
        outputs = [self.backend.allocate_result(o.shape, dtypes.numpy_dtype(o.dtype)) for o in self.outputs]
        if self._own is None:
            run = self._bind(given, outputs)
            run(times)
            run.finish()
        else:
            self._run_own(self._own, given, outputs, times)
        return outputs

    def _run_own(
        self, own: _Own, inputs: Sequence[DeviceBuffer], outputs: Sequence[DeviceBuffer], times: np.ndarray | None
    ) -> None:
        """Run in the entry point's own inputs and outputs; callers take turns."""
        with own.lock.held():
            for target, source in zip(own.inputs, inputs, strict=True):
                self.backend.copy(target, source)
            own.run(times)
            for target, source in zip(outputs, own.outputs, strict=True):
                self.backend.copy(target, source)
            own.run.finish()

    def run_into(self, inputs: Inputs, outputs: Inputs) -> None:
        """Run once and write the results into ``outputs``, which must be as for :meth:`bind`."""
        run = self.bind(inputs, outputs)
        run()
        run.finish()

    def bind(self, inputs: Inputs, outputs: Inputs) -> BoundRun:
        """Fix the memory of inputs and outputs for many runs.

        All must be DeviceBuffers, or C-contiguous arrays in memory that the device computes in, of the exact shape and
        dtype, where :meth:`Backend.aligned` holds. Outputs must be writable and must not overlap anything else. Raises
        ``InputError``.
        """
        given = [self._exact(s, v, "input") for s, v in zip(self.inputs, self._ordered(inputs), strict=True)]
        targets = ordered(self.outputs, outputs, "output")
        results = [self._exact(s, v, "output") for s, v in zip(self.outputs, targets, strict=True)]
        everything = [*results, *given]
        for io, buffer in zip((*self.outputs, *self.inputs), everything, strict=True):
            if not self.backend.aligned(buffer):
                raise InputError(f"{io.name!r}: its memory is not at a multiple of 16 bytes; bind a copy of it")
        for at, spec in enumerate(self.outputs):
            if not everything[at].writeable:
                raise InputError(f"output {spec.name!r}: the array is read-only")
            if any(everything[at].shares_memory(other) for other in everything[at + 1 :]):
                raise InputError(f"output {spec.name!r}: its memory overlaps with another output or an input")
        return self._bind(given, results)

    def _bind(self, inputs: Sequence[DeviceBuffer], outputs: Sequence[DeviceBuffer]) -> BoundRun:
        """Bind the launch and the copies after it: first of outputs that are not output buffers, then of states that
        are not updated in place."""
        buffers = {spec.buffer: buffer for spec, buffer in zip(self.inputs, inputs, strict=True)}
        aside: list[tuple[DeviceBuffer, int]] = []
        for spec, buffer in zip(self.outputs, outputs, strict=True):
            if self._specs[spec.buffer].kind == "output" and spec.buffer not in buffers:
                buffers[spec.buffer] = buffer
            else:
                aside.append((buffer, spec.buffer))
        copies = [(target, self.source(buffers, id)) for target, id in aside]
        return BoundRun(self, self._loaded.bind(buffers), copies + self.moves(buffers))

    def host_launch(self, arrays: Mapping[int, np.ndarray]) -> HostLaunch | None:
        """Return a launch with these inputs and outputs, by buffer id, or None if the device does not compute in the
        host's memory."""
        if not self.backend.shares_host:
            return None
        return self._loaded.bind_host({id: self.backend.wrap(array) for id, array in arrays.items()})

    def moves(self, buffers: Mapping[int, DeviceBuffer]) -> list[tuple[DeviceBuffer, DeviceBuffer]]:
        """Return (target, source) of the copies that update states after a run, in order. ``buffers``: see
        :meth:`source`."""
        moves = [(self.state[key], self.source(buffers, id)) for key, id in self.entry.updates]
        moves = [(target, source) for target, source in moves if target is not source]
        targets = [target for target, _ in moves]
        first: list[tuple[DeviceBuffer, DeviceBuffer]] = []
        for at, (target, source) in enumerate(moves):
            if any(source is t for t in targets):  # states may be swapped: all are read before any is written
                spare = self.backend.allocate_empty(target.shape, target.dtype)
                first.append((spare, source))
                moves[at] = (target, spare)
        return first + moves

    def source(self, buffers: Mapping[int, DeviceBuffer], id: int) -> DeviceBuffer:
        """Return the memory of buffer ``id`` after a run whose inputs and outputs are ``buffers``, by id."""
        found = buffers.get(id) or self._fixed.get(id)
        return self._loaded.arena_buffer(id) if found is None else found

    def kind(self, id: int) -> str:
        """Return the kind of buffer ``id``; see :class:`BufferSpec`."""
        return self._specs[id].kind

    # -- checking inputs --------------------------------------------------------------------------------------------
    def _ordered(self, inputs: Inputs) -> Sequence[Any]:
        if isinstance(inputs, list | tuple) and len(inputs) == len(self._names):
            return inputs
        return ordered(self.inputs, inputs, "input")

    def host_value(self, at: int, value: Any) -> np.ndarray:
        """Return input number ``at`` as an array of its shape, in a dtype that can be widened to its own."""
        spec, adopted = self.inputs[at], self.backend.adopt(value)
        if adopted is not None:
            return self._exact(spec, adopted, "input").to_numpy(copy=False)
        return host_input(spec, value)

    def _input(self, spec: IOSpec, value: Any) -> DeviceBuffer:
        adopted = self.backend.adopt(value)
        if adopted is not None:
            buffer = self._exact(spec, adopted, "input")
        else:
            array, wanted = host_input(spec, value), dtypes.numpy_dtype(spec.dtype)
            if array.dtype != wanted or not (array.flags.c_contiguous and array.flags.aligned):
                array = array.astype(wanted, order="C", copy=True)
            buffer = self.backend.wrap(array)
        if self.backend.aligned(buffer):
            return buffer
        copy = self.backend.allocate_empty(buffer.shape, buffer.dtype)
        self.backend.copy(copy, buffer)
        return copy

    def _exact(self, spec: IOSpec, value: Any, what: str) -> DeviceBuffer:
        """Return ``value`` without a copy. Raises ``InputError`` if a copy would be needed."""
        value = self.backend.adopt(value) or value
        if isinstance(value, np.ndarray) and not value.dtype.isnative:
            raise InputError(
                f"{what} {spec.name!r}: dtype {value.dtype} has another byte order than this machine; "
                f"convert it with .astype({spec.dtype!r}), or call run(), which does"
            )
        if isinstance(value, DeviceBuffer):
            padded = value.shape != value.alloc_shape
            if value.shape != spec.shape or value.dtype != dtypes.numpy_dtype(spec.dtype) or padded:
                got = f"{value.dtype}{list(value.shape)}" + (f" padded to {list(value.alloc_shape)}" if padded else "")
                raise InputError(f"{what} {spec.name!r}: got {got}, expected {spec.dtype}{list(spec.shape)}")
            return value
        array = host_array(spec, value, what)
        if array.dtype != dtypes.numpy_dtype(spec.dtype):
            raise InputError(f"{what} {spec.name!r}: dtype {array.dtype}, expected exactly {spec.dtype}")
        if not (array.flags.c_contiguous and array.flags.aligned):
            raise InputError(f"{what} {spec.name!r}: the array is not C-contiguous")
        if not is_memory_of(array, value):
            raise InputError(
                f"{what} {spec.name!r}: only a copy of this {type(value).__name__} can be used; bind a numpy array or "
                "a torch tensor in the host's memory, or call run()"
            )
        if not self.backend.shares_host:
            raise InputError(
                f"{what} {spec.name!r}: the array is in the host's memory, where the {self.backend.name} device does "
                "not compute; bind buffers of the backend (allocate_buffer), or call run()"
            )
        return self.backend.wrap(array)

    def failure(self, status: int) -> Exception:
        """Return the error for the status of a launch."""
        calls = self.entry.calls
        if not 1 <= status <= 2 * len(calls):
            return BackendError(f"program {self.program.name!r} failed with status {status}")
        by_zero, number = divmod(status - 1, len(calls))
        call = calls[number]
        where = f"in kernel {call.name!r}, which computes {', '.join(call.sources) or call.kind}"
        if by_zero:
            return InputError(f"an integer is divided by zero {where}; check the integer inputs that are divisors")
        return InputError(f"an index is out of range {where}; check the integer inputs (token ids, positions)")

    # -- the rest -----------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Return to the initial state."""
        self.state.reset()

    def profile(self, inputs: Inputs | None = None, runs: int = 20, warmup: int = 3) -> EntryProfile:
        """Measure each kernel over ``runs`` runs. Without ``inputs``, inputs are zeros. The state is restored
        afterwards."""
        if inputs is None:
            inputs = [np.zeros(i.shape, dtypes.numpy_dtype(i.dtype)) for i in self.inputs]
        given = [self._input(spec, value) for spec, value in zip(self.inputs, self._ordered(inputs), strict=True)]
        outputs = [self.backend.allocate_result(o.shape, dtypes.numpy_dtype(o.dtype)) for o in self.outputs]
        held = self.state.snapshot()
        try:
            return measure(self.program, self.entry, self._bind(given, outputs), runs, warmup)
        finally:
            for key, value in held.items():
                self.state.write(key, value)


def _restored(
    program: CompiledProgram, weights: WeightStore | None, backend: Backend, entry: str, state: State, shares: bool
) -> Executor:
    """Return a copied executor, with its own ``state`` unless it ``shares`` that of another one."""
    executor = Executor(program, weights, backend, entry, state)
    executor._shared_state = state if shares else None
    return executor


class _WithoutWeights(LoadedEntry):
    """An entry point without weights: it raises ``WeightError``."""

    def __init__(self, program: CompiledProgram):
        self._program = program

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        raise self._missing()

    def arena_buffer(self, id: int) -> DeviceBuffer:
        raise self._missing()

    def _missing(self) -> WeightError:
        needs = f"program {self._program.name!r} needs {len(self._program.weights)} weights"
        return WeightError(f"{needs}: call load_weights(weights), or run(inputs, weights)")


def _weight(store: WeightStore, name: str, shape: Sequence[int], dtype: str) -> DeviceBuffer:
    found = store.get(name)
    if found is None or (found.shape, found.dtype) != (tuple(shape), dtypes.numpy_dtype(dtype)):
        raise WeightError(f"weight buffer {name!r} is not in the given store; load the weights with this program")
    return found
