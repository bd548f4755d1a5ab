"""``build`` compiles a PyTorch module into a ``Model``, a callable with the same arguments and results."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.artifact.describe import totals
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.json_reader import graph_weights_used
from npu_compiler.mixed.compile import assemble
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.plan import PartitionPlan
from npu_compiler.support.dtypes import storage_dtype
from npu_compiler.support.errors import InputError
from npu_compiler.support.host_arrays import is_torch, to_torch
from npu_compiler.support.numbers import whole_number
from npu_compiler.support.text import html_table, si, tensor_text
from npu_compiler.weights.files import open_weights
from npu_compiler.weights.format import Weights
from npu_runtime.backends.base import get_backend
from npu_runtime.partitioned.dag_executor import DAGExecutor

from ..program_files import save_program
from .specializations import MAX_SHAPES, BuildOptions, Specializations

if TYPE_CHECKING:
    import torch

    from ..profiling.report import ProfileReport

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
    force_cpu: Collection[str] = (),
    minimise_transfers: bool = True,
    disable: Collection[str] = (),
    weights: Weights = None,
    float32_precision: str = "highest",
    threads: int | None = None,
    fixed_shapes: bool = False,
    max_shapes: int = MAX_SHAPES,
) -> Model:
    """Capture, partition and compile ``model`` for the shapes of the example arguments, with the weights it has now.

    A call with inputs of other shapes (another batch, another length) captures and compiles ``model`` for them once,
    which takes seconds. The programs share their weights.

    Args:
        model: the module is kept, to compile it for other shapes.
        example_inputs: the positional arguments of forward: a tuple, a list or one tensor; they may be nested. An
            ``ExportedProgram`` has its own and accepts none.
        target: 'cpu' or 'cuda', for the machine at hand, or a device like 'cpu:avx2' whose code this machine runs.
        dtype: storage dtype of float32 activations and matrices: 'float16', 'bfloat16', or torch's; None: float32.
        fallback: ops without a native kernel may run in PyTorch on the host.
        example_kwargs: the keyword arguments of forward.
        force_cpu: names of nodes and ops to run on the host (see :func:`npu_compiler.partition`).
        minimise_transfers: cheap neighbours of host nodes may move to the host, too, if that saves transfers.
        disable: names of passes to skip.
        weights: the format in which matrices of products are stored, or formats by the names of weights (see
            :func:`npu_compiler.compile`).
        float32_precision: 'highest', or on the target 'cuda' 'tf32' (see :func:`npu_compiler.compile`).
        threads: see :class:`CPUBackend`.
        fixed_shapes: refuse inputs of other shapes, and do not keep the module.
        max_shapes: programs kept at a time: the first one and the most recently used ones.

    Raises:
        ConfigError, InputError: an option is invalid.
        CaptureError: the model cannot be captured.
        CompileError: the model cannot be compiled; without fallback, the error has the reason of every node.
        ToolchainError: there is no working compiler for the target.
        WeightError: a weight is missing or has another shape.
    """
    import torch

    from npu_compiler.frontend.tensors import state_dict_numpy

    dtype = None if dtype is None else storage_dtype(dtype)
    max_shapes = whole_number("max_shapes", max_shapes, 1)
    backend = get_backend(target, **({} if threads is None else {"threads": threads}))
    placement = {"force_cpu": force_cpu, "minimise_transfers": minimise_transfers}
    off = (disable,) if isinstance(disable, str) else tuple(disable)  # later programs leave out the same passes
    options = BuildOptions(model, target, backend, dtype, fallback, off, weights, float32_precision, placement)
    call = options.capture(example_inputs, example_kwargs)
    source = open_weights(state_dict_numpy(call.program, needed=graph_weights_used(call.ir)))
    first = options.specialize(call, source)
    reason = _FIXED if fixed_shapes else _EXPORTED if not isinstance(model, torch.nn.Module) else ""
    return Model(Specializations(first, source, None if reason else options, reason, max_shapes))


class Model:
    """A built model. It is called as the PyTorch model: NumPy arrays give NumPy arrays, tensors give tensors, and the
    result has the same structure.

    A first call with other shapes than the example's compiles another program, unless ``build`` was told to refuse it.
    ``executor``, ``plan``, ``programs``, ``report()`` and ``save()`` concern the program for the example's shapes.
    Buffers that the model writes keep their contents from call to call, whatever the shapes.

    A pickled model has its programs, weights and buffers but not the PyTorch module, so it accepts only the shapes it
    was called with. ``copy.deepcopy`` shares everything except the buffers.
    """

    def __init__(self, specializations: Specializations):
        self._by_shape, self._first = specializations, specializations.first
        self._shapes = self._first.shapes

    @property
    def executor(self) -> DAGExecutor:
        """The executor for the example's shapes."""
        return self._first.executor

    @property
    def plan(self) -> PartitionPlan:
        """Which nodes run on which device, and why, for the example's shapes."""
        return self._first.executor.plan

    @property
    def programs(self) -> list[CompiledProgram]:
        """The compiled NPU partitions for the example's shapes, in order of execution."""
        return list(self.executor.programs.values())

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """The tuples of input shapes that have a program, the example's first."""
        return [self._shapes, *map(list, self._by_shape.others)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self._first
        leaves = chosen.signature.leaves(args, kwargs)
        try:
            shapes = [v.shape for v in leaves]
        except RuntimeError as error:  # a nested tensor
            raise InputError(f"an input has no shape: {str(error).splitlines()[0]}") from None
        if shapes != self._shapes:
            chosen = self._by_shape.select(shapes, args, kwargs, leaves)
        outputs = chosen.executor.execute_ordered(leaves)
        if any(map(is_torch, leaves)):
            outputs = [to_torch(v) for v in outputs]
        return chosen.signature.result(outputs, args, kwargs)

    def load_weights(self, weights: Any) -> None:
        """Replace the weights of all programs and reset all buffers; see :meth:`DAGExecutor.load_weights`.

        ``weights`` must have every weight that the model reads, and the first contents of every buffer of its
        state_dict that it writes. Other tensors are ignored.

        Raises:
            WeightError: one of them is missing or has another shape.
        """
        self._by_shape.load_weights(open_weights(weights))

    def profile(self, inputs: Any = None, **options: Any) -> ProfileReport:
        """Measure every kernel, host op and transfer of the program for the example's shapes. Arguments and errors are
        those of :func:`npusim.profile`; the buffers that the model writes are restored afterwards."""
        from ..profiling.collect import profile

        return profile(self, inputs, **options)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{t.name} {tensor_text(t.shape, t.dtype)}" for t in self.plan.inputs)
        more = f"; {len(self.shapes)} programs by shape" if len(self.shapes) > 1 else ""
        return f"<npusim.Model {self.plan.summary()}, on {self.executor.backend.name}; inputs {inputs or 'none'}{more}>"

    def report(self) -> str:
        """Return a text with the device of every node, the reasons, and the cost of each program."""
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
        """Write what was compiled for the example's shapes to ``x.npubin`` and its weights to ``x.safetensors`` beside
        it. If parts of the model run on the host, the file holds them as a graph, and running it needs PyTorch.

        Returns:
            Both paths.

        Raises:
            ArtifactError: a file cannot be written.
            InputError: the module's weights were modified after ``build``.
        """
        self._by_shape.check_weights()
        program = assemble(self.plan, self.executor.programs, self.executor.backend.name)
        return save_program(program, self._by_shape.source, path)
