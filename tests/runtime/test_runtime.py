"""The runtime on a hand-written program: inputs, outputs, state, profiles, loading, all ways to be wrong."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
import tracemalloc
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
from npu_compiler.support.errors import BackendError, ConfigError, InputError, WeightError
from npu_runtime import Executor, load_weights

from ..support import handmade

ROOT = Path(__file__).parents[2]


# -- inputs and outputs ---------------------------------------------------------------------------------------------
def test_run_by_name_and_in_order(executor: Executor) -> None:
    given = handmade.inputs()
    handmade.check(executor.run(given), given)
    handmade.check(executor.run([given["x"], given["idx"]]), given)
    handmade.check(executor.run((given["x"], given["idx"])), given)


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
    handmade.check(executor.run({"x": change(x), "idx": idx}), {"x": x, "idx": idx})


def test_device_buffers_in_and_out(executor: Executor) -> None:
    given = handmade.inputs()
    backend = executor.backend
    outputs = executor.run_device({k: backend.allocate_buffer(v) for k, v in given.items()})
    handmade.check({k: v.to_numpy() for k, v in outputs.items()}, given)
    y = outputs["y"]
    assert (y.shape, y.alloc_shape, y.dtype, y.size_bytes) == ((3, 4), (3, 4), np.float32, 48)
    assert y.native_handle % 64 == 0
    again = executor.run({"x": y, "idx": given["idx"]})
    handmade.check(again, {"x": y.to_numpy(), "idx": given["idx"]})
    once = backend.execute(replace_entries(executor.program, "main"), given, handmade.weights())
    handmade.check({k: v.to_numpy() for k, v in once.items()}, given)


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
    handmade.check(executor.run(handmade.inputs()), handmade.inputs())


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
    handmade.check(outputs, given)


def test_a_bound_run_reads_and_writes_the_same_memory(executor: Executor) -> None:
    given, y, z = handmade.inputs(), np.empty((3, 4), np.float32), np.empty(3, np.float32)
    run = executor.bind(given, [y, z])
    for scale in (1, -2, 3):
        given["x"][:] = scale * handmade.inputs()["x"]
        run()
        handmade.check({"y": y, "z": z}, given)


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
    runs = 2000
    for _ in range(100):
        run()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        python_before, native_before = tracemalloc.get_traced_memory()[0], libc.mallinfo2().uordblks
        for _ in range(runs):
            run()
        python_after, peak = tracemalloc.get_traced_memory()
        native_after = libc.mallinfo2().uordblks
    finally:
        tracemalloc.stop()
        gc.enable()
    assert python_after - python_before < 1024
    assert peak - python_before < 4096  # nothing of the size of a tensor even for a moment
    # The smallest block of malloc has 32 bytes, so a run that keeps one would exceed this. Other threads may allocate a
    # few kilobytes meanwhile, such as the one that reports results to the process that started the tests.
    assert native_after - native_before < 16 * runs


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
                handmade.check(executor.run(given), given)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


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
    handmade.check({"y": y, "z": z}, given)
    y, z = model(torch.from_numpy(given["x"]), torch.from_numpy(given["idx"]))
    assert isinstance(y, torch.Tensor)
    handmade.check({"y": y.numpy(), "z": z.numpy()}, given)
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
    handmade.check({"y": y.numpy(), "z": z.numpy()}, given)
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
