"""The error of each kernel: its results on the device against float64, for the inputs that it had on the device.

The program is compiled again so that no two buffers share memory: after a run, every buffer still has the values that a
kernel wrote. Each kernel is then repeated in numpy in float64 with the contents of its inputs. The error is therefore
that of this kernel, including the rounding of its results, without the errors of earlier kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.graph import expr
from npu_compiler.graph.expr import Expr
from npu_compiler.pipeline import compile_unshared
from npu_compiler.schedule.anchors import Contraction
from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import Kernel, Operand, Pack, Unpack
from npu_compiler.support import dtypes
from npu_compiler.support.errors import ConfigError
from npu_runtime.executor import Executor

from ..random_arrays import random_array
from .records import KernelError

if TYPE_CHECKING:
    from npu_runtime.partitioned.dag_executor import DAGExecutor

Arrays = dict[int, np.ndarray]


def plan_errors(executor: DAGExecutor, inputs: Sequence[Any] | None) -> dict[int, list[KernelError]]:
    """Return the errors of the kernels of each NPU partition, by its number. ``inputs``: for a plan with one partition;
    other plans get small random numbers. Raises ``ConfigError`` if it is unknown how the partitions were compiled."""
    made = executor.compile_fn
    if not isinstance(made, partial) or made.args:
        raise ConfigError("the accuracy of kernels needs a model that npusim compiled itself, from its IR")
    parts = {p.id: p for p in executor.plan.partitions}
    alone = len(parts) == 1
    return {
        id: kernel_errors(parts[id].ir, loaded, made.keywords, inputs if alone else None)
        for id, loaded in executor.executors.items()
    }


def kernel_errors(
    ir: Any, loaded: Executor, options: Mapping[str, Any], inputs: Sequence[Any] | None
) -> list[KernelError]:
    """Return the error of each kernel, in launch order, of a program compiled from ``ir`` with ``options``."""
    state = compile_unshared(ir, **options)
    assert state.schedule is not None and state.program is not None
    kernels, calls = state.schedule.kernels, state.program.entries["main"].calls
    if [k.name for k in kernels] != [c.name for c in loaded.entry.calls]:
        raise ConfigError(f"program {loaded.program.name!r} was compiled with other options than it says")
    executor = Executor(state.program, loaded.weights, loaded.backend)
    contents = _contents(executor, inputs, [id for call in calls for id in (*call.inputs, *call.outputs)])
    arrays: Arrays = {}
    for kernel, call in zip(kernels, calls, strict=True):
        for operand, id in zip((*kernel.inputs, *kernel.outputs), (*call.inputs, *call.outputs), strict=True):
            arrays[operand.buffer.id] = contents[id].reshape(-1)
    return [_error(kernels, n, arrays) for n in range(len(kernels))]


def _contents(executor: Executor, inputs: Sequence[Any] | None, ids: Sequence[int]) -> Arrays:
    """Return the contents of buffers after a run, by id in the program."""
    backend = executor.backend
    given = [random_array(s.shape, s.dtype) for s in executor.inputs] if inputs is None else inputs
    sources = [backend.allocate_buffer(np.asarray(a), spec=s) for a, s in zip(given, executor.inputs, strict=True)]
    results = [backend.allocate_zeros(s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.outputs]
    run = executor.bind(sources, results)
    run()
    run.finish()
    bound = {s.buffer: b for s, b in zip(executor.inputs, sources, strict=True)}
    bound |= {
        s.buffer: b for s, b in zip(executor.outputs, results, strict=True) if executor.kind(s.buffer) == "output"
    }
    return {id: executor.source(bound, id).to_numpy() for id in dict.fromkeys(ids)}


def _error(kernels: Sequence[Kernel], number: int, arrays: Arrays) -> KernelError:
    kernel = kernels[number]
    if isinstance(kernel, Pack | Unpack):
        return KernelError(note="it only moves data")
    if not any(dtypes.is_float(o.dtype) for o in kernel.outputs):
        return KernelError(note="its results are integers")
    written_later = {o.buffer.id for k in kernels[number:] for o in k.outputs}
    if written_later & {o.buffer.id for o in kernel.inputs}:
        return KernelError(note="it works in place: what it read is gone after the run")
    if any(_overlap(o, later) for o in kernel.outputs for k in kernels[number + 1 :] for later in k.outputs):
        return KernelError(note="a later kernel overwrites its results")
    kept = {o.buffer.id: arrays[o.buffer.id] for o in (*kernel.inputs, *kernel.outputs)}
    stored = _stored(kernel)
    wide = {id: a if id in stored else _widened_array(a) for id, a in kept.items()}
    wide |= {o.buffer.id: np.zeros_like(wide[o.buffer.id]) for o in kernel.outputs}
    try:
        execute(_widened(kernel, stored), wide)
    except (NotImplementedError, ValueError, IndexError) as error:
        return KernelError(note=f"numpy cannot repeat it: {error}")
    pairs = [(view(o, kept), view(o, wide)) for o in kernel.outputs if dtypes.is_float(o.dtype)]
    return _compared(pairs)


def _compared(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> KernelError:
    got = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a, _ in pairs])
    want = np.concatenate([np.asarray(b, np.float64).reshape(-1) for _, b in pairs])
    finite = np.isfinite(want)
    if not finite.any():
        return KernelError(note="it has no finite result")
    difference, scale = np.abs(got[finite] - want[finite]), np.abs(want[finite])
    rms = np.sqrt(np.mean(difference**2)) / (np.sqrt(np.mean(scale**2)) or 1.0)
    return KernelError(float(rms), float(difference.max() / (scale.max() or 1.0)))


def _overlap(a: Operand, b: Operand) -> bool:
    """Whether two windows share an element."""
    if a.buffer.id != b.buffer.id:
        return False
    marks = np.zeros((2, int(np.prod(a.buffer.shape, dtype=np.int64))), np.bool_)
    for mark, operand in zip(marks, (a, b), strict=True):
        view(operand, {operand.buffer.id: mark})[...] = True
    return bool((marks[0] & marks[1]).any())


# -- float64 --------------------------------------------------------------------------------------------------------
def _stored(kernel: Kernel) -> set[int]:
    """Return the buffers whose layout depends on their dtype: right operands, and weights in a format. Their elements
    are exact."""
    operands = [o for o in kernel.inputs if o.format]
    return {o.buffer.id for o in ([*operands, kernel.weight] if isinstance(kernel, Contraction) else operands)}


def _widened_array(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if dtypes.is_float(dtypes.name_of(a.dtype)) else a


def _widened(value: Any, stored: set[int]) -> Any:
    """Return a kernel, or a part of one, in which every float is a float64, except in the buffers ``stored``."""
    if isinstance(value, Expr):
        new: dict[Expr, Expr] = {}
        for x in expr.walk(value):
            new[x] = Expr(x.op, _wide(x.dtype), [new[a] for a in x.args], x.value)
        return new[value]
    if isinstance(value, Operand):
        if value.buffer.id in stored:
            return value
        return replace(value, buffer=replace(value.buffer, dtype=_wide(value.dtype)))
    if isinstance(value, tuple):
        return tuple(_widened(v, stored) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _widened(getattr(value, f.name), stored) for f in fields(value)})
    return value


def _wide(dtype: str) -> str:
    return "float64" if dtypes.is_float(dtype) else dtype
