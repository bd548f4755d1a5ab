"""Conversion between numpy arrays and torch tensors, without importing torch unless a tensor is passed."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def is_torch(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    return _is_tensor_type(type(value))  # type: ignore[arg-type]  # types are hashable


@cache
def _is_tensor_type(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "detach")


def to_array(value: Any) -> np.ndarray:
    """Return a numpy array of the same elements (torch's bfloat16 becomes ml_dtypes'), which may share memory.

    Raises ``TypeError`` for anything but numpy arrays, numpy scalars and dense torch tensors.
    """
    if is_torch(value):
        try:
            return value.numpy(force=True)
        except TypeError:
            if str(value.dtype) != "torch.bfloat16":
                raise
        except RuntimeError as error:
            raise TypeError(f"a torch tensor without readable values ({error})") from None
        import torch

        bits = value.detach().resolve_neg().view(torch.int16).numpy(force=True)
        return bits.view(_BFLOAT16)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    raise TypeError(f"{type(value).__name__} is neither a numpy array nor a torch tensor")


def is_memory_of(array: np.ndarray, value: Any) -> bool:
    """Whether ``array``, which :func:`to_array` made of ``value``, shares its memory."""
    if array.size == 0:
        return True
    if is_torch(value):
        return bool(value.device.type == "cpu" and value.data_ptr() == array.ctypes.data)
    return isinstance(value, np.ndarray) and np.may_share_memory(array, value)


def to_torch(array: np.ndarray) -> Any:
    """Return a torch tensor that shares the array's memory."""
    import torch

    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
