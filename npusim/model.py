"""``build``: a PyTorch module in, a callable of the same shape out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.describe import totals
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.partitioner import HOST, PartitionPlan
from npu_compiler.support.dtypes import storage_dtype
from npu_compiler.support.errors import ArtifactError, ConfigError, InputError
from npu_compiler.support.files import write_atomic
from npu_compiler.support.host_arrays import is_torch, to_torch
from npu_compiler.support.text import html_table, si, tensor_text
from npu_compiler.weights.files import open_weights
from npu_runtime.backends.base import get_backend
from npu_runtime.partitioned.dag_executor import DAGExecutor

from .shapes import MAX_SHAPES, Recipe, Specializations

if TYPE_CHECKING:
    import torch

_FIXED = "the model was built with fixed_shapes=True"
_EXPORTED = (
    "an ExportedProgram cannot be captured for other shapes: build from the module, or from a program exported with "
    "these shapes"
)


def build(
    model: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Any = None,
    target: str = "cpu",
    dtype: Any = None,
    fallback: bool = True,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    disable: Collection[str] = (),
    weights: str | None = None,
    threads: int | None = None,
    fixed_shapes: bool = False,
    max_shapes: int = MAX_SHAPES,
) -> Model:
    """Capture, partition and compile ``model`` for the shapes of the example arguments, with the weights it has now.

    ``example_inputs``: the positional arguments of forward (a tuple, a list or one tensor; they may nest).
    ``target``: 'cpu' or 'cuda', for the machine at hand, or a device like 'cpu:avx2' whose code this machine runs.
    ``example_kwargs``: its keyword arguments. A ``torch.export.ExportedProgram`` has its own and takes none. ``dtype``
    ('float16', 'bfloat16', or torch's) stores float32 activations and matrices in that type. ``fallback``: whether ops
    without a native kernel may run in PyTorch on the host. ``disable`` names passes to leave out;
    ``weights``: the format in which matrices of products are stored (see :func:`npu_compiler.compile`);
    ``threads``: see :class:`CPUBackend`.

    A call with inputs of other shapes (another batch, another length) captures and compiles ``model`` for them, which
    takes seconds, once; weights are shared. For this the module is kept. At most ``max_shapes`` programs are kept at a
    time: the first one and those used last. ``fixed_shapes``: refuse other shapes, and do not keep the module.

    Raises ``ConfigError`` (dtype, weights), ``CaptureError``, ``CompileError`` (without fallback: every reason),
    ``ToolchainError``, ``WeightError``.
    """
    import torch

    from npu_compiler.frontend.tensors import state_dict_numpy

    dtype = None if dtype is None else storage_dtype(dtype)
    if max_shapes < 1:
        raise ConfigError(f"max_shapes={max_shapes}: it takes a whole number from 1")
    backend = get_backend(target, **({} if threads is None else {"threads": threads}))
    recipe = Recipe(model, target, backend, dtype, fallback, tuple(disable), weights)
    call = recipe.capture(example_inputs, example_kwargs)
    source = open_weights(state_dict_numpy(call.program))
    first = recipe.specialize(call, source)
    reason = _FIXED if fixed_shapes else _EXPORTED if not isinstance(model, torch.nn.Module) else ""
    return Model(Specializations(first, source, None if reason else recipe, reason, max_shapes))


class Model:
    """A built model. Call it as the PyTorch model: numpy in, numpy out; torch in, torch out; same structure.

    Inputs of other shapes than the example's are compiled for at their first call, unless ``build`` was told to refuse
    them. ``executor``, ``plan``, ``programs``, ``report()`` and ``save()`` are about the program for the example's
    shapes. ``plan`` says what runs where. Buffers that the model writes keep their contents from call to call, whatever
    the shapes.

    A model can be pickled: with its programs, weights and buffers, without the PyTorch module, so that it takes the
    shapes it was called with and no others. ``copy.deepcopy`` shares all but the buffers.
    """

    def __init__(self, specializations: Specializations):
        self._by_shape, self._first = specializations, specializations.first
        self._shapes = self._first.shapes

    @property
    def executor(self) -> DAGExecutor:
        """What runs the program for the example's shapes."""
        return self._first.executor

    @property
    def plan(self) -> PartitionPlan:
        """What runs where, for the example's shapes."""
        return self._first.executor.plan

    @property
    def programs(self) -> list[CompiledProgram]:
        """The compiled NPU partitions, in order, for the example's shapes."""
        return list(self.executor.programs.values())

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the inputs for which there is a program, the example's first."""
        return [self._shapes, *map(list, self._by_shape.others)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self._first
        leaves = chosen.signature.leaves(args, kwargs)
        shapes = [v.shape for v in leaves]
        if shapes != self._shapes:
            chosen = self._by_shape.select(shapes, args, kwargs, leaves)
        outputs = chosen.executor.execute_ordered(leaves)
        if any(map(is_torch, leaves)):
            outputs = [to_torch(v) for v in outputs]
        return chosen.signature.result(outputs, args, kwargs)

    def load_weights(self, weights: Any) -> None:
        """Replace the weights, for all shapes, and reset all buffers; see :meth:`DAGExecutor.load_weights`."""
        self._by_shape.load_weights(open_weights(weights))

    def __repr__(self) -> str:
        inputs = ", ".join(f"{t.name} {tensor_text(t.shape, t.dtype)}" for t in self.plan.inputs)
        more = f"; {len(self.shapes)} programs by shape" if len(self.shapes) > 1 else ""
        return f"<npusim.Model {self.plan.summary()}, on {self.executor.backend.name}; inputs {inputs or 'none'}{more}>"

    def report(self) -> str:
        """What runs where and why, and what each program costs."""
        lines = [str(explain(self.plan.ir, self.executor.backend.name)), "", self.plan.describe()]
        for name, kernels, flops, arena, weights in self._costs():
            lines.append(f"program {name}: {kernels} kernels, {flops}, arena {arena}, weights {weights}")
        return "\n".join(lines)

    def _costs(self) -> list[tuple[str, int, str, str, str]]:
        """(program, kernels, work, arena, weights) of every program."""
        totalled = [(p.name, totals(p)) for p in self.programs]
        return [
            (name, t["kernels"], si(t["flops"], "FLOP"), si(t["arena_bytes"], "B"), si(t["weight_bytes"], "B"))
            for name, t in totalled
        ]

    def _repr_html_(self) -> str:
        """For notebooks: :meth:`report`."""
        costs = html_table(("program", "kernels", "work", "arena", "weights"), self._costs())
        inputs = html_table(("input", "tensor"), [(t.name, tensor_text(t.shape, t.dtype)) for t in self.plan.inputs])
        explanation = explain(self.plan.ir, self.executor.backend.name)
        return inputs + explanation._repr_html_() + self.plan._repr_html_() + costs

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``x.npubin``, the program for the example's shapes, and, next to it, ``x.safetensors`` with the weights
        it needs; returns both paths.

        Raises ``ArtifactError`` if parts of the model run on the host, or if a file cannot be written, and
        ``InputError`` if the module's weights were written after ``build`` took them.
        """
        if len(self.plan.partitions) != 1 or self.plan.partitions[0].device == HOST:
            count = len(self.plan.partitions)
            raise ArtifactError(f"only a model of one NPU partition fits a .npubin, this one has {count}:\n{self.plan}")
        self._by_shape.check_weights()
        return save_program(self.programs[0], self._by_shape.source, path)


def save_program(program: CompiledProgram, weights: Any, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write a program and those of ``weights`` (whatever ``open_weights`` takes) that it reads, as safetensors, beside
    it."""
    import safetensors.numpy

    target = Path(path)
    target = target if target.suffix == ".npubin" else target.with_name(f"{target.name}.npubin")
    beside = target.with_suffix(".safetensors")
    source = open_weights(weights)
    initial = {b.name for b in program.buffers if b.kind == "state"} & set(source.names())
    keys = {w.key for w in program.weights} | initial
    data = safetensors.numpy.save({k: np.asarray(source.read(k), order="C") for k in sorted(keys)})
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
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in program.sources.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from None
    return [f"wrote {len(program.sources)} source files into {folder}"]
