"""The state of a conversation in a file: the tokens so far with their keys and values, as safetensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.files import write_atomic
from npu_compiler.weight_files import SafetensorsFile

from .executor import State
from .weight_loader import WeightStore

_TOKENS, _IDENTITY = "npusim.tokens", "npusim.identity"
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def fingerprint(config: str, store: WeightStore) -> bytes:
    """Tells models apart: a digest of the config and of samples spread over all packed weights."""
    digest = hashlib.sha256(config.encode())
    for name in sorted(store):
        array = np.asarray(store[name].to_numpy(copy=False), order="C")
        data = array.reshape(-1).view(np.uint8)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        for at in np.linspace(0, max(data.size - _SAMPLE_BYTES, 0), _SAMPLES).astype(np.int64):
            digest.update(data[at : at + _SAMPLE_BYTES].data)
    return digest.digest()


def save_kv(path: str | os.PathLike[str], state: State, tokens: Sequence[int], max_len: int, identity: bytes) -> None:
    """Write the first ``len(tokens)`` positions of all caches. Raises ``InputError`` if the file cannot be written."""
    import safetensors.numpy

    arrays: dict[str, np.ndarray] = {
        _TOKENS: np.array(tokens, np.int64),
        _IDENTITY: np.frombuffer(identity, np.uint8),
    }
    for key, array in state.snapshot().items():
        arrays[key] = np.asarray(array[_valid(array.shape, max_len, len(tokens))], order="C")
    try:
        write_atomic(path, safetensors.numpy.save(arrays))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def load_kv(path: str | os.PathLike[str], state: State, max_len: int, identity: bytes) -> list[int]:
    """Read what :func:`save_kv` wrote into ``state`` and return the tokens. Nothing is changed unless all of it fits.

    Raises ``InputError`` for a file of another kind, of other weights or of a longer context than ``max_len``.
    """
    try:
        file = SafetensorsFile(Path(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except WeightError as error:
        raise InputError(f"not a saved state: {error}") from None
    names = set(file.names())
    if not {_TOKENS, _IDENTITY} <= names:
        raise InputError(f"{path}: not a saved state: it holds no tokens")
    if file.read(_IDENTITY).tobytes() != identity:
        raise InputError(f"{path}: this state was saved with another model, other weights or another dtype")
    tokens: list[int] = file.read(_TOKENS).tolist()
    if len(tokens) > max_len:
        raise InputError(f"{path}: the state has {len(tokens)} tokens, but the context holds {max_len}; load the model "
                         f"with max_len={len(tokens)} or more")  # fmt: skip
    if names - {_TOKENS, _IDENTITY} != set(state):
        raise InputError(f"{path}: the state has other caches than the model; it was saved by another version")
    full = {}
    for key, buffer in state.items():
        array = np.zeros(buffer.shape, buffer.dtype)
        part, saved = array[_valid(buffer.shape, max_len, len(tokens))], file.read(key)
        if (saved.shape, saved.dtype) != (part.shape, part.dtype):
            got, expected = f"{saved.dtype}{list(saved.shape)}", f"{part.dtype}{list(part.shape)}"
            raise InputError(f"{path}: cache {key!r} is {got}, expected {expected}")
        part[...] = saved
        full[key] = array
    for key, array in full.items():
        state.write(key, array)
    return tokens


def _valid(shape: Sequence[int], max_len: int, count: int) -> tuple[slice, ...]:
    """The part of a cache that holds ``count`` positions: a cut along its axis of ``max_len``, the last such one but
    never the innermost. A state without such an axis is kept whole."""
    axes = [i for i, n in enumerate(shape[:-1]) if n == max_len]
    return tuple(slice(count if axes and i == axes[-1] else n) for i, n in enumerate(shape))
