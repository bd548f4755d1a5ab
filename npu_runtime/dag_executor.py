"""Runs a PartitionPlan: native programs for NPU partitions, PyTorch for the others, values moved where they must be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from npu_compiler.alias import Key, is_in_place
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import numpy_dtype
from npu_compiler.errors import InputError, WeightError
from npu_compiler.ir import IRGraph, TensorSpec
from npu_compiler.ir_reader import graph_weights_used, leaf_key
from npu_compiler.partitioner import NPU, Partition, PartitionPlan, TransferOp, name_of

from .arrays import to_array, widens
from .backend import Backend, DeviceBuffer, get_backend
from .cpu_fallback import CPUPartition

CompileFn = Callable[[IRGraph], CompiledProgram]


class DAGExecutor:
    """A partitioned model, ready to run. All compilation is done here, once.

    ``compile_fn`` turns the IR of an NPU partition into a program for ``backend``; the default is
    ``npu_compiler.compile`` for the backend's target (``functools.partial`` sets a dtype). ``weights`` may also come
    later, by :meth:`load_weights`. Buffers that the model writes keep their contents from run to run; only one run may
    be under way at a time.

    Raises ``CompileError`` (a partition cannot be compiled or bound), ``BackendError``, ``WeightError``.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        backend: str | Backend = "cpu",
        compile_fn: CompileFn | None = None,
        weights: Any = None,
    ):
        self.plan = plan
        self.backend = get_backend(backend) if isinstance(backend, str) else backend
        if compile_fn is None:
            import npu_compiler

            compile_fn = partial(npu_compiler.compile, target=self.backend.name)
        self.programs: dict[int, CompiledProgram] = {}
        self._hosts: dict[int, CPUPartition] = {}
        for part in plan.partitions:
            if part.device == NPU:
                self.programs[part.id] = compile_fn(part.ir)
            else:
                self._hosts[part.id] = CPUPartition(part.ir)
        # What is left of in-place ops after functionalize() may write the caller's arrays.
        self._copy_inputs = bool(self._hosts) and any(is_in_place(n.op_type) for n in plan.ir.nodes)
        self._last = _last_steps(plan)
        self._required = graph_weights_used(plan.ir)
        self._executors: dict[int, Any] | None = None
        self._weights: dict[str, np.ndarray] = {}
        self._feeds: dict[str, np.ndarray | DeviceBuffer] = {}
        if weights is not None or not self._required:
            self.load_weights({} if weights is None else weights)

    def load_weights(self, weights: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Take weights (arrays or torch tensors by state_dict key, or a weight file) and reset all buffers.

        May be called again to replace them. Raises ``WeightError`` for a missing or mis-shaped tensor, before anything
        is changed.
        """
        given = _read_weights(weights)
        held = {key: _weight(key, given.get(key), spec) for key, spec in self._required.items()}
        self._executors = {
            part.id: self.backend.create_executor(self.programs[part.id], {k: held[k] for k in graph_weights_used(part.ir)})
            for part in self.plan.partitions
            if part.id in self.programs
        }
        written = {u.key for u in self.plan.ir.state}
        on_host = {key for host in self._hosts.values() for key in graph_weights_used(host.ir)}
        on_host |= {leaf_key(self.plan.ir, t.name) for t in self.plan.outputs if t.producer is None}
        self._feeds = {key: held[key].copy() for key in self.plan.feeds}
        self._weights = {
            k: v.copy() if k in written or not v.flags.writeable else v for k, v in held.items() if k in on_host
        }

    def execute(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, device_outputs: bool = False
    ) -> dict[str, Any]:
        """Run once. ``inputs``: numpy arrays, torch tensors or device buffers, by name or in the order of
        ``plan.inputs``. The outputs, by name and in the order of ``plan.outputs``, are fresh arrays - or, with
        ``device_outputs``, device buffers, which can be inputs of the next run without passing through the host.

        Raises ``InputError`` naming the tensor and what was expected.
        """
        if self._executors is None:
            raise WeightError(f"{len(self._required)} weight(s) are needed before the first run; call load_weights()")
        run = _Run(self, self._bind(inputs))
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, TransferOp):
                run.move(step)
            else:
                run.partition(step)
            run.forget(self._last.get(number, ()))
        return run.finish(device_outputs)

    __call__ = execute

    def _bind(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[Key, Any]:
        specs = self.plan.inputs
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(specs):
                expected = ", ".join(t.name for t in specs)
                raise InputError(f"{len(inputs)} input(s) given, {len(specs)} expected: {expected}")
            inputs = {t.name: value for t, value in zip(specs, inputs, strict=True)}
        unknown = sorted(set(inputs) - {t.name for t in specs})
        if unknown:
            raise InputError(f"no input is named {unknown[0]!r}; inputs are: {', '.join(t.name for t in specs)}")
        bound = {}
        for t in specs:
            if t.name not in inputs:
                raise InputError(f"input {t.name!r} is missing; expected {t.dtype}{list(t.shape)}")
            bound[(t.name, 0)] = _input(inputs[t.name], t, self._copy_inputs)
        return bound


class _Run:
    """The values of one run: where each is held, on the host, on the device or on both."""

    def __init__(self, owner: DAGExecutor, inputs: dict[Key, Any]):
        self.owner, self.plan = owner, owner.plan
        self.host: dict[Key, np.ndarray] = {}
        self.device: dict[Key, DeviceBuffer] = {}
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
            self.device[key] = self.owner.backend.wrap(np.ascontiguousarray(self.host[key]))
        return self.device[key]

    def move(self, step: TransferOp) -> None:
        if step.dst == NPU:
            self.on_device(step.value)
        else:
            self.on_host(step.value)

    def partition(self, part: Partition) -> None:
        owner = self.owner
        if part.device == NPU:
            assert owner._executors is not None
            results = owner._executors[part.id].run_device({name_of(k): self._operand(k) for k in part.inputs})
        else:
            results = owner._hosts[part.id].run({name_of(k): self.on_host(k) for k in part.inputs}, owner._weights)
        for name, key in zip(part.ir.output_names(), part.outputs, strict=True):
            self.host.pop(key, None)  # an output that is also an input: the new contents count
            self.device.pop(key, None)
            self._put(key, results[name])

    def _operand(self, key: Key) -> np.ndarray | DeviceBuffer:
        """An NPU partition's input: the executor itself brings a host array that only it reads to the device."""
        return self.device[key] if key in self.device else self.host[key]

    def forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.host.pop(key, None)
            self.device.pop(key, None)

    def finish(self, device_outputs: bool) -> dict[str, Any]:
        names = self.plan.ir.output_names()
        results: dict[Key, Any] = {}
        for t in self.plan.outputs:
            key = self.plan.ir.key(t)
            if key not in results:
                results[key] = self._device_output(key, t) if device_outputs else self._host_output(key)
        for name, key in self.plan.feeds.items():
            held = self.device[key] if key in self.device else self._leaf_or_host(key)
            self.owner._feeds[name] = held if isinstance(held, DeviceBuffer) else np.array(held)
        return {name: results[self.plan.ir.key(t)] for name, t in zip(names, self.plan.outputs, strict=True)}

    def _leaf_or_host(self, key: Key) -> np.ndarray:
        if key in self.host or key in self.device or key[1] >= 0:
            return self.on_host(key)
        name = leaf_key(self.plan.ir, key[0])
        return self.plan.ir.constants[name] if name in self.plan.ir.constants else self.owner._weights[name]

    def _host_output(self, key: Key) -> np.ndarray:
        if key in self.device and key not in self.host:
            return self.device[key].to_numpy()
        return np.array(self._leaf_or_host(key))  # a copy: it may be an input, a weight or a view of one

    def _device_output(self, key: Key, spec: TensorSpec) -> DeviceBuffer:
        if key in self.device:
            return self.device[key]
        return self.owner.backend.allocate_buffer(np.ascontiguousarray(self._leaf_or_host(key)))


def _last_steps(plan: PartitionPlan) -> dict[int, tuple[Key, ...]]:
    """Step number -> values that nothing reads after it."""
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
    expected = f"input {spec.name!r}: expected {spec.dtype}{list(spec.shape)}"
    if isinstance(value, DeviceBuffer):
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise InputError(f"{expected}, got a device buffer of {value.dtype}{list(value.shape)}")
        return value
    try:
        array = to_array(value)
    except TypeError as error:
        raise InputError(f"{expected}, but {error}") from None
    dtype = numpy_dtype(spec.dtype)
    if array.shape != spec.shape or not (array.dtype == dtype or widens(array.dtype, dtype)):
        raise InputError(f"{expected}, got {array.dtype}{list(array.shape)}")
    return array.astype(dtype, copy=copy)


def _read_weights(weights: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(weights, Mapping):
        return weights
    from .weight_loader import read_weights

    return read_weights(weights)


def _weight(key: str, value: Any, spec: TensorSpec) -> np.ndarray:
    if value is None:
        raise WeightError(f"weight {key!r} is missing; expected {spec.dtype}{list(spec.shape)}")
    try:
        array = to_array(value)
    except TypeError as error:
        raise WeightError(f"weight {key!r}: {error}") from None
    if array.shape != spec.shape:
        raise WeightError(f"weight {key!r} has shape {list(array.shape)}, expected {list(spec.shape)}")
    return array
