"""Saved states of conversations: bytes, headers, and whole arrays of another shape, dtype or name."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from npu_compiler.artifact.program import BufferSpec
from npu_compiler.weights.files import SafetensorsFile
from npu_runtime import CPUBackend
from npu_runtime.llm.kv_snapshot import load_snapshot, save_snapshot
from npu_runtime.state import State

from ..mutations import mutate_bytes, mutate_tree

_MAX_LEN, _TOKENS, _IDENTITY = 16, (3, 1, 4, 1, 5), b"i" * 32
_SHAPE = (1, 2, _MAX_LEN, 4)


def _state() -> State:
    buffers = [BufferSpec(i, "state", d, _SHAPE, f"{d}_cache") for i, d in enumerate(("float32", "bfloat16"))]
    program: Any = SimpleNamespace(buffers=buffers)
    ones = {b.name: np.ones(_SHAPE, np.float32 if b.dtype == "float32" else ml_dtypes.bfloat16) for b in buffers}
    return State(program, CPUBackend(1), ones)


@cache
def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        save_snapshot(path, _state(), _TOKENS, _MAX_LEN, _IDENTITY)
        return path.read_bytes()


def _other_arrays(rng: random.Random, data: bytes, folder: Path) -> bytes:
    path = folder / "whole"
    path.write_bytes(data)
    file = SafetensorsFile(path)
    arrays = {name: file.read(name) for name in file.names()}
    name = rng.choice(list(arrays))
    shape = rng.choice(((), (0,), (5,), (1, 5), (17,), (1, 2, 5, 4), (1, 2, 6, 4), _SHAPE))
    dtype = rng.choice((np.int64, np.int32, np.float32, np.uint8, np.bool_, ml_dtypes.bfloat16))
    arrays[rng.choice((name, name, "other"))] = np.ones(shape, dtype)
    return safetensors.numpy.save(arrays)


def _other_header(rng: random.Random, data: bytes, folder: Path) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    mutate_tree(rng, header, ("F32", "I64", [0, 40], [5], []))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _other_bytes(rng: random.Random, data: bytes, folder: Path) -> bytes:
    return mutate_bytes(rng, data)


def case(rng: random.Random, folder: Path) -> None:
    data = _file()
    path = folder / "damaged"
    damage = rng.choice((_other_arrays, _other_header, _other_bytes))
    path.write_bytes(damage(rng, data, folder))
    state = _state()
    before = state.snapshot()
    try:
        tokens = load_snapshot(path, state, rng.choice((_MAX_LEN, _MAX_LEN, 4)), _IDENTITY)
        assert all(type(token) is int for token in tokens)
    except Exception:
        after = state.snapshot()
        assert all(np.array_equal(after[key], before[key]) for key in before), "a refused state was half loaded"
        raise
