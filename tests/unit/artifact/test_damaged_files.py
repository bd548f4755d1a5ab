"""Damaged files: whatever is done to them, loading gives a typed error or a program that works, never a crash."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_compiler.support.errors import BackendError, WeightError
from npu_runtime import CPUBackend, load_weights

from ...support import handmade

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)

ODD = st.one_of(
    st.sampled_from([
        0, 1, -1, 2, 3, 7, 31, 255, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, -(2**63), True, False, None,
        0.5, -0.0, float("nan"), float("inf"), 1e308, "", "x", "main", "float32", "int64", "bool", "complex64",
        "npu_main", "npu_abi", "arena", "state", "output", "weight", "const", "a", "load", "index", "where",
        "\0", "é" * 9, b"", b"\0" * 16,
        [], {}, [[]], [0], [0, 0], [1, 1, 1], [2**40], [-1], [2**62, 4], [["const", "float32", [], 1.0]],
    ]),
    st.integers(-(2**63), 2**64 - 1), st.integers(-4, 40), st.floats(), st.text(max_size=4), st.binary(max_size=9),
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    found, stack = [], [value]
    while stack:
        inner = stack.pop()
        for key in inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
            found.append((inner, key))
            stack.append(inner[key])
    return found


def mutate(tree: Any, data: st.DataObject) -> None:
    """One change somewhere: another value, a near number, a value from elsewhere in the tree, one more or one less."""
    spots = places(tree)
    container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
    old = container[key]
    action = data.draw(st.sampled_from(["odd", "near", "swap", "drop", "double"]))
    if action == "near" and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = data.draw(st.sampled_from([old + 1, old - 1, -old, old * 2, old // 2 if old == old else 0]))
    elif action == "swap":
        other, place = spots[data.draw(st.integers(0, len(spots) - 1))]
        container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(old)
    elif action == "drop":
        del container[key]
    elif action == "double" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    else:
        container[key] = data.draw(ODD)


# -- safetensors ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@cache
def tensors() -> tuple[dict[str, Any], bytes]:
    """Header and data of a good file."""
    raw = safetensors.numpy.save(handmade.weights())
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@cache
def small_program() -> Any:
    return handmade.program()


def try_weights(path: Path, raw: bytes, same: Callable[[], bool]) -> None:
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            store = load_weights(small_program(), path, CPUBackend(1))
        except (WeightError, BackendError) as error:
            assert str(error)
            return
    if same():
        good = load_weights(small_program(), handmade.weights(), CPUBackend(1))
        np.testing.assert_array_equal(store["w.folded"].to_numpy(), good["w.folded"].to_numpy())


@settings(FUZZ, max_examples=500)
@given(data=st.data())
def test_a_forged_safetensors_header(data: st.DataObject, folder: Path) -> None:
    header, body = copy.deepcopy(tensors())
    for _ in range(data.draw(st.sampled_from([1, 1, 2, 4]))):
        if places(header):
            mutate(header, data)
    try:
        text = json.dumps(header, default=repr).encode()
    except (ValueError, TypeError):  # a key that JSON cannot hold
        return
    length = data.draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 2**63, 2**64 - 1]))
    raw = length.to_bytes(8, "little") + text + body
    kept = {k: v for k, v in header.items() if k in ("layer.weight", "norm.weight", "norm.var")}
    wanted = {k: v for k, v in tensors()[0].items() if k in kept}
    try_weights(folder / "w.safetensors", raw, lambda: kept == wanted and len(kept) == 3)


@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_damaged_safetensors_bytes(data: st.DataObject, folder: Path) -> None:
    raw = bytearray(safetensors.numpy.save(handmade.weights()))
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["flip", "truncate", "insert"])):
        case "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        case "truncate":
            del raw[at:]
        case _:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    try_weights(folder / "w.safetensors", bytes(raw), lambda: False)


@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_damaged_npz_bytes(data: st.DataObject, folder: Path) -> None:
    path = folder / "w.npz"
    np.savez(path, **handmade.weights())
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try_weights(path, bytes(raw), lambda: False)
