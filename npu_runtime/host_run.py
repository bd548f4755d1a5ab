"""Runs on numpy arrays, for devices that compute in the host's memory; as much as possible is prepared beforehand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support.dtypes import numpy_dtype

from .arrays import aligned_zeros, passing_empty
from .device import HostLaunch
from .locks import reentered

if TYPE_CHECKING:
    from .executor import Executor

STAGED_BYTES = 16 << 10  # larger tensors take longer to copy than their addresses take to pass


def host_run(executor: Executor) -> HostRun | None:
    """Return the run of ``executor`` on arrays, or None if its device does not compute in the host's memory."""
    entry = executor.entry
    uses = Counter([s.buffer for s in (*entry.inputs, *entry.outputs)] + [id for _, id in entry.updates])
    staged: dict[int, np.ndarray] = {}
    passed: dict[int, np.ndarray] = {}
    for spec in (*entry.inputs, *entry.outputs):
        id, dtype = spec.buffer, numpy_dtype(spec.dtype)
        if executor.kind(id) not in ("input", "output") or id in staged:
            continue  # a weight, a state or a part of the arena; or an input that is also an output
        if math.prod(spec.shape) * dtype.itemsize > STAGED_BYTES and uses[id] == 1:
            passed[id] = np.empty(0, dtype)
        else:
            staged[id] = aligned_zeros(spec.shape, dtype)
    launch = executor.host_launch({**staged, **passed})
    return None if launch is None else HostRun(executor, launch, staged)


class HostRun:
    """A run on arrays that returns new arrays, by one launch that is bound once.

    Small tensors are *staged*: copied into and out of memory that the launch is bound to. Large tensors are passed by
    address, except those whose memory is a source of copies after the run; that address must not change.
    """

    def __init__(self, executor: Executor, launch: HostLaunch, staged: Mapping[int, np.ndarray]):
        entry = executor.entry
        self._executor, self._lock = executor, executor.state.lock
        self._launch, self._table = launch.untimed, launch.table
        self._checks = [(numpy_dtype(s.dtype), s.shape, at) for at, s in enumerate(entry.inputs)]
        self._staged = [(at, staged[s.buffer]) for at, s in enumerate(entry.inputs) if s.buffer in staged]
        self._passed = [(at, s) for at, s in enumerate(entry.inputs) if s.buffer not in staged]
        known = {id: executor.backend.wrap(array) for id, array in staged.items()}
        self._fresh = [
            (at, s)
            for at, s in enumerate(entry.outputs)
            if executor.kind(s.buffer) == "output" and s.buffer not in staged
        ]
        made = {s.buffer for _, s in self._fresh}
        self._sources = [
            None if s.buffer in made else executor.source(known, s.buffer).to_numpy(copy=False).reshape(s.shape)
            for s in entry.outputs
        ]
        self._moves = executor.moves(known)

    def __call__(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run once. ``values``: one for each input, in order; see :meth:`Executor.run`."""
        given, executor, lock = [], self._executor, self._lock
        for value, (dtype, shape, at) in zip(values, self._checks, strict=True):
            known = type(value) is np.ndarray and value.dtype is dtype and value.shape == shape
            given.append(value if known else executor.host_value(at, value))
        fresh = [passing_empty(s.shape, numpy_dtype(s.dtype)) for _, s in self._fresh] if self._fresh else ()
        places = self._addresses(given, fresh) if self._passed or fresh else ()
        with lock.mutex:
            if lock.busy:
                raise reentered()
            try:
                lock.busy = True
                for at, memory in self._staged:
                    memory[...] = given[at]
                for id, address in places:
                    self._table[id] = address
                status = self._launch()
                if status:
                    raise executor.failure(status)
                results = [None if source is None else source.copy() for source in self._sources]
                for target, source in self._moves:
                    executor.backend.copy(target, source)
            finally:
                lock.busy = False
        for (at, _), array in zip(self._fresh, fresh, strict=True):
            results[at] = array
        return results  # type: ignore[return-value]

    def _addresses(self, given: list[np.ndarray], fresh: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        """Return (buffer id, address) of the passed tensors. Inputs of another layout are replaced by copies in
        ``given``."""
        for at, spec in self._passed:
            array, wanted = given[at], numpy_dtype(spec.dtype)
            if array.dtype != wanted or not (array.flags.c_contiguous and array.flags.aligned):
                given[at] = array.astype(wanted, order="C", copy=True)
        inputs = [(s.buffer, given[at].ctypes.data) for at, s in self._passed]
        return inputs + [(s.buffer, array.ctypes.data) for (_, s), array in zip(self._fresh, fresh, strict=True)]
