"""A compiled program as a Python callable."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, IOSpec
from npu_compiler.mixed.program import MixedProgram, load_program
from npu_compiler.support.errors import BackendError, WeightError

from .arguments import Inputs
from .backends.base import Backend, get_backend
from .executor import Executor
from .loaded import LoadedModel
from .profiler import EntryProfile
from .state import State
from .weight_loader import WeightStore, load_weights

if TYPE_CHECKING:
    from .partitioned.model import MixedModel


class Model(LoadedModel):
    """A program with its weights in memory. Entry points share weights and state; each is prepared at its first use."""

    def __init__(self, program: CompiledProgram, weights: Any = None, backend: Backend | None = None):
        self.program = program
        self.backend = backend or get_backend(program.target)
        store = weights if isinstance(weights, WeightStore) else load_weights(program, weights, self.backend)
        self._weights: WeightStore | None = store
        self.state = State(program, self.backend, store.state)
        self._executors: dict[str, Executor] = {}
        self._default = next(iter(program.entries))
        self.executor(self._default)

    def __repr__(self) -> str:
        state = "" if self._weights is not None else ", closed"
        return f"<npu_runtime.Model of {self.program!r}{state}>"

    def executor(self, entry: str | None = None) -> Executor:
        """Return the executor of an entry point (default: the first)."""
        if self._weights is None:
            raise BackendError(f"program {self.program.name!r} was closed")
        name = self._default if entry is None else entry
        if name not in self._executors:
            self._executors[name] = Executor(self.program, self._weights, self.backend, name, self.state)
        return self._executors[name]

    @property
    def inputs(self) -> Sequence[IOSpec]:
        """The inputs of the first entry point, in order."""
        return (self._executors.get(self._default) or self.executor()).inputs

    @property
    def outputs(self) -> Sequence[IOSpec]:
        """The outputs of the first entry point, in order."""
        return self.executor().outputs

    def run(self, inputs: Inputs, entry: str | None = None) -> dict[str, np.ndarray]:
        """Run once and return the outputs by name; see :meth:`Executor.run`."""
        return self.executor(entry).run(inputs)

    def run_ordered(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        return (self._executors.get(self._default) or self.executor()).run_ordered(inputs)

    def reset(self) -> None:
        self.state.reset()

    def profile(
        self, inputs: Inputs | None = None, runs: int = 20, warmup: int = 3, entry: str | None = None
    ) -> EntryProfile:
        """See :meth:`Executor.profile`."""
        return self.executor(entry).profile(inputs, runs, warmup)

    def close(self) -> None:
        self._executors.clear()
        self._weights = None


def load(
    path: str | os.PathLike[str] | CompiledProgram | MixedProgram,
    weights: Any = None,
    threads: int | None = None,
    from_source: bool = False,
    allowed_ops: Collection[str] = (),
) -> Model | MixedModel:
    """Load a ``.npubin`` (or take a program in memory) with its weights.

    A mixed model, of which some partitions run on the host, needs PyTorch; a program does not.

    Args:
        path: the file, or what :func:`npu_compiler.load_program` returned.
        weights: as :func:`load_weights` takes them. None: the ``.safetensors`` file beside the ``.npubin``, if there is
            one.
        threads: default ``NPU_NUM_THREADS``, else the cores this process may use.
        from_source: compile the sources in the file and ignore its binary (CPU target only), so that the code that runs
            is the code that a person can read. A program of unknown origin is safe only if a person has read its
            sources.
        allowed_ops: ops that another library registers and that a mixed model may call; see ``load_ir``.

    Raises:
        ArtifactError: the file is damaged.
        BackendError: the device or, for a mixed model, PyTorch is missing; the message names the ops that need it.
        WeightError: weights are missing or do not fit.
    """
    if isinstance(path, CompiledProgram | MixedProgram):
        program = path
    else:
        program = load_program(path, allowed_ops)
        if weights is None and ((beside := weights_beside(path)).exists() or program.weights):
            if not beside.exists():
                raise WeightError(f"{path} needs {len(program.weights)} weights: pass them, or put them into {beside}")
            weights = beside
    if from_source:
        program = _from_source(program)
    options = {} if threads is None else {"threads": threads}
    backend = get_backend(program.target, **options)
    if isinstance(program, CompiledProgram):
        return Model(program, weights, backend)
    from .partitioned.model import MixedModel

    return MixedModel(program, weights, backend)


def _from_source(program: CompiledProgram | MixedProgram) -> CompiledProgram | MixedProgram:
    from . import native

    if isinstance(program, CompiledProgram):
        return native.from_source(program)
    return replace(program, programs={id: native.from_source(p) for id, p in program.programs.items()})


def weights_beside(path: str | os.PathLike[str]) -> Path:
    """Return the path of the weights that are written with a ``.npubin``."""
    return Path(path).with_suffix(".safetensors")
