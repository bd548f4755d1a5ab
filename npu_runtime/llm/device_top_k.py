"""Sampling from a device top-k digest: the logits stay on the device, and the host reads the largest ones only."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from npu_compiler.support import dtypes

from ..executor import Executor
from .sampling import Candidates

ENTRY = "sample"


class DeviceTopK:
    """Runs the entry point ``sample`` for one token at a time; ``SamplingDecoder`` defines its outputs.

    Args:
        executor: of that entry point.
    """

    def __init__(self, executor: Executor):
        backend = self._backend = executor.backend
        inputs = {s.name: (s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.inputs}
        outputs = [(s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.outputs]
        self._host = {name: backend.host_array(*what) for name, what in inputs.items()}
        self._inputs = {name: backend.allocate_zeros(*what) for name, what in inputs.items()}
        self._outputs = [backend.allocate_zeros(*what) for what in outputs]
        self._digest = [backend.host_array(*what) for what in outputs[1:]]
        self._run = executor.bind(self._inputs, self._outputs)
        self._logits_shape = outputs[0]

    def __call__(self, token: int, position: int, temperature: float) -> DeviceScores:
        """Return the scores of the token that follows ``token`` at ``position``, valid until the next call.

        Args:
            temperature: the logits are divided by it in the digest's first row of sums; above 0.
        """
        for name, value in (("token_ids", token), ("positions", position), ("temperature", temperature)):
            self._host[name].fill(value)
            self._backend.start_copy(self._inputs[name], self._host[name])
        self._run()
        for target, source in zip(self._digest, self._outputs[1:], strict=True):
            self._backend.start_read(target, source)
        self._run.finish()
        values, rows, sums = self._digest
        return DeviceScores(self, values, rows, sums, temperature)

    @cached_property
    def _logits(self) -> np.ndarray:
        return self._backend.host_array(*self._logits_shape)

    def logits(self) -> np.ndarray:
        """Return all logits of the last step, float32[vocab], copied from the device."""
        self._backend.start_read(self._logits, self._outputs[0])
        self._backend.synchronize()
        return self._logits[0]


class DeviceScores:
    """``Scores`` of which the host has only a digest. Logits form a table of C columns: token t is in column t % C.

    Args:
        steps: gives access to all logits.
        values: float32[M, C], the M largest logits of each column, largest first.
        rows: int64[M, C], the rows of these logits.
        sums: float32[2, C], each column's sum of exp((logit - the column's largest) / temperature), and of the same at
            temperature 1.
        temperature: of the first row of ``sums``.
    """

    def __init__(self, steps: DeviceTopK, values: np.ndarray, rows: np.ndarray, sums: np.ndarray, temperature: float):
        self._steps, self._values, self._rows, self._sums = steps, values, rows, sums
        self._temperature = temperature

    def candidates(self) -> Candidates:
        """Return the tokens above the largest M-th value of any column, which no token outside of the digest exceeds.
        NaN sorts as the largest number, so it is the first of its column; in that case all logits are returned."""
        values, columns = self._values.reshape(-1), self._values.shape[1]
        bound = self._values[-1].max()
        if np.isnan(values[:columns].max()):
            return Candidates(None, self.logits())
        found = np.flatnonzero(values > bound)
        ids = self._rows.reshape(-1)[found] * columns + found % columns
        order = np.argsort(ids)
        return Candidates(ids[order], values[found[order]], float(bound))

    def logits(self) -> np.ndarray:
        return self._steps.logits()

    def total(self, temperature: float) -> float:
        assert temperature == self._temperature
        return self._total(0, temperature)

    def log_probability(self, token: int) -> float:
        return self._logit(token) - float(self._values[0].max()) - math.log(self._total(1, 1.0))

    def _total(self, which: int, temperature: float) -> float:
        largest = self._values[0].astype(np.float64)
        sums = self._sums[which].astype(np.float64)
        return float((np.exp((largest - largest.max()) / temperature) * sums).sum())

    def _logit(self, token: int) -> float:
        row, column = divmod(token, self._values.shape[1])
        at = np.flatnonzero(self._rows[:, column] == row)
        return float(self._values[at[0], column]) if at.size else float(self.logits()[token])
