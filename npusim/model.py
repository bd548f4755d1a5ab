"""``build``: a PyTorch module in, a callable of the same shape out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.describe import si, totals
from npu_compiler.dtypes import storage_dtype
from npu_compiler.errors import ArtifactError, CompileError
from npu_compiler.explanation import explain
from npu_compiler.files import write_atomic
from npu_compiler.host_arrays import is_torch, to_array, to_torch
from npu_compiler.partitioner import CPU, PartitionPlan
from npu_runtime.backend import get_backend
from npu_runtime.dag_executor import DAGExecutor
from npusim.signature import Signature

if TYPE_CHECKING:
    import torch


def build(
    model: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Any = None,
    target: str = "cpu",
    dtype: Any = None,
    fallback: bool = True,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    disable: Collection[str] = (),
    threads: int | None = None,
) -> Model:
    """Capture, partition and compile ``model`` for the shapes of the example arguments, with the weights it has now.

    ``example_inputs``: the positional arguments of forward (a tuple, a list or one tensor; they may nest).
    ``example_kwargs``: its keyword arguments. A ``torch.export.ExportedProgram`` has its own and takes none. ``dtype``
    ('float16', 'bfloat16', or torch's) stores float32 activations and matrices in that type. ``fallback``: whether ops
    without a native kernel may run in PyTorch on the host. ``disable`` names passes to leave out; ``threads``: see
    :class:`CPUBackend`.

    Raises ``ConfigError`` (dtype), ``CaptureError``, ``CompileError`` (without fallback: every reason),
    ``ToolchainError``, ``WeightError``.
    """
    from npu_compiler.frontend.export import capture_call
    from npu_compiler.frontend.tensors import state_dict_numpy

    dtype = None if dtype is None else storage_dtype(dtype)
    call = capture_call(model, example_inputs, example_kwargs=example_kwargs)
    plan = npu_compiler.partition(call.ir, target=target)
    if not fallback:
        require_npu(plan)
    backend = get_backend(target, **({} if threads is None else {"threads": threads}))
    compile_fn = partial(npu_compiler.compile, target=target, dtype=dtype, disable=disable)
    weights = state_dict_numpy(model)
    executor = DAGExecutor(plan, backend, compile_fn, weights)
    return Model(executor, weights, Signature(call))


def require_npu(plan: PartitionPlan) -> None:
    """Raises ``CompileError`` with all reasons if some node of ``plan`` runs on the CPU."""
    ops = {n.name: n.op_type for n in plan.ir.nodes}
    causes = [(n, ops[n], r) for n, r in plan.reasons.items() if r.rule not in ("transfer", "follows")]
    if causes:
        lines = "\n".join(f"  {name} ({op}): {reason}" for name, op, reason in causes)
        raise CompileError(f"{len(causes)} node(s) of {plan.ir.model_name!r} cannot run on the NPU:\n{lines}", causes)


class Model:
    """A built model. Call it as the PyTorch model: numpy in, numpy out; torch in, torch out; same structure.

    ``plan`` says what runs where. Buffers that the model writes keep their contents from call to call.
    """

    def __init__(self, executor: DAGExecutor, weights: Mapping[str, np.ndarray], signature: Signature):
        self.executor, self.plan = executor, executor.plan
        self._weights, self._signature = dict(weights), signature

    @property
    def programs(self) -> list[CompiledProgram]:
        """The compiled NPU partitions, in order."""
        return list(self.executor.programs.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._signature.leaves(args, kwargs)
        outputs = list(self.executor.execute(leaves).values())
        if any(is_torch(v) for v in leaves):
            outputs = [to_torch(v) for v in outputs]
        return self._signature.result(outputs)

    def load_weights(self, weights: Any) -> None:
        """Replace the weights and reset all buffers; see :meth:`DAGExecutor.load_weights`."""
        self.executor.load_weights(weights)
        if isinstance(weights, Mapping):
            self._weights = {k: to_array(v) for k, v in weights.items()}

    def report(self) -> str:
        """What runs where and why, and what each program costs."""
        lines = [str(explain(self.plan.ir, self.executor.backend.name)), "", self.plan.describe()]
        for program in self.programs:
            t = totals(program)
            sizes = f"arena {si(t['arena_bytes'], 'B')}, weights {si(t['weight_bytes'], 'B')}"
            lines.append(f"program {program.name}: {t['kernels']} kernels, {si(t['flops'], 'FLOP')}, {sizes}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``x.npubin`` and, next to it, ``x.safetensors`` with the weights it needs; returns both paths.

        Raises ``ArtifactError`` if parts of the model run on the CPU, or if a file cannot be written.
        """
        if len(self.plan.partitions) != 1 or self.plan.partitions[0].device == CPU:
            count = len(self.plan.partitions)
            raise ArtifactError(f"only a model of one NPU partition fits a .npubin, this one has {count}:\n{self.plan}")
        return save_program(self.programs[0], self._weights, path)


def save_program(
    program: CompiledProgram, weights: Mapping[str, np.ndarray], path: str | os.PathLike[str]
) -> tuple[Path, Path]:
    """Write a program and those ``weights`` that it reads, as safetensors, beside it."""
    import safetensors.numpy

    target = Path(path)
    target = target if target.suffix == ".npubin" else target.with_name(f"{target.name}.npubin")
    beside = target.with_suffix(".safetensors")
    initial = {b.name for b in program.buffers if b.kind == "state" and b.name in weights}
    keys = {w.key for w in program.weights} | initial
    data = safetensors.numpy.save({k: np.asarray(weights[k], order="C") for k in sorted(keys)})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(beside, data)
    except OSError as error:
        raise ArtifactError(f"{beside}: cannot be written: {error.strerror or error}") from None
    program.save(target)
    return target, beside


def emit_source(program: CompiledProgram, folder: str | None) -> list[str]:
    """Write the program's sources into ``folder``, which is made, if one is given; what to tell the user."""
    if folder is None:
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in program.sources.items():
        (Path(folder) / name).write_text(text)
    return [f"wrote {len(program.sources)} source files into {folder}"]
