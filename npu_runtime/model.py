"""A compiled program as a Python callable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import BackendError, InputError
from npu_compiler.support.host_arrays import is_torch, to_torch

from .arguments import Inputs
from .backends.base import Backend, get_backend
from .executor import Executor
from .profiler import EntryProfile
from .state import State
from .weight_loader import WeightStore, load_weights


class Model:
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

    def run(self, inputs: Inputs, entry: str | None = None) -> dict[str, np.ndarray]:
        """Run once and return the outputs by name; see :meth:`Executor.run`."""
        return self.executor(entry).run(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once with inputs in order or by name. Returns the output, or a tuple of outputs: torch tensors if an
        input is one, else numpy arrays."""
        executor = self._executors.get(self._default) or self.executor()
        if not kwargs and len(args) == len(executor.inputs):
            outputs: list[Any] = executor.run_ordered(args)
        else:
            outputs = list(executor.run(self._named(args, kwargs)).values())
        if any(map(is_torch, args)) or any(map(is_torch, kwargs.values())):
            outputs = [to_torch(o) for o in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs by name."""
        names = [i.name for i in self.executor().inputs]
        if len(args) > len(names):
            raise InputError(f"got {len(args)} inputs, expected {len(names)} ({', '.join(names) or 'none'})")
        inputs = dict(zip(names, args, strict=False))
        twice = sorted(inputs.keys() & kwargs.keys())
        if twice:
            raise InputError(f"input {twice[0]!r} is given twice")
        return {**inputs, **kwargs}

    def reset(self) -> None:
        """Return to the initial state."""
        self.state.reset()

    def profile(
        self, inputs: Inputs | None = None, runs: int = 20, warmup: int = 3, entry: str | None = None
    ) -> EntryProfile:
        """See :meth:`Executor.profile`."""
        return self.executor(entry).profile(inputs, runs, warmup)

    def close(self) -> None:
        """Free weights, arenas and threads. Outputs that were returned stay valid."""
        self._executors.clear()
        self._weights = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load(
    path: str | os.PathLike[str] | CompiledProgram,
    weights: Any = None,
    threads: int | None = None,
    from_source: bool = False,
) -> Model:
    """Load a ``.npubin`` (or take a program in memory) with its weights.

    ``weights``: as :func:`load_weights` takes them. ``threads``: default ``NPU_NUM_THREADS``, else the CPUs this
    process may use. ``from_source``: compile the sources in the file and ignore its binary (CPU target only), so that
    the code that runs is the code that a person can read. A program of unknown origin is safe only if somebody has
    read its sources. Raises ``ArtifactError``, ``WeightError`` or ``BackendError``.
    """
    program = path if isinstance(path, CompiledProgram) else CompiledProgram.load(path)
    if from_source:
        from . import native

        program = native.from_source(program)
    options = {} if threads is None else {"threads": threads}
    return Model(program, weights, get_backend(program.target, **options))
