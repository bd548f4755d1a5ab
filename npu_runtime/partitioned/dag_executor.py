"""Execution of a PartitionPlan: native programs for NPU partitions, PyTorch for the others, transfers between them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph, Key, TensorSpec
from npu_compiler.aten.json_reader import graph_weights_used, leaf_key
from npu_compiler.aten.op_names import is_in_place
from npu_compiler.partitioning.plan import NPU, Partition, PartitionPlan, TransferOp, name_of
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.support.errors import BackendError, InputError, WeightError
from npu_compiler.weights.files import WeightSource, open_weights

from ..arguments import Inputs, host_input, misplaced, ordered
from ..backends.base import Backend, DeviceBuffer, get_backend
from ..executor import Executor
from ..locks import RunLock
from ..state import State
from ..weight_loader import TakesWeights, load_weights, mismatch, read_as
from .fallback import HostPartition, require_torch
from .profile import Clock, PlanProfile, profile_plan

CompileFn = Callable[[IRGraph], CompiledProgram]


class DAGExecutor(TakesWeights):
    """A partitioned model, ready to run. ``__init__`` does all compilation.

    ``compile_fn`` turns the IR of an NPU partition into a program for ``backend``; the default is
    ``npu_compiler.compile`` for the backend's target (``functools.partial`` sets a dtype). ``programs`` has partitions
    that are compiled already, by id. ``weights`` may also come later, by :meth:`load_weights`, which also explains
    ``beside``. Buffers that the model writes keep their contents from run to run. Several threads may call it; runs of
    a model that writes buffers take turns.

    Raises ``CompileError`` (a partition cannot be compiled or bound), ``BackendError``, ``InputError`` (not a plan),
    ``WeightError``.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        backend: str | Backend = "cpu",
        compile_fn: CompileFn | None = None,
        weights: Any = None,
        beside: DAGExecutor | None = None,
        programs: Mapping[int, CompiledProgram] | None = None,
    ):
        if not isinstance(plan, PartitionPlan):
            given = misplaced("(plan, backend, compile_fn, weights)", plan, backend)
            raise InputError(f"{given}; npu_compiler.partition(ir) makes a plan")
        self.plan = plan
        self.backend = get_backend(backend) if isinstance(backend, str) else backend
        if compile_fn is None:
            import npu_compiler

            compile_fn = partial(npu_compiler.compile, target=self.backend.name)
        on_host = [part for part in plan.partitions if part.device != NPU]
        require_torch(plan.ir.model_name, (n for part in on_host for n in part.ir.nodes))
        self.compile_fn = None if programs else compile_fn  # what compiled all partitions
        self.programs: dict[int, CompiledProgram] = dict(programs or {})
        self._hosts: dict[int, HostPartition] = {}
        for part in plan.partitions:
            if part.device == NPU:
                if part.id not in self.programs:
                    self.programs[part.id] = compile_fn(part.ir)
            else:
                self._hosts[part.id] = HostPartition(part.ir)
        # In-place ops that remain after functionalize() may write the caller's arrays.
        self._copy_inputs = bool(self._hosts) and any(is_in_place(n.op_type) for n in plan.ir.nodes)
        self._last = _last_steps(plan)
        self._only = _only_partition(plan, self.programs)
        self._output_names = plan.ir.output_names()
        self._on_host = plan.host_weights()
        self.executors: dict[int, Executor] = {}
        self._loaded = False
        self._kept: dict[str, np.ndarray] = {}  # buffers that host partitions write
        self._weights: MutableMapping[str, np.ndarray] = ChainMap(self._kept)  # of the host; writes go to _kept
        self._initial: dict[str, np.ndarray] = {}  # contents of _kept and _feeds before the first run
        self._feeds: dict[str, np.ndarray | DeviceBuffer] = {}
        self._turns = RunLock()  # held while a run reads and writes the buffers of the model
        if weights is not None or not graph_weights_used(plan.ir):
            self.load_weights({} if weights is None else weights, beside)

    def __getstate__(self) -> dict[str, Any]:
        made = {"plan": self.plan, "backend": self.backend, "programs": self.programs}
        loaded = (self.executors, self._feeds, self._kept, self._weights, self._initial, self._turns)
        return {**made, "loaded": loaded if self._loaded else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DAGExecutor.__init__(self, state["plan"], state["backend"], programs=state["programs"])
        if state["loaded"] is not None:
            self.executors, self._feeds, self._kept, self._weights, self._initial, self._turns = state["loaded"]
            self._loaded = True

    def load_weights(self, weights: Any, beside: DAGExecutor | None = None) -> None:
        """Replace the weights (see :func:`npu_runtime.load_weights`) and reset all buffers to their contents there.

        ``beside``: an executor of the same model for other input shapes, on the same backend and with these weights.
        The two share the weights that both have in the same layout, and the buffers that the model writes, which are
        then not reset.

        Raises ``WeightError`` for a missing tensor or one of another shape, and ``BackendError`` if the two executors
        have their buffers on different devices, before anything is changed.
        """
        source = open_weights(weights)
        host = {key: _read(source, key, spec) for key, spec in self._on_host.items()}
        stores = [] if beside is None else [e.weights for e in beside.executors.values()]
        executors = {}
        for part, program in self.programs.items():
            store = load_weights(program, source, self.backend, stores)
            state = None if beside is None else beside._state_of(program)
            executors[part] = self.backend.create_executor(program, store, state=state)
        kept = {u.key for part in self._hosts.values() for u in part.ir.state}
        feeds = self.plan.feeds.keys()
        if beside is None:
            contents = {**self.plan.ir.constants, **host}
            self._initial = {key: contents[key].copy() for key in (*kept, *feeds)}
            self._kept = {key: self._initial[key].copy() for key in kept}
            self._feeds = {key: self._initial[key].copy() for key in feeds}
        else:
            if missing := sorted((feeds - beside._feeds.keys()) | (kept - beside._kept.keys())):
                raise _kept_elsewhere(missing)
            self._initial, self._kept, self._feeds = beside._initial, beside._kept, beside._feeds
            self._turns = beside._turns
        written = {u.key for u in self.plan.ir.state}
        fixed = {k: v.copy() if k in written or not v.flags.writeable else v for k, v in host.items() if k not in kept}
        self._weights = ChainMap(self._kept, fixed)
        self.executors, self._loaded, self._taken = executors, True, None

    def reset(self) -> None:
        """Return all buffers that the model writes to their initial contents."""
        with self._turns.held():
            for executor in self.executors.values():
                executor.reset()
            for buffers in (self._kept, self._feeds):
                buffers.update({key: self._initial[key].copy() for key in buffers})

    def _state_of(self, program: CompiledProgram) -> State | None:
        """Return the states of ``program``, which computes the same model, or None if it has no states."""
        wanted = {b.name: (b.shape, numpy_dtype(b.dtype)) for b in program.buffers if b.kind == "state"}
        if not wanted:
            return None
        for state in (e.state for e in self.executors.values()):
            if all(k in state and (state[k].shape, state[k].dtype) == spec for k, spec in wanted.items()):
                return state
        raise _kept_elsewhere(sorted(wanted))

    def execute(self, inputs: Inputs, *, weights: Any = None, device_outputs: bool = False) -> dict[str, Any]:
        """Run once. ``inputs``: numpy arrays, torch tensors or device buffers, by name or in the order of
        ``plan.inputs``. Returns the outputs by name, in the order of ``plan.outputs``: new arrays, or with
        ``device_outputs`` device buffers, which can be inputs of the next run without a copy through the host.

        ``weights``: passed to :meth:`load_weights` first, unless the previous run had the same object.

        Raises ``InputError`` with the tensor's name and what was expected, ``WeightError``.
        """
        if weights is not None:
            self.take_weights(weights)
        if not self._loaded:
            raise WeightError("the model has weights; call load_weights(), or execute(inputs, weights=...)")
        values = ordered(self.plan.inputs, inputs, "input")
        if self._only is not None and not device_outputs:
            outputs: Sequence[Any] = self.executors[self._only].run_ordered(values)
        else:
            with self._turns.held() if self.plan.ir.state else nullcontext():
                outputs = self._execute(values, device_outputs)
        return dict(zip(self._output_names, outputs, strict=True))

    def execute_ordered(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """Run once with all inputs in order; return the outputs in order. See :meth:`execute`."""
        if self._only is not None and self._loaded:
            return self.executors[self._only].run_ordered(inputs)
        return list(self.execute(inputs).values())

    __call__ = execute

    def _execute(self, inputs: Sequence[Any], device_outputs: bool) -> list[Any]:
        """Run the plan step by step."""
        run = _Run(self, self._bind(inputs))
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, TransferOp):
                run.move(step)
            else:
                run.partition(step)
            run.forget(self._last.get(number, ()))
        return run.finish(device_outputs)

    def run_steps(self, inputs: Inputs, clock: Clock) -> None:
        """Run once and let ``clock`` time every step; the outputs are dropped."""
        with self._turns.held() if self.plan.ir.state else nullcontext():
            run = _Run(self, self._bind(ordered(self.plan.inputs, inputs, "input")))
            for number, step in enumerate(self.plan.steps):
                marks = clock.begin(number)
                if isinstance(step, TransferOp):
                    run.move(step)
                else:
                    run.partition(step, marks)
                clock.end(number)
                run.forget(self._last.get(number, ()))
            run.finish(device_outputs=False)

    def profile(self, inputs: Inputs, runs: int = 20, warmup: int = 3) -> PlanProfile:
        """Measure every transfer, host op and kernel over ``runs`` runs. The buffers that the model writes are restored
        afterwards. Inputs and errors are those of :meth:`execute`."""
        if not self._loaded:
            raise WeightError("the model has weights; call load_weights() before profile()")
        states = [(e.state, e.state.snapshot()) for e in self.executors.values()]
        feeds, kept = dict(self._feeds), {key: value.copy() for key, value in self._kept.items()}
        try:
            return profile_plan(self, ordered(self.plan.inputs, inputs, "input"), runs, warmup)
        finally:
            self._feeds.update(feeds)
            self._kept.update(kept)
            for state, values in states:
                for key, value in values.items():
                    state.write(key, value)

    def _bind(self, inputs: Sequence[Any]) -> dict[Key, Any]:
        values = zip(self.plan.inputs, inputs, strict=True)
        adopt, copy = self.backend.adopt, self._copy_inputs
        return {(t.name, 0): _input(adopt(value) or value, t, copy) for t, value in values}


class _Run:
    """The values of one run, each on the host, on the device or on both."""

    def __init__(self, owner: DAGExecutor, inputs: dict[Key, Any]):
        self.owner, self.plan = owner, owner.plan
        self.host: dict[Key, np.ndarray] = {}
        self.device: dict[Key, DeviceBuffer] = {}
        self.made: set[Key] = set()  # values that an NPU partition of this run wrote: their memory is not shared
        for key, value in inputs.items():
            self._put(key, value)
        placeholders = {(p, -1): k for p, k in self.plan.ir.weight_name_mapping.items() if k in self.plan.feeds}
        for key, name in placeholders.items():
            self._put(key, owner._feeds[name])

    def _put(self, key: Key, value: np.ndarray | DeviceBuffer) -> None:
        if isinstance(value, DeviceBuffer):
            self.device[key] = value
        else:
            self.host[key] = value

    def on_host(self, key: Key) -> np.ndarray:
        if key not in self.host:
            self.host[key] = self.device[key].to_numpy()
        return self.host[key]

    def on_device(self, key: Key) -> DeviceBuffer:
        if key not in self.device:
            self.device[key] = self.owner.backend.wrap(np.asarray(self.host[key], order="C"))
        return self.device[key]

    def move(self, step: TransferOp) -> None:
        if step.dst == NPU:
            self.on_device(step.value)
        else:
            self.on_host(step.value)

    def partition(self, part: Partition, times: np.ndarray | None = None) -> None:
        """``times`` receives the start and the end of each kernel or op."""
        owner = self.owner
        results: Mapping[str, np.ndarray | DeviceBuffer]
        if part.device == NPU:
            operands = {name_of(k): self._operand(k) for k in part.inputs}
            results = owner.executors[part.id].run_device(operands, times)
            self.made.update(part.outputs)
        else:
            arrays = {name_of(k): self.on_host(k) for k in part.inputs}
            results = owner._hosts[part.id].run(arrays, owner._weights, times)
        for name, key in zip(part.ir.output_names(), part.outputs, strict=True):
            self.host.pop(key, None)  # the output may also be an input; its new contents replace the old
            self.device.pop(key, None)
            self._put(key, results[name])

    def _operand(self, key: Key) -> np.ndarray | DeviceBuffer:
        """Return the input of an NPU partition. If only its executor reads a host array, the executor copies it to the
        device."""
        return self.device[key] if key in self.device else self.host[key]

    def forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.host.pop(key, None)
            self.device.pop(key, None)

    def finish(self, device_outputs: bool) -> list[Any]:
        results: dict[Key, Any] = {}
        for t in self.plan.outputs:
            key = self.plan.ir.key(t)
            if key not in results:
                results[key] = self._device_output(key) if device_outputs else self._host_output(key)
        for name, key in self.plan.feeds.items():
            kept = key in self.made and key not in results
            self.owner._feeds[name] = self.device[key] if kept else np.array(self._leaf_or_host(key))
        return [results[self.plan.ir.key(t)] for t in self.plan.outputs]

    def _leaf_or_host(self, key: Key) -> np.ndarray:
        if key in self.host or key in self.device or key[1] >= 0:
            return self.on_host(key)
        name = leaf_key(self.plan.ir, key[0])
        return self.plan.ir.constants[name] if name in self.plan.ir.constants else self.owner._weights[name]

    def _host_output(self, key: Key) -> np.ndarray:
        if key in self.device and key not in self.host:
            return self.device[key].to_numpy(copy=key not in self.made or key in self.plan.feeds.values())
        return np.array(self._leaf_or_host(key))  # a copy: it may be an input, a weight or a view of one

    def _device_output(self, key: Key) -> DeviceBuffer:
        if key in self.device:
            return self.device[key]
        return self.owner.backend.allocate_buffer(np.asarray(self._leaf_or_host(key), order="C"))


def _kept_elsewhere(keys: Sequence[str]) -> BackendError:
    return BackendError(
        f"the model writes {', '.join(keys)}, and these input shapes partition it differently than the first ones, so "
        "that the contents cannot be shared; build a separate model for these shapes"
    )


def _only_partition(plan: PartitionPlan, programs: Mapping[int, CompiledProgram]) -> int | None:
    """Return the id of the NPU partition that computes all of ``plan`` with the model's own inputs and outputs, or
    None."""
    if not plan.on_npu:
        return None
    part = plan.partitions[0]
    entry, *others = programs[part.id].entries.values()
    same = (
        not others
        and [(t.name, t.shape, t.dtype) for t in plan.inputs] == [(s.name, s.shape, s.dtype) for s in entry.inputs]
        and part.ir.output_names() == [s.name for s in entry.outputs]
    )
    return part.id if same else None


def _last_steps(plan: PartitionPlan) -> dict[int, tuple[Key, ...]]:
    """Return by step number the values that nothing reads after the step."""
    last: dict[Key, int] = {}
    for number, step in enumerate(plan.steps):
        for key in (step.value,) if isinstance(step, TransferOp) else (*step.inputs, *step.outputs):
            last[key] = number
    kept = {plan.ir.key(t) for t in plan.outputs} | set(plan.feeds.values())
    by_step: dict[int, tuple[Key, ...]] = {}
    for key, number in last.items():
        if key not in kept:
            by_step[number] = (*by_step.get(number, ()), key)
    return by_step


def _input(value: Any, spec: TensorSpec, copy: bool) -> np.ndarray | DeviceBuffer:
    dtype = numpy_dtype(spec.dtype)
    if isinstance(value, DeviceBuffer):
        if (value.shape, value.dtype) != (spec.shape, dtype):
            got = f"a device buffer of {value.dtype}{list(value.shape)}"
            raise InputError(f"input {spec.name!r}: got {got}, expected {spec.dtype}{list(spec.shape)}")
        return value
    return host_input(spec, value).astype(dtype, copy=copy)


def _read(source: WeightSource, key: str, spec: TensorSpec) -> np.ndarray:
    if key not in set(source.names()):
        raise WeightError(f"{source.origin} lacks weight {key!r}; expected {spec.dtype}{list(spec.shape)}")
    if (problem := mismatch(source, key, spec.shape, spec.dtype)) is not None:
        raise WeightError(f"{source.origin}: weight {problem}; convert it")
    return read_as(source, key, spec.dtype)
