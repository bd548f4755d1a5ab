"""The runtime on a hand-written program: inputs, outputs, weights, state, threads, memory, all ways to be wrong."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import npu_runtime
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.support.errors import ArtifactError, BackendError, ConfigError, InputError, WeightError
from npu_compiler.targets.cpu import host
from npu_runtime import CPUBackend, Executor, load_weights
from npu_runtime.arrays import aligned_empty
from npu_runtime.native import NativeLibrary, obstacle

from ..support import handmade

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return handmade.program()


@pytest.fixture(scope="module")
def executor(program: CompiledProgram) -> Executor:
    return Executor(program, handmade.weights(), CPUBackend(2), "main")


@pytest.fixture
def step(program: CompiledProgram) -> Executor:
    return Executor(program, handmade.weights(), entry="step")


def check(outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> None:
    wanted = handmade.expected(inputs)
    assert outputs.keys() == wanted.keys()
    for name, array in outputs.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, wanted[name], rtol=2e-7, atol=1e-6)


# -- inputs and outputs ---------------------------------------------------------------------------------------------
def test_run_by_name_and_in_order(executor: Executor) -> None:
    given = handmade.inputs()
    check(executor.run(given), given)
    check(executor.run([given["x"], given["idx"]]), given)
    check(executor.run((given["x"], given["idx"])), given)


def test_outputs_are_fresh(executor: Executor) -> None:
    given = handmade.inputs()
    first = executor.run(given)
    kept = {k: v.copy() for k, v in first.items()}
    executor.run({"x": -given["x"], "idx": given["idx"]})
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])
        assert array.flags.writeable


@pytest.mark.parametrize(
    "change",
    [np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2], lambda x: x[::-1][::-1],
     lambda x: x.astype(np.float16),
     lambda x: x.astype(ml_dtypes.bfloat16), lambda x: x.astype(">f4"), torch.from_numpy,
     lambda x: torch.from_numpy(x).to(torch.bfloat16), lambda x: torch.from_numpy(x.T.copy()).T,
     lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 4)],
)  # fmt: skip
def test_any_layout_of_an_input(executor: Executor, change: Callable[[np.ndarray], Any]) -> None:
    x = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 4  # exact in bfloat16
    idx = np.array([1, 0, 2], np.int32)  # widened
    check(executor.run({"x": change(x), "idx": idx}), {"x": x, "idx": idx})


def test_device_buffers_in_and_out(executor: Executor) -> None:
    given = handmade.inputs()
    backend = executor.backend
    outputs = executor.run_device({k: backend.allocate_buffer(v) for k, v in given.items()})
    check({k: v.to_numpy() for k, v in outputs.items()}, given)
    y = outputs["y"]
    assert (y.shape, y.alloc_shape, y.dtype, y.size_bytes) == ((3, 4), (3, 4), np.float32, 48)
    assert y.native_handle % 64 == 0
    again = executor.run({"x": y, "idx": given["idx"]})
    check(again, {"x": y.to_numpy(), "idx": given["idx"]})
    once = backend.execute(replace_entries(executor.program, "main"), given, handmade.weights())
    check({k: v.to_numpy() for k, v in once.items()}, given)


def replace_entries(program: CompiledProgram, *names: str) -> CompiledProgram:
    """The program with fewer entry points (and without the digest that would notice)."""
    return replace(program, entries={n: program.entries[n] for n in names}, binary=handmade.binary(handmade.SOURCE))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": np.zeros((4, 3), np.float32)}, r"input 'x': shape \[4, 3\], expected \[3, 4\]"),
        ({"x": np.zeros(12, np.float32)}, r"input 'x': shape \[12\], expected \[3, 4\]"),
        ({"x": np.zeros((3, 4))}, "input 'x': dtype float64, expected float32; convert it explicitly"),
        ({"x": np.zeros((3, 4), np.int32)}, "input 'x': dtype int32, expected float32"),
        ({"x": np.zeros((3, 4), bool)}, "input 'x': dtype bool, expected float32"),
        ({"x": np.zeros((3, 4), object)}, "input 'x': dtype object, expected float32"),
        (
            {"x": [[0.0] * 4] * 3},
            r"input 'x': list is neither a numpy array nor a torch tensor; expected float32\[3, 4\]",
        ),
        ({"x": None}, "input 'x': NoneType is neither"),
        ({"idx": np.zeros(3, np.uint64)}, "input 'idx': dtype uint64, expected int64"),
        ({"idx": np.zeros(3, np.float32)}, "input 'idx': dtype float32, expected int64"),
        ({"idx": np.zeros((), np.int64)}, r"input 'idx': shape \[\], expected \[3\]"),
        ({"y": 1}, "inputs: unknown y; expected x, idx"),
    ],
)
def test_wrong_inputs(executor: Executor, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        executor.run({**handmade.inputs(), **inputs})


def test_wrong_number_of_inputs(executor: Executor) -> None:
    x = handmade.inputs()["x"]
    with pytest.raises(InputError, match=r"got 1 inputs, expected 2 \(x, idx\)"):
        executor.run([x])
    with pytest.raises(InputError, match="inputs: missing idx and unknown z; expected x, idx"):
        executor.run({"x": x, "z": x})
    buffer = executor.backend.allocate_buffer(x, (4, 4))
    with pytest.raises(
        InputError, match=r"input 'x': got float32\[3, 4\] padded to \[4, 4\], expected float32\[3, 4\]"
    ):
        executor.run([buffer, handmade.inputs()["idx"]])


@pytest.mark.parametrize("bad", [[0, 4, 1], [-1, 0, 0], [0, 0, 2**40]])
def test_an_index_out_of_range_names_its_op(executor: Executor, bad: list[int]) -> None:
    with pytest.raises(InputError, match=r"an index is out of range in kernel 'gather', which computes aten\.gather"):
        executor.run({"x": handmade.inputs()["x"], "idx": np.array(bad)})
    check(executor.run(handmade.inputs()), handmade.inputs())


def test_entry_points_are_named(program: CompiledProgram) -> None:
    with pytest.raises(InputError, match="several entry points, name one; it has main, step"):
        Executor(program, handmade.weights())
    with pytest.raises(InputError, match="no entry point 'decode'; it has main, step"):
        Executor(program, handmade.weights(), entry="decode")


# -- bound runs -----------------------------------------------------------------------------------------------------
def test_run_into_writes_the_given_arrays(executor: Executor) -> None:
    given = handmade.inputs()
    outputs = {"y": np.full((3, 4), np.nan, np.float32), "z": np.full(3, np.nan, np.float32)}
    executor.run_into(given, outputs)
    check(outputs, given)


def test_a_bound_run_reads_and_writes_the_same_memory(executor: Executor) -> None:
    given, y, z = handmade.inputs(), np.empty((3, 4), np.float32), np.empty(3, np.float32)
    run = executor.bind(given, [y, z])
    for scale in (1, -2, 3):
        given["x"][:] = scale * handmade.inputs()["x"]
        run()
        check({"y": y, "z": z}, given)


def test_what_cannot_be_bound(executor: Executor) -> None:
    given, y, z = handmade.inputs(), np.empty((3, 4), np.float32), np.empty(3, np.float32)
    read_only = y.copy()
    read_only.flags.writeable = False
    for inputs, outputs, message in (
        ({**given, "x": given["x"].astype(np.float16)}, [y, z], "input 'x': dtype float16, expected exactly float32"),
        ({**given, "x": np.asfortranarray(given["x"])}, [y, z], "input 'x': the array is not C-contiguous"),
        (given, [y.T.copy().T, z], "output 'y': the array is not C-contiguous"),
        (given, [y.astype(np.float64), z], "output 'y': dtype float64"),
        (given, [y[:2], z], "output 'y': shape"),
        (given, [read_only, z], "output 'y': the array is read-only"),
        (given, [y.astype(">f4"), z], "output 'y': dtype >f4 has another byte order than this machine; convert it"),
        ({**given, "x": given["x"].astype(">f4")}, [y, z], "input 'x': dtype >f4 has another byte order"),
        (given, [torch._neg_view(torch.zeros(3, 4)), z], "output 'y': only a copy of this Tensor can be used; bind"),
        (given, [given["x"], z], "output 'y': its memory overlaps"),
        (given, [y, y[0, :3]], "output 'y': its memory overlaps"),
        (given, [y], "got 1 outputs, expected 2"),
    ):
        with pytest.raises(InputError, match=message):
            executor.bind(inputs, outputs)


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_size_t)
        for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def test_memory_that_the_device_does_not_see_is_not_bound(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.backend, "shares_host", False)
    outputs = [np.empty((3, 4), np.float32), np.empty(3, np.float32)]
    with pytest.raises(
        InputError, match=r"is in the host's memory, where the cpu device does not compute; bind buffers"
    ):
        executor.bind(handmade.inputs(), outputs)


def test_a_bound_run_allocates_nothing(executor: Executor) -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library has no mallinfo2")
    libc.mallinfo2.restype = _MallInfo
    run = executor.bind(handmade.inputs(), [np.empty((3, 4), np.float32), np.empty(3, np.float32)])
    for _ in range(100):
        run()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        python_before, native_before = tracemalloc.get_traced_memory()[0], libc.mallinfo2().uordblks
        for _ in range(2000):
            run()
        python_after, peak = tracemalloc.get_traced_memory()
        native_after = libc.mallinfo2().uordblks
    finally:
        tracemalloc.stop()
        gc.enable()
    assert python_after - python_before < 1024
    assert peak - python_before < 4096  # nothing of the size of a tensor even for a moment
    assert native_after - native_before < 4096


# -- state ----------------------------------------------------------------------------------------------------------
def test_state_outputs_and_updates(step: Executor) -> None:
    x = np.array([1, 2, 3, 4], np.float32)
    for n in (1, 2, 3):
        out = step.run(x)
        np.testing.assert_array_equal(out["twice"], 2 * x)
        np.testing.assert_array_equal(out["again"], 2 * x)
        np.testing.assert_array_equal(out["total"], n * x)
        np.testing.assert_array_equal(out["same"], x.reshape(2, 2))
        np.testing.assert_array_equal(out["half"], x / 2)
        np.testing.assert_array_equal(step.state.snapshot()["last"], 2 * x)
    assert len({array.ctypes.data for array in (*out.values(), x)}) == 6  # none shares memory
    step.reset()
    np.testing.assert_array_equal(step.state["total"].to_numpy(), 0)
    np.testing.assert_array_equal(step.run(x)["total"], x)


def test_state_starts_as_the_state_dict_has_it(program: CompiledProgram) -> None:
    weights = {**handmade.weights(), "total": np.full(4, 10, np.float32)}
    run = Executor(program, weights, entry="step")
    ones = np.ones(4, np.float32)
    assert run.run(ones)["total"].tolist() == [11] * 4
    run.reset()
    assert run.run(ones)["total"].tolist() == [11] * 4
    run.state.write("total", np.zeros(4, np.float32))
    assert run.run(ones)["total"].tolist() == [1] * 4
    with pytest.raises(InputError, match=r"state 'total': got float32\[3\], expected float32\[4\]"):
        run.state.write("total", np.zeros(3, np.float32))
    with pytest.raises(InputError, match="no state 'sum'; known: total, last"):
        run.state.write("sum", np.zeros(3, np.float32))
    with pytest.raises(WeightError, match=r"state 'total' is float64\[4\]"):
        Executor(program, {**weights, "total": np.zeros(4)}, entry="step")


def test_states_that_change_places(program: CompiledProgram) -> None:
    entry = replace(program.entries["step"], updates=(("total", 10), ("last", 9)))
    swapped = replace(replace_entries(program, "step"), entries={"step": entry})
    run = Executor(swapped, {**handmade.weights(), "last": np.full(4, 7, np.float32)})
    run.run(np.ones(4, np.float32))
    held = run.state.snapshot()
    assert (held["total"].tolist(), held["last"].tolist()) == ([7] * 4, [1] * 4)


def test_two_executors_share_state_and_weights(program: CompiledProgram) -> None:
    store = load_weights(program, handmade.weights())
    a = Executor(program, store, entry="step")
    b = Executor(program, store, a.backend, "step", a.state)
    x = np.ones(4, np.float32)
    a.run(x)
    assert b.run(x)["total"].tolist() == [2] * 4
    main = Executor(program, store, a.backend, "main")
    assert main._fixed[4] is store["w.folded"]


def test_many_threads_may_call_one_executor(executor: Executor) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(200):
                given = {"x": rng.standard_normal((3, 4), np.float32), "idx": rng.integers(0, 4, 3)}
                check(executor.run(given), given)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# -- weights --------------------------------------------------------------------------------------------------------
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


# -- the machine ----------------------------------------------------------------------------------------------------
def test_backends_by_name() -> None:
    assert npu_runtime.available_backends() == ["cpu", "cuda", "metal"]
    assert npu_runtime.get_backend("cpu", threads=1).name == "cpu"
    for name in ("tpu", "../cpu", "__init__"):
        with pytest.raises(BackendError, match=r"this build has no .* target; it has: cpu, cuda, metal"):
            npu_runtime.get_backend(name)
    with pytest.raises(AttributeError, match="has no attribute 'TPUBackend'"):
        _ = npu_runtime.TPUBackend
    with pytest.raises(BackendError, match="threads=0"):
        CPUBackend(0)


def test_a_program_for_another_target(program: CompiledProgram) -> None:
    with pytest.raises(BackendError, match=r"this build has no 'tpu' target"):
        Executor(replace(program, target="tpu"), handmade.weights(), entry="main")
    with pytest.raises(BackendError, match="program 'handmade' is for 'cuda', not for 'cpu'"):
        Executor(replace(program, target="cuda"), handmade.weights(), CPUBackend(), "main")


def test_a_missing_cpu_feature_means_a_rebuild_or_a_clear_error(
    program: CompiledProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = replace(program, requires=("avx9000", *sorted(host.host_cpu().features)[:1]))
    assert "avx9000" in obstacle(foreign)
    check(Executor(foreign, handmade.weights(), entry="main").run(handmade.inputs()), handmade.inputs())
    with pytest.raises(BackendError, match=r"needs the CPU features avx9000, .* holds no source"):
        Executor(replace(foreign, sources={}), handmade.weights(), entry="main")
    monkeypatch.setenv("NPU_CXX", "/nowhere/c++")
    with pytest.raises(BackendError, match=r"avx9000.*could not be rebuilt.*Install a C\+\+ compiler"):
        Executor(foreign, handmade.weights(), entry="main")


def test_an_object_for_another_machine(program: CompiledProgram) -> None:
    arch = bytearray(program.binary)
    arch[18] = 183 if arch[18] == 62 else 62
    assert " on linux/" in obstacle(replace(program, binary=bytes(arch)))
    assert "holds no binary" in obstacle(replace(program, binary=b""))
    for binary in (bytes(arch), b"", b"\x7fELF", b"MZ", program.binary[:100]):
        foreign = replace(program, binary=binary)
        check(Executor(foreign, handmade.weights(), entry="main").run(handmade.inputs()), handmade.inputs())
        with pytest.raises(BackendError, match="cannot run here"):
            Executor(replace(foreign, sources={}), handmade.weights(), entry="main")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return 1; }\nAPI int npu_start", "return 77; }\nAPI int npu_start", "has ABI 77, this build has 1"),
        ("int npu_main(", "int npu_other(", "lacks the symbol npu_main"),
        ("npu_stop(void)", "npu_halt(void)", "lacks the symbol npu_stop"),
        (
            "return running = threads < 3 ? threads : 3",
            "return 0",
            "program 'handmade' cannot start: its thread pool of .* threads is refused",
        ),
        (
            "API int npu_start(int threads) { return running = threads < 3 ? threads : 3; }",
            "API long npu_scratch_bytes(void) { return 1L << 40; }\nAPI int npu_start(int threads) { return 0; }",
            "program 'handmade' cannot start: the system refuses .*B of scratch memory, .*B for each of .* thread",
        ),
        ("if (running < 1) return -1;", "return -5;", "program 'handmade' failed with status -5"),
    ],
)
def test_a_binary_that_breaks_the_rules(program: CompiledProgram, old: str, new: str, message: str) -> None:
    source = program.sources["program"]
    assert old in source
    broken = replace(program, binary=handmade.binary(source.replace(old, new)))
    with pytest.raises((ArtifactError, BackendError), match=message):
        Executor(broken, handmade.weights(), entry="main").run(handmade.inputs())


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, arena_bytes=4096),
        lambda e: replace(e, calls=(replace(e.calls[0], inputs=(0,)), *e.calls[1:])),  # the weight would not be passed
        lambda e: replace(e, calls=(e.calls[0], e.calls[0], *e.calls[1:])),
        lambda e: replace(e, symbol="npu_step"),
    ],
)
def test_a_binary_knows_the_buffers_it_was_built_for(program: CompiledProgram, change: Callable[[Any], Any]) -> None:
    entries = {**program.entries, "main": change(program.entries["main"])}
    with pytest.raises(ArtifactError, match="was built for other buffers than the file lists"):
        Executor(replace(program, entries=entries), handmade.weights(), entry="main")


def test_threads(program: CompiledProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, started in ((1, 1), (2, 2), (8, 3)):  # the program has 3 at most
        assert NativeLibrary(program, asked).threads == started
    monkeypatch.setenv("NPU_NUM_THREADS", "2")
    assert CPUBackend().threads == 2
    monkeypatch.setenv("NPU_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="NPU_NUM_THREADS"):
        CPUBackend()


def test_programs_are_unloaded(program: CompiledProgram) -> None:
    def resources() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:npu-program")

    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc to look into")
    gc.collect()
    before = resources()
    for _ in range(10):
        with npu_runtime.load(program, handmade.weights(), threads=1) as model:
            model.run(handmade.inputs())
            assert resources()[1] > before[1]
        del model
    gc.collect()
    assert resources() == before


def test_a_child_process_can_run(executor: Executor) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, executor.run(handmade.inputs())["z"].tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 64) == executor.run(handmade.inputs())["z"].tobytes()
    os.close(reading)
    os.close(writing)


def test_too_much_memory_is_an_error_at_once() -> None:
    with pytest.raises(BackendError, match="needs 17592186044416 bytes of memory, but this machine has"):
        aligned_empty((2**42,), np.dtype(np.float32))


def test_padded_buffers() -> None:
    backend = CPUBackend(1)
    buffer = backend.allocate_buffer(np.ones((2, 3), np.float32), (2, 8))
    assert (buffer.shape, buffer.alloc_shape, buffer.size_bytes) == ((2, 3), (2, 8), 64)
    np.testing.assert_array_equal(buffer.to_numpy(), np.ones((2, 3)))
    with pytest.raises(BackendError, match=r"alloc_shape \[2, 2\] cannot hold shape \[2, 3\]"):
        backend.allocate_zeros((2, 3), np.dtype(np.float32), (2, 2))


# -- profile --------------------------------------------------------------------------------------------------------
def test_profile(executor: Executor) -> None:
    profile = executor.profile(handmade.inputs(), runs=5, warmup=1)
    assert profile.times.shape == (5, 4) and (np.diff(profile.times, axis=1) >= 0).all()
    assert [r.name for r in profile.rows] == ["scale", "bias_relu", "gather"]
    assert sum(r.share for r in profile.rows) == pytest.approx(1)
    text = profile.table()
    assert "handmade/main" in text and "aten.gather" in text and "GFLOP/s" in text
    assert "… 2 more" in profile.table(limit=1)
    assert profile.whole.shape == (5,) and (profile.whole > 0).all() and "<table>" in profile._repr_html_()
    with pytest.raises(ConfigError, match="runs >= 1"):
        executor.profile(runs=0)


def test_profiling_leaves_the_state_alone(step: Executor) -> None:
    step.run(np.ones(4, np.float32))
    step.profile(runs=3)
    step.profile([np.full(4, 9, np.float32)], runs=3)
    assert step.state.snapshot()["total"].tolist() == [1] * 4


# -- load() ---------------------------------------------------------------------------------------------------------
def test_load_and_call(program: CompiledProgram, tmp_path: Path) -> None:
    program.save(tmp_path / "a.npubin")
    safetensors.numpy.save_file(handmade.weights(), tmp_path / "w.safetensors")
    model = npu_runtime.load(tmp_path / "a.npubin", weights=tmp_path / "w.safetensors", threads=1)
    given = handmade.inputs()
    y, z = model(given["x"], idx=given["idx"])
    check({"y": y, "z": z}, given)
    y, z = model(torch.from_numpy(given["x"]), torch.from_numpy(given["idx"]))
    assert isinstance(y, torch.Tensor)
    check({"y": y.numpy(), "z": z.numpy()}, given)
    assert model.run([np.ones(4, np.float32)], "step")["total"].tolist() == [1] * 4
    assert model.executor("step")._fixed.keys() == {9}
    model.reset()
    assert model.state.snapshot()["total"].tolist() == [0] * 4
    assert model.profile(runs=1).runs == 1
    with pytest.raises(InputError, match="input 'x' is given twice"):
        model(given["x"], x=given["x"])
    with pytest.raises(InputError, match="got 3 inputs, expected 2"):
        model(1, 2, 3)
    model.close()
    check({"y": y.numpy(), "z": z.numpy()}, given)
    with pytest.raises(BackendError, match="was closed"):
        model(given["x"], given["idx"])


def test_one_output_is_no_tuple(program: CompiledProgram) -> None:
    entry = replace(program.entries["step"], outputs=program.entries["step"].outputs[1:2])
    model = npu_runtime.load(replace(replace_entries(program, "step"), entries={"step": entry}), handmade.weights())
    assert model(np.ones(4, np.float32)).tolist() == [1] * 4


def test_importing_is_light_and_needs_no_torch() -> None:
    code = (
        "import sys, npu_compiler, npu_runtime; print([m for m in ('torch', 'numpy', 'msgpack') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_running_needs_no_torch_and_no_compiler(program: CompiledProgram, tmp_path: Path) -> None:
    program.save(tmp_path / "a.npubin")
    safetensors.numpy.save_file(handmade.weights(), tmp_path / "w.safetensors")
    code = f"""
import sys
for name in ("torch", "safetensors", "transformers"):
    sys.modules[name] = None  # importing it fails
import numpy as np, npu_runtime
model = npu_runtime.load({str(tmp_path / "a.npubin")!r}, {str(tmp_path / "w.safetensors")!r})
print(model(np.ones((3, 4), np.float32), np.array([0, 1, 2]))[1].tolist())
"""
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    given = {"x": np.ones((3, 4), np.float32), "idx": np.array([0, 1, 2])}
    np.testing.assert_allclose(json.loads(done.stdout), handmade.expected(given)["z"], rtol=1e-6, atol=1e-6)
