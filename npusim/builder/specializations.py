"""The programs of one model, by the shapes of its inputs. A call with new shapes compiles another program once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import npu_compiler
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.aten.json_reader import graph_weights_used
from npu_compiler.partitioning.plan import PartitionPlan
from npu_compiler.pipeline import check_weight_names
from npu_compiler.support.dtypes import name_of, numpy_dtype
from npu_compiler.support.errors import CaptureError, CompileError, InputError, WeightError
from npu_compiler.support.host_arrays import to_torch
from npu_compiler.weights.files import WeightSource, open_weights
from npu_compiler.weights.format import Weights
from npu_runtime.arguments import host_input
from npu_runtime.backends.base import Backend, DeviceBuffer
from npu_runtime.locks import RunLock
from npu_runtime.partitioned.dag_executor import DAGExecutor

from .signature import Signature

if TYPE_CHECKING:
    import torch

    from npu_compiler.frontend.export import Capture

__all__ = ["MAX_SHAPES", "BuildOptions", "Specialized", "Specializations", "require_npu"]

MAX_SHAPES = 8
"""Programs that a model keeps by default, the one for the example's shapes included."""

_LISTED = 8  # keys named in one message

_PICKLED = "a pickled model does not have the module that programs for other shapes are compiled from"

_log = logging.getLogger(__name__)


@dataclass
class Specialized:
    """A model compiled for inputs of certain shapes. ``used`` is the time of its last use, as a count of uses."""

    executor: DAGExecutor
    signature: Signature
    used: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs, in order."""
        return [t.shape for t in self.executor.plan.inputs]


@dataclass(frozen=True)
class BuildOptions:
    """The options for compiling a call of ``module``; the fields are arguments of ``build``."""

    module: torch.nn.Module | torch.export.ExportedProgram
    target: str
    backend: Backend
    dtype: str | None
    fallback: bool
    disable: Collection[str]
    weights: Weights
    float32_precision: str
    placement: Mapping[str, Any]  # further arguments of ``partition``

    def capture(self, args: Any, kwargs: Mapping[str, Any] | None) -> Capture:
        """Capture a call with these arguments. Raises ``CaptureError``."""
        from npu_compiler.frontend.export import capture_call

        with _own_forwards(self.module):
            return capture_call(self.module, args, example_kwargs=kwargs)

    def specialize(self, call: Capture, weights: WeightSource, beside: DAGExecutor | None = None) -> Specialized:
        """Compile the program of a call. It shares memory with that of ``beside``.

        Raises:
            CompileError, ToolchainError, WeightError: see ``build``.
        """
        check_weight_names([call.ir], self.weights)
        plan = npu_compiler.partition(call.ir, target=self.target, **self.placement)
        if not self.fallback:
            require_npu(plan)
        compile_fn = partial(
            npu_compiler.compile,
            target=self.target,
            dtype=self.dtype,
            disable=self.disable,
            weights=self.weights,
            float32_precision=self.float32_precision,
        )
        return Specialized(DAGExecutor(plan, self.backend, compile_fn, weights, beside), Signature(call))


@contextmanager
def _own_forwards(model: torch.nn.Module | torch.export.ExportedProgram) -> Iterator[None]:
    """Modules whose ``forward`` is a built model, as in a pipeline that computes with it, have that of their class."""
    import torch

    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    replaced = [(m, vars(m).pop("forward")) for m in modules if _is_built(vars(m).get("forward"))]
    try:
        yield
    finally:
        for module, built in replaced:
            module.forward = built


def _is_built(forward: Any) -> bool:
    return isinstance(getattr(forward, "_by_shape", None), Specializations)


def require_npu(plan: PartitionPlan) -> None:
    """Raise ``CompileError`` with the reasons of all nodes that run on the host, if there are any."""
    ops = {n.name: n.op_type for n in plan.ir.nodes}
    causes = [(n, ops[n], r) for n, r in plan.reasons.items() if r.rule not in ("transfer", "follows")]
    if causes:
        lines = "\n".join(f"  {name} ({op}): {reason}" for name, op, reason in causes)
        raise CompileError(f"{len(causes)} node(s) of {plan.ir.model_name!r} cannot run on the NPU:\n{lines}", causes)


class Specializations:
    """The programs of one model. It is thread-safe: each program is compiled once, and calls that have one do not wait.

    Args:
        first: the program for the example's shapes, which is always kept.
        source: the weights.
        options: how programs for other shapes are compiled; None: there are only those that exist.
        fixed: why other shapes are refused, if ``options`` is None.
        limit: programs kept at a time: ``first`` and the most recently used ones.
    """

    def __init__(
        self,
        first: Specialized,
        source: WeightSource,
        options: BuildOptions | None,
        fixed: str = "",
        limit: int = MAX_SHAPES,
    ):
        self.first, self.source, self.options, self.fixed, self.limit = first, source, options, fixed, limit
        self.others: dict[tuple[tuple[int, ...], ...], Specialized] = {}
        self._clock = itertools.count(1)
        self._making = RunLock()
        self._versions = _versions(options.module, first.executor.plan) if options is not None else {}
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the module, whose class another process may not have, and include the weights."""
        plan = self.first.executor.plan
        names = set(self.source.names()) & graph_weights_used(plan.ir).keys()
        source = open_weights({name: self.source.read(name) for name in names})
        fixed = self.fixed or _PICKLED
        return {**self.__dict__, "source": source, "options": None, "fixed": fixed, "_clock": None, "_versions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clock = itertools.count(1 + max([o.used for o in self.others.values()], default=0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Specializations:
        """Return a copy that shares programs, weights and the module, with which it can compile other programs. It has
        its own copies of the buffers that the model writes."""
        first, others = copy.deepcopy((self.first, self.others), memo)
        made = Specializations(first, self.source, self.options, self.fixed, self.limit)
        made.others, made._versions = others, self._versions
        return made

    def select(
        self, shapes: Sequence[Sequence[int]], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Specialized:
        """Return the program for inputs of these ``shapes``. If there is none yet, it is compiled from the call.

        Raises:
            InputError: the program cannot be compiled, or other shapes are refused.
        """
        key = tuple(tuple(s) for s in shapes)
        found = self.others.get(key)
        if found is None:
            with self._making.held():
                found = self.others.get(key) or self._make(key, args, kwargs, leaves)
        found.used = next(self._clock)
        return found

    def load_weights(self, source: WeightSource) -> None:
        """Replace the weights of all programs and reset all buffers. Raises ``WeightError``."""
        names, plan = set(source.names()), self.first.executor.plan
        if missing := [u.key for u in plan.ir.state if u.key not in names and u.key not in plan.ir.constants]:
            listed = ", ".join(map(repr, missing[:_LISTED])) + (" ..." if len(missing) > _LISTED else "")
            raise WeightError(f"{source.origin} lacks the first contents of buffers that the model writes: {listed}")
        with self._making.held():
            self.first.executor.load_weights(source)
            others, self.others = self.others, {}  # one that fails to load is compiled again at its next call
            self.source, self._versions = source, {}
            for key, other in others.items():
                other.executor.load_weights(source, self.first.executor)
                self.others[key] = other

    def check_weights(self) -> None:
        """Raise ``InputError`` if the module's weights were modified after ``build``: weights read now would differ
        from those of the first program."""
        changed = [key for key, (tensor, version) in self._versions.items() if tensor._version != version]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise InputError(
                f"weight {changed[0]!r}{more} of the module changed after build(); call "
                "load_weights(module.state_dict()) to use the weights as they are now for all shapes"
            )

    def _make(
        self, key: tuple[tuple[int, ...], ...], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Specialized:
        specs = self.first.executor.plan.inputs
        differs = [(t, shape) for t, shape in zip(specs, key, strict=True) if t.shape != shape]
        listed = ", ".join(f"input {t.name!r}: shape {list(shape)}, expected {list(t.shape)}" for t, shape in differs)
        if self.options is None:
            raise InputError(f"{listed}; {self.fixed}")
        self.check_weights()
        examples = {
            id(value): _example(dataclasses.replace(t, shape=shape), value)
            for t, shape, value in zip(specs, key, leaves, strict=True)
        }
        from torch.utils import _pytree as pytree

        args, kwargs = pytree.tree_map(lambda v: examples.get(id(v), v), (args, kwargs))
        _log.info("compiling %s for inputs of shapes %s", self.first.executor.plan.ir.model_name, list(key))
        try:
            made = self.options.specialize(self.options.capture(args, kwargs), self.source, self.first.executor)
        except (CaptureError, CompileError) as error:
            raise InputError(f"{listed}; the model cannot be compiled for these shapes: {error}") from error
        self._make_room()
        if self.limit > 1:
            self.others[key] = made
        return made

    def _make_room(self) -> None:
        full = len(self.others) + 2 > self.limit
        while self.others and len(self.others) + 2 > self.limit:
            del self.others[min(self.others, key=lambda k: self.others[k].used)]
        if full and not self._warned:
            self._warned = True
            warnings.warn(
                f"the model was called with more than {self.limit} tuples of input shapes: those not used for the "
                "longest time are compiled again when they come back; pad inputs to fewer shapes, or pass a "
                "larger max_shapes to build()",
                RuntimeWarning,
                stacklevel=5,
            )


def _example(spec: TensorSpec, value: Any) -> Any:
    """Return a tensor of zeros for the capture, with the shape and dtype of ``spec``. Raises ``InputError``, as a run
    would, if the dtype of ``value`` does not fit."""
    if isinstance(value, DeviceBuffer):
        if name_of(value.dtype) != spec.dtype:
            raise InputError(f"input {spec.name!r}: dtype {value.dtype}, expected {spec.dtype}")
    else:
        host_input(spec, value)
    return to_torch(np.zeros(spec.shape, numpy_dtype(spec.dtype)))


def _versions(module: Any, plan: PartitionPlan) -> dict[str, tuple[Any, int]]:
    """Return by key the tensors of ``module`` that share memory with the weights, each with PyTorch's count of writes.
    Buffers that the model writes are excluded, because only their initial contents are read. A module's extra state is
    not a tensor."""
    import torch

    written = {u.key for u in plan.ir.state}
    tensors = {k: t for k, t in module.state_dict().items() if k not in written and isinstance(t, torch.Tensor)}
    return {k: (t, t._version) for k, t in tensors.items() if t.device.type == "cpu" and not t.is_inference()}
