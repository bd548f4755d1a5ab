"""The inputs and outputs that a caller passes: their order, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram, IOSpec
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.support import dtypes
from npu_compiler.support.errors import InputError, WeightError
from npu_compiler.support.host_arrays import to_array

from .arrays import widens
from .device import DeviceBuffer

Inputs = Mapping[str, Any] | Sequence[Any] | np.ndarray | DeviceBuffer


def misplaced(form: str, *given: Any) -> str:
    """Return the message for arguments that are not those of ``form``, with the types that were given."""
    return f"arguments are {form}, got ({', '.join(type(a).__name__ for a in given if a is not None)})"


def check_order(program: Any, weights: Any, backend: Any) -> None:
    """Raise ``WeightError`` unless the arguments can be a program, its weights and a backend, in this order."""
    backends = [hasattr(a, "load_entry") for a in (program, weights, backend)]
    if not isinstance(program, CompiledProgram) or isinstance(weights, CompiledProgram) or backends[1]:
        raise WeightError(misplaced("(program, weights, backend)", program, weights, backend))
    if backend is not None and not backends[2]:
        raise WeightError(misplaced("(program, weights, backend)", program, weights, backend))


def ordered(specs: Sequence[IOSpec | TensorSpec], values: Any, what: str) -> list[Any]:
    """Return the values in the order of ``specs``. Raises ``InputError`` for missing and unknown names."""
    names = [s.name for s in specs]
    if isinstance(values, Mapping):
        missing, unknown = [n for n in names if n not in values], [str(n) for n in values if n not in names]
        if missing or unknown:
            lists = {"missing": missing, "unknown": unknown}
            problem = " and ".join(f"{label} {', '.join(found)}" for label, found in lists.items() if found)
            raise InputError(f"{what}s: {problem}; expected {', '.join(names) or 'none'}")
        return [values[n] for n in names]
    if not isinstance(values, list | tuple):  # a single tensor
        values = [values]
    if len(values) != len(names):
        raise InputError(f"got {len(values)} {what}s, expected {len(names)} ({', '.join(names) or 'none'})")
    return list(values)


def host_input(spec: IOSpec | TensorSpec, value: Any) -> np.ndarray:
    """Return an input as an array of the right shape, in a dtype that can be widened to the right one. Raises
    ``InputError``."""
    array, wanted = host_array(spec, value, "input"), dtypes.numpy_dtype(spec.dtype)
    if array.dtype != wanted and not widens(array.dtype, wanted):
        raise InputError(f"input {spec.name!r}: dtype {array.dtype}, expected {spec.dtype}; convert it explicitly")
    return array


def host_array(spec: IOSpec | TensorSpec, value: Any, what: str) -> np.ndarray:
    """Return ``value`` as an array of the shape of ``spec``, in its own dtype. ``what``: 'input' or 'output', for
    messages. Raises ``InputError`` for another shape or a value that is not an array."""
    try:
        array = to_array(value)
    except TypeError as error:
        raise InputError(f"{what} {spec.name!r}: {error}; expected {spec.dtype}{list(spec.shape)}") from None
    if array.shape != spec.shape:
        raise InputError(f"{what} {spec.name!r}: shape {list(array.shape)}, expected {list(spec.shape)}")
    return array
