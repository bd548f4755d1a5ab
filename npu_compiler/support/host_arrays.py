"""Conversion between numpy arrays and torch tensors, without importing torch unless a tensor is passed."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

_OF_TORCH = {  # dtypes that numpy lacks: the type of the same size that both have
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.int16),
    "float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), np.int8),
}


def is_torch(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    return _is_tensor_type(type(value))  # type: ignore[arg-type]  # types are hashable


@cache
def _is_tensor_type(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "detach")


def to_array(value: Any) -> np.ndarray:
    """Return a numpy array of the same elements, which may share memory. Torch's bfloat16 and float8_e4m3fn become
    ml_dtypes'.

    Raises ``TypeError`` for anything but numpy arrays, numpy scalars and dense torch tensors.
    """
    if is_torch(value):
        try:
            return value.numpy(force=True)
        except TypeError:
            if str(value.dtype).removeprefix("torch.") not in _OF_TORCH:
                raise
        except RuntimeError as error:
            raise TypeError(f"a torch tensor without readable values ({error})") from None
        import torch

        dtype, carrier = _OF_TORCH[str(value.dtype).removeprefix("torch.")]
        bits = value.detach().resolve_neg().view(getattr(torch, np.dtype(carrier).name)).numpy(force=True)
        return bits.view(dtype)
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

    for name, (dtype, carrier) in _OF_TORCH.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)
