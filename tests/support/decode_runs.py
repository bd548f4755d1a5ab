"""Runs the decode step of a language model from given caches."""

from __future__ import annotations

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_runtime import Executor, load_weights
from npu_runtime.backends.base import Backend
from npu_runtime.state import State


def run_decode(
    program: CompiledProgram,
    backend: Backend,
    weights: dict[str, np.ndarray],
    state: dict[str, np.ndarray],
    positions: tuple[int, ...],
) -> list[np.ndarray]:
    """Decode a token at each of ``positions``, each time from ``state``.

    Return the outputs of entry 'decode', then the row that it stores in every cache.
    """
    store = load_weights(program, weights, backend)
    states = State(program, backend, store.state)
    executor = Executor(program, store, backend, "decode", states)
    results = []
    for position in positions:
        for key, value in state.items():
            states.write(key, value)
        feeds = {"token_ids": np.array([[7]]), "positions": np.array([position]), "last": np.array([0])}
        results += [np.asarray(v, np.float32) for v in executor.run(feeds).values()]
        results += [np.asarray(v[:, :, position], np.float32) for v in states.snapshot().values()]
    return results
