"""The weights of a hand-written program: every source of them, recipes, and what is wrong with them."""

from __future__ import annotations

import json
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.support.errors import ArtifactError, WeightError
from npu_runtime import Executor, load_weights

from ..support import handmade


def save_shards(folder: Path, index: bool) -> Path:
    w = handmade.weights()
    safetensors.numpy.save_file({"layer.weight": w["layer.weight"]}, folder / "model-1.safetensors")
    safetensors.numpy.save_file({k: w[k] for k in ("norm.weight", "norm.var")}, folder / "model-2.safetensors")
    if index:
        table = {
            "layer.weight": "model-1.safetensors",
            "norm.weight": "model-2.safetensors",
            "norm.var": "model-2.safetensors",
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        (folder / "other.safetensors").write_text("not listed, so not read")
    return folder


def sources(folder: Path) -> dict[str, Any]:
    w = handmade.weights()
    safetensors.numpy.save_file(w, folder / "w.safetensors")
    np.savez(folder / "w.npz", **w)
    np.savez_compressed(folder / "small.npz", **w)
    for name in ("plain", "indexed"):
        (folder / name).mkdir()
        save_shards(folder / name, name == "indexed")
    return {
        "dict": w,
        "torch": {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in w.items()},
        "safetensors": folder / "w.safetensors",
        "text path": str(folder / "w.safetensors"),
        "npz": folder / "w.npz",
        "compressed npz": folder / "small.npz",
        "shards": folder / "plain",
        "indexed shards": folder / "indexed",
        "index": folder / "indexed" / "model.safetensors.index.json",
    }


def test_every_source_of_weights_gives_the_same(program: CompiledProgram, tmp_path: Path) -> None:
    wanted = {k: v.to_numpy() for k, v in load_weights(program, handmade.weights()).items()}
    assert wanted.keys() == {"w.folded", "bias"}
    for kind, source in sources(tmp_path).items():
        store = load_weights(program, source)
        for name, array in wanted.items():
            np.testing.assert_array_equal(store[name].to_numpy(), array, err_msg=kind)
    assert load_weights(program, handmade.weights()).nbytes == 32


def test_weights_are_a_copy(program: CompiledProgram) -> None:
    weights = handmade.weights()
    store = load_weights(program, weights)
    before = store["w.folded"].to_numpy()
    weights["layer.weight"][:] = 0
    np.testing.assert_array_equal(store["w.folded"].to_numpy(), before)


def without(key: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in handmade.weights().items() if k != key}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (without("norm.var"), "the dict lacks 1 of the 3 tensors that program 'handmade' needs: norm.var"),
        ({**without("norm.var"), "norm.vor": 1}, "needs: norm.var; did you mean 'norm.vor'"),
        ({}, "lacks 3 of the 3 tensors"),
        (None, "lacks 3 of the 3 tensors"),
        (
            {**handmade.weights(), "norm.var": np.ones(5, np.float32)},
            r"'norm.var' is float32\[5\], expected float32\[4\]",
        ),
        ({**handmade.weights(), "norm.var": np.ones(4)}, r"'norm.var' is float64\[4\], expected float32\[4\]"),
        ({**handmade.weights(), "norm.var": torch.ones(4, dtype=torch.int32)}, r"'norm.var' is int32\[4\]"),
        ({**handmade.weights(), "norm.var": torch.ones(4, dtype=torch.uint32)}, "weight 'norm.var': unknown dtype"),
        ({**handmade.weights(), "norm.var": [1, 1, 1, 1]}, "weight 'norm.var': list is neither"),
        ({**handmade.weights(), "norm.var": np.ones(4, np.uint32)}, "weight 'norm.var': numpy dtype uint32 has no IR"),
        (3, "weights from a int: pass a dict of tensors or a path"),
        ("/nowhere/w.safetensors", r"/nowhere/w\.safetensors: cannot be read: No such file"),
        ("/nowhere/w.npz", r"/nowhere/w\.npz: cannot be read: No such file"),
    ],
)
def test_wrong_weights(program: CompiledProgram, weights: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        load_weights(program, weights)


def test_wrong_weight_files(program: CompiledProgram, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightError, match=r"this directory holds no \.safetensors file"):
        load_weights(program, tmp_path / "empty")
    both = save_shards(tmp_path, index=False)
    safetensors.numpy.save_file({"norm.var": np.ones(4, np.float32)}, tmp_path / "model-3.safetensors")
    with pytest.raises(WeightError, match=r"'norm.var' is both in .*model-2.* and in .*model-3"):
        load_weights(program, both)
    for text in ("{}", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'):
        (tmp_path / "m.safetensors.index.json").write_text(text)
        with pytest.raises(WeightError, match=r"not an index of shards|outside of the index"):
            load_weights(program, tmp_path)
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(WeightError, match=r"bad\.npz: not a readable \.npz"):
        load_weights(program, tmp_path / "bad.npz")
    (tmp_path / "zero.safetensors").touch()
    with pytest.raises(WeightError, match="offset 0: the file ends within its header"):
        load_weights(program, tmp_path / "zero.safetensors")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_in_weights_is_reported(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    program, g = handmade.program(), Graph()
    g.outputs = [("w.folded", g.weight("w", (4,), dtype).cast("float32")), ("bias", g.const(np.zeros(4), "float32"))]
    w = np.array([1, -np.inf, np.inf, -0.0], kind)
    program.recipes, program.weights = g, [type(program.weights[0])("w", (4,), dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(program, {"w": w})
    w[3] = -np.nan
    with pytest.warns(RuntimeWarning, match="weight 'w' contains NaN"):
        load_weights(program, {"w": w})


def test_bfloat16_and_bool_through_files(program: CompiledProgram, tmp_path: Path) -> None:
    g = Graph()
    half, flag = g.weight("half", (4,), "bfloat16"), g.weight("flag", (4,), "bool")
    g.outputs = [("w.folded", g.pointwise(lambda h, f: expr.where(f, h, -h), half, flag).cast("float32")),
                 ("bias", g.const(np.zeros(4), "float32"))]  # fmt: skip
    spec = type(program.weights[0])
    mixed = replace(program, recipes=g, weights=[spec("half", (4,), "bfloat16"), spec("flag", (4,), "bool")])
    data = {"half": np.array([1, 2, 3, 4], ml_dtypes.bfloat16), "flag": np.array([True, False, True, False])}
    safetensors.numpy.save_file(data, tmp_path / "w.safetensors")
    np.savez(tmp_path / "w.npz", **data)
    tensors = {
        "half": torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True, False]),
    }
    for source in (data, tensors, tmp_path / "w.safetensors", tmp_path / "w.npz"):
        assert load_weights(mixed, source)["w.folded"].to_numpy().tolist() == [1, -2, 3, -4]


def test_intermediate_values_are_dropped() -> None:
    """A chain of recipes over a 4 MB weight holds two values at a time, not all of them."""
    g = Graph()
    x = g.weight("x", (1 << 20,), "float32")
    for _ in range(20):
        x = g.permute(g.reshape(x * 1.5, (1 << 10, 1 << 10)), (1, 0)).reshape(1 << 20)
    program = handmade.program()
    g.outputs = [("w.folded", x)]
    program.recipes, program.weights = g, [type(program.weights[0])("x", (1 << 20,), "float32")]
    program.buffers = [replace(program.buffers[4], shape=(1 << 20,))]
    data = {"x": np.ones(1 << 20, np.float32)}
    tracemalloc.start()
    try:
        load_weights(program, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 7 * 4 * 2**20


def test_a_recipe_that_reads_outside_is_an_error() -> None:
    program, g = handmade.program(), Graph()
    w = g.weight("w", (2,), "float32")
    g.outputs = [("w.folded", g.elementwise((4,), [w], expr.load(0, "float32", [expr.index(0)])))]
    program.recipes, program.weights = g, [type(program.weights[0])("w", (2,), "float32")]
    program.buffers = program.buffers[4:5]
    with pytest.raises(ArtifactError, match=r"a weight recipe cannot be evaluated: .*index out of range"):
        load_weights(program, {"w": np.zeros(2, np.float32)})


def test_weights_of_another_program_are_refused(program: CompiledProgram) -> None:
    other = load_weights(replace(program, buffers=program.buffers[5:6]), handmade.weights())
    with pytest.raises(WeightError, match=r"weight buffer 'w\.folded' is not in the given store"):
        Executor(program, other, entry="main")
