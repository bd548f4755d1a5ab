"""Asynchronous greedy decoding: the device feeds each token into the next step, and the host reads tokens later.

The host launches one step more than it has read, so the device never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from npu_compiler.support import dtypes

from ..executor import Executor
from .sampling import bad_logits

ENTRY = "greedy"
_STEPS = 2  # launched but not read yet, at most


class AsyncGreedy:
    """Runs the entry point ``greedy`` (see ``GreedyDecoder``), which keeps its next token and position as state.

    Args:
        executor: of that entry point; its outputs are a token int64[1] and the token's logit float32[1].
    """

    def __init__(self, executor: Executor):
        self._backend, self._state = executor.backend, executor.state
        dtype, host_array = np.dtype(np.int64), self._backend.host_array
        self._input = {name: host_array((1,), dtype) for name in ("next_token", "next_position")}
        outputs = [self._backend.allocate_zeros(o.shape, dtypes.numpy_dtype(o.dtype)) for o in executor.outputs]
        self._outputs, self._run = outputs, executor.bind([], outputs)
        self._slots = [[host_array(b.shape, b.dtype) for b in outputs] for _ in range(_STEPS)]
        self._pending: deque[tuple[Callable[[], None], int]] = deque()
        self._launched = 0

    def begin(self, token: int, position: int) -> None:
        """Start a new answer: the next step reads ``token`` at ``position``. Steps still pending are dropped."""
        self._drain()
        for (name, array), value in zip(self._input.items(), (token, position), strict=True):
            array[0] = value
            self._backend.start_copy(self._state[name], array)

    def next(self, more: int) -> int:
        """Return the token id of the next step.

        Args:
            more: how many further steps may be launched, all of them within the context.

        Raises:
            BackendError: the token's logit is NaN or infinite.
        """
        while len(self._pending) < min(_STEPS, 1 + more):
            self._launch()
        wait, slot = self._pending.popleft()
        wait()
        token, score = int(self._slots[slot][0][0]), float(self._slots[slot][1][0])
        if not np.isfinite(score):
            raise bad_logits(score)
        return token

    def _launch(self) -> None:
        slot = self._launched % _STEPS
        self._run()
        for target, source in zip(self._slots[slot], self._outputs, strict=True):
            self._backend.start_read(target, source)
        self._pending.append((self._backend.mark(), slot))
        self._launched += 1

    def _drain(self) -> None:
        """Drop pending steps. Their writes to the caches are overwritten before they are read."""
        if self._pending:
            self._backend.synchronize()
            self._pending.clear()
