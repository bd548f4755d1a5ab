"""Conversions between torch tensors and NumPy arrays that keep the dtype."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..support import dtypes
from ..support.errors import CaptureError, WeightError
from ..support.host_arrays import to_array, to_torch

__all__ = ["dtype_name", "numpy_to_tensor", "state_dict_numpy", "tensor_to_numpy"]


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the IR's name of a torch dtype.

    Raises:
        CaptureError: the IR does not have the dtype; the message begins with ``where``.
    """
    try:
        return dtypes.parse(dtype)
    except ValueError as e:
        raise CaptureError(f"{where}: {e}") from e


def tensor_to_numpy(t: torch.Tensor) -> np.ndarray:
    """Return the values of ``t``, which share its memory if it is on the CPU. bfloat16 becomes ml_dtypes' type."""
    return to_array(t if type(t) in (torch.Tensor, torch.nn.Parameter) else t.as_subclass(torch.Tensor))


def numpy_to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor of the array's dtype (also ``ml_dtypes.bfloat16``), which shares the array's memory if that is
    writable."""
    tensor: torch.Tensor = to_torch(array if array.flags.writeable else array.copy())
    return tensor


def state_dict_numpy(
    model: torch.nn.Module | torch.export.ExportedProgram, needed: Container[str] | None = None
) -> dict[str, np.ndarray]:
    """Return ``model.state_dict()`` as numpy arrays that share memory with the CPU tensors of the model.

    Tied weights appear under each of their keys and share one array's memory. Non-persistent buffers are not part of a
    state_dict; ``capture`` stores their values as constants of the IR.

    Args:
        needed: the keys that must have an array; of the others, those without a numpy equivalent are left out. None:
            all keys.

    Raises:
        WeightError: a tensor has no values (meta device) or a layout or dtype without a numpy equivalent.
    """
    arrays: dict[str, np.ndarray] = {}
    tensors = model.state_dict() if isinstance(model, torch.nn.Module) else model.state_dict
    for key, t in tensors.items():
        objection = _objection(t, key)
        if objection is None:
            arrays[key] = tensor_to_numpy(t)
        elif needed is None or key in needed:
            raise WeightError(f"{key}: {objection}")
    return arrays


def _objection(t: Any, key: str) -> str | None:
    """Return why a value of a state_dict has no numpy equivalent, or None."""
    if not isinstance(t, torch.Tensor):
        return f"the state_dict holds a {type(t).__name__}, expected a tensor"
    if t.is_meta:
        return "is on the meta device and has no values; load or initialise the model first"
    if is_traceable_wrapper_subclass(t):
        return f"a {type(t).__name__} has no numpy form; replace it by {key}.dequantize()"
    if t.layout != torch.strided or t.is_quantized:
        return f"{t.layout} {t.dtype} tensors have no numpy form; convert it to a dense float tensor"
    try:
        dtypes.parse(t.dtype)
    except ValueError as e:
        return str(e)
    return None
