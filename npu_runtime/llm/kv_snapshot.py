"""KV snapshots: the tokens of a conversation with their keys and values, in a safetensors file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from npu_compiler.support.dtypes import FLOAT8, numpy_dtype
from npu_compiler.support.errors import InputError, WeightError
from npu_compiler.support.files import write_atomic
from npu_compiler.weights.files import SafetensorsFile

from ..state import State
from ..weight_loader import WeightStore

_TOKENS, _IDENTITY = "npusim.tokens", "npusim.identity"
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def fingerprint(config: str, store: WeightStore) -> bytes:
    """Return 32 bytes that differ between models: a SHA-256 of ``config`` and of samples of all packed weights."""
    digest = hashlib.sha256(config.encode())
    for name in sorted(store):
        array = np.asarray(store[name].to_numpy(copy=False), order="C")
        data = array.reshape(-1).view(np.uint8)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        for at in np.linspace(0, max(data.size - _SAMPLE_BYTES, 0), _SAMPLES).astype(np.int64):
            digest.update(data[at : at + _SAMPLE_BYTES].data)
    return digest.digest()


def save_snapshot(
    path: str | os.PathLike[str], state: State, tokens: Sequence[int], max_len: int, identity: bytes
) -> None:
    """Write ``tokens`` and the first ``len(tokens)`` positions of all caches.

    Args:
        max_len: positions of a cache.
        identity: of ``fingerprint``.

    Raises:
        InputError: the file cannot be written.
    """
    import safetensors.numpy

    arrays: dict[str, np.ndarray] = {
        _TOKENS: np.array(tokens, np.int64),
        _IDENTITY: np.frombuffer(identity, np.uint8),
    }
    for key, array in state.snapshot().items():
        arrays[key] = np.asarray(array[_valid(array.shape, max_len, len(tokens))], order="C")
    try:
        write_atomic(_path(path), safetensors.numpy.save(arrays))
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise InputError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a saved state is a file: expected its path, got a {type(path).__name__}")
    return Path(path)


def load_snapshot(path: str | os.PathLike[str], state: State, max_len: int, identity: bytes) -> list[int]:
    """Read a file of :func:`save_snapshot` into ``state`` and return its tokens.

    ``state`` changes only if the whole file fits.

    Raises:
        InputError: the file cannot be read, is of another kind or another model, or has more than ``max_len`` tokens.
    """
    try:
        file = SafetensorsFile(_path(path))
        tokens = _tokens(path, file, max_len, identity)
        full = _caches(path, file, state, max_len, len(tokens))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except WeightError as error:
        raise InputError(f"not a saved state: {error}") from None
    for key, array in full.items():
        state.write(key, array)
    return tokens


def _tokens(path: str | os.PathLike[str], file: SafetensorsFile, max_len: int, identity: bytes) -> list[int]:
    if not {_TOKENS, _IDENTITY} <= set(file.names()):
        raise InputError(f"{path}: not a saved state: it holds no tokens")
    if file.read(_IDENTITY).tobytes() != identity:
        raise InputError(f"{path}: this state was saved with another model, other weights or another dtype")
    (shape, dtype), array = file.spec(_TOKENS), file.read(_TOKENS)
    if len(shape) != 1 or dtype != "int64":
        raise InputError(f"{path}: not a saved state: its tokens are {dtype}{list(shape)}, not a list of int64")
    tokens: list[int] = array.tolist()
    if len(tokens) > max_len:
        raise InputError(f"{path}: the state has {len(tokens)} tokens, but the context holds {max_len}; load the model "
                         f"with max_len={len(tokens)} or more")  # fmt: skip
    return tokens


def _caches(
    path: str | os.PathLike[str], file: SafetensorsFile, state: State, max_len: int, count: int
) -> dict[str, np.ndarray]:
    if set(file.names()) - {_TOKENS, _IDENTITY} != set(state):
        why = "it was saved with another kv_cache, or by another version"
        raise InputError(f"{path}: the state has other caches than the model; {why}")
    full = {}
    for key, buffer in state.items():
        array = np.zeros(buffer.shape, buffer.dtype)
        part, saved = array[_valid(buffer.shape, max_len, count)], _read(file, key)
        if (saved.shape, saved.dtype) != (part.shape, part.dtype):
            got, expected = f"{saved.dtype}{list(saved.shape)}", f"{part.dtype}{list(part.shape)}"
            raise InputError(f"{path}: cache {key!r} is {got}, expected {expected}")
        part[...] = saved
        full[key] = array
    return full


def _read(file: SafetensorsFile, key: str) -> np.ndarray:
    """Return a cache; numbers of 8 bits, which weights do not have without scales, in their own dtype."""
    return file.raw(key).view(numpy_dtype(FLOAT8)) if file.header(key)[0] == "F8_E4M3" else file.read(key)


def _valid(shape: Sequence[int], max_len: int, count: int) -> tuple[slice, ...]:
    """Return the slices of a cache that hold ``count`` positions. The axis of positions is the last one of size
    ``max_len``, except the innermost. A state without such an axis is saved as a whole."""
    axes = [i for i, n in enumerate(shape[:-1]) if n == max_len]
    return tuple(slice(count if axes and i == axes[-1] else n) for i, n in enumerate(shape))
