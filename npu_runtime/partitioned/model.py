"""A mixed model as a Python callable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_compiler.aten.ir import TensorSpec
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.support.errors import BackendError

from ..arguments import Inputs
from ..backends.base import Backend, get_backend
from ..loaded import LoadedModel
from .dag_executor import DAGExecutor
from .profile import PlanProfile


class MixedModel(LoadedModel):
    """A mixed model with its weights in memory: programs on the NPU, PyTorch on the host.

    ``weights``: as :func:`npu_runtime.load_weights` takes them. Raises ``BackendError``, with the ops that need it, if
    PyTorch is not installed, ``CompileError`` if this PyTorch lacks one of them, ``WeightError``.
    """

    def __init__(self, program: MixedProgram, weights: Any = None, backend: Backend | None = None):
        self.program = program
        self.backend = backend or get_backend(program.target)
        self._inputs, self._outputs = program.inputs, program.outputs
        self._executor: DAGExecutor | None = DAGExecutor(
            program.plan, self.backend, weights={} if weights is None else weights, programs=program.programs
        )

    def __repr__(self) -> str:
        state = "" if self._executor is not None else ", closed"
        return f"<npu_runtime.MixedModel of {self.program!r}{state}>"

    @property
    def executor(self) -> DAGExecutor:
        """The executor of the partitions. Raises ``BackendError`` if the model was closed."""
        if self._executor is None:
            raise BackendError(f"model {self.program.name!r} was closed")
        return self._executor

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        return self._inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        return self._outputs

    def run_ordered(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        return self.executor.execute_ordered(inputs)

    def reset(self) -> None:
        self.executor.reset()

    def profile(self, inputs: Inputs, runs: int = 20, warmup: int = 3) -> PlanProfile:
        """See :meth:`DAGExecutor.profile`."""
        return self.executor.profile(inputs, runs, warmup)

    def close(self) -> None:
        self._executor = None
