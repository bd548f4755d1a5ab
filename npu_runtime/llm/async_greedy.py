"""Greedy decoding by the device itself: the host asks for one step more than it has seen, and reads tokens later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from npu_compiler.support import dtypes
from npu_compiler.support.errors import BackendError

from ..executor import Executor

ENTRY = "greedy"
_STEPS = 2  # under way at most


class RunAhead:
    """Steps of the entry point ``greedy``, which keeps its next token and position in the program's state."""

    def __init__(self, executor: Executor):
        self._backend, self._state = executor.backend, executor.state
        dtype, host_array = np.dtype(np.int64), self._backend.host_array
        self._input = {name: host_array((1,), dtype) for name in ("next_token", "next_position")}
        # the token int64[1] and its logit float32[1]
        outputs = [self._backend.allocate_zeros(o.shape, dtypes.numpy_dtype(o.dtype)) for o in executor.outputs]
        self._outputs, self._run = outputs, executor.bind([], outputs)
        self._slots = [[host_array(b.shape, b.dtype) for b in outputs] for _ in range(_STEPS)]
        self._under_way: deque[tuple[Callable[[], None], int]] = deque()
        self._launched = 0

    def begin(self, token: int, position: int) -> None:
        """The next step reads ``token`` at ``position``."""
        self._drain()
        for (name, array), value in zip(self._input.items(), (token, position), strict=True):
            array[0] = value
            self._backend.start_copy(self._state[name], array)

    def next(self, more: int) -> int:
        """The token of the next step. ``more``: steps that may follow it, all of them within the context."""
        while len(self._under_way) < min(_STEPS, 1 + more):
            self._launch()
        wait, slot = self._under_way.popleft()
        wait()
        token, score = int(self._slots[slot][0][0]), float(self._slots[slot][1][0])
        if not np.isfinite(score):
            raise BackendError(
                f"the model's logits hold {score}; its weights are damaged, or too large for the dtype: try float32"
            )
        return token

    def _launch(self) -> None:
        slot = self._launched % _STEPS
        self._run()
        for target, source in zip(self._slots[slot], self._outputs, strict=True):
            self._backend.start_read(target, source)
        self._under_way.append((self._backend.mark(), slot))
        self._launched += 1

    def _drain(self) -> None:
        """Forget steps that nobody will ask for; what they write into the caches is overwritten before it is read."""
        if self._under_way:
            self._backend.synchronize()
            self._under_way.clear()
