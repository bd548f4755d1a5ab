"""The entry points of a decoder for chunks of N tokens, bound to fixed inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import dtypes
from npu_compiler.support.errors import ArtifactError

from ..backends.base import Backend, DeviceBuffer
from ..executor import Executor
from ..state import State
from ..weight_loader import WeightStore
from . import async_greedy, device_top_k

_INPUTS = ("token_ids", "positions", "last")


class EntryRun:
    """An entry point for ``size`` tokens and ``vocab`` logits, bound to fixed inputs and outputs."""

    def __init__(self, executor: Executor):
        backend = executor.backend
        self.executor, self._backend = executor, backend
        specs = {s.name: s for s in executor.inputs}
        (output,) = executor.outputs
        self.size, self.vocab = specs["token_ids"].shape[1], output.shape[1]
        self._host = {n: backend.host_array(specs[n].shape, np.dtype(np.int64)) for n in _INPUTS}
        self._inputs = {n: backend.wrap(self._host[n]) for n in _INPUTS}
        self._copied = [n for n, b in self._inputs.items() if not _shared(b, self._host[n])]
        self._result = backend.host_array(output.shape, dtypes.numpy_dtype(output.dtype))
        self._logits = backend.wrap(self._result)
        self._separate = not _shared(self._logits, self._result)
        self._steps = np.arange(self.size)
        self._run = executor.bind(self._inputs, [self._logits])

    def __call__(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Compute up to ``size`` tokens, the first of which is at position ``start``.

        Returns:
            The logits float32[vocab] that follow the last one, valid until the next call.
        """
        host = self._host
        host["token_ids"][0, : len(tokens)] = tokens
        host["token_ids"][0, len(tokens) :] = 0
        np.add(self._steps, start, out=host["positions"])
        host["last"][0] = len(tokens) - 1
        for name in self._copied:
            self._backend.start_copy(self._inputs[name], host[name])
        self._run()
        if self._separate:
            self._backend.start_read(self._result, self._logits)
        self._run.finish()
        return self._result[0]


def _shared(buffer: DeviceBuffer, array: np.ndarray) -> bool:
    return np.shares_memory(buffer.to_numpy(copy=False), array)


def entry_runs(program: CompiledProgram, store: WeightStore, backend: Backend, state: State) -> dict[int, EntryRun]:
    """Bind the entry points of a language model, by the number of tokens that they compute.

    Raises ``ArtifactError`` if an entry point has other inputs or outputs, or if there is none for a single token.
    """
    names = {}
    for name, entry in program.entries.items():
        if name in (async_greedy.ENTRY, device_top_k.ENTRY):
            continue
        shapes = {i.name: i.shape for i in entry.inputs}
        if set(shapes) != set(_INPUTS) or [len(o.shape) for o in entry.outputs] != [2]:
            raise ArtifactError(
                f"entry point {name!r} of program {program.name!r} takes {', '.join(shapes)}; "
                f"a language model takes {', '.join(_INPUTS)} and returns logits"
            )
        names[shapes["token_ids"][-1]] = name
    if 1 not in names:
        raise ArtifactError(f"program {program.name!r} has no entry point for a single token, only for {sorted(names)}")
    return {n: EntryRun(Executor(program, store, backend, names[n], state)) for n in sorted(names)}
