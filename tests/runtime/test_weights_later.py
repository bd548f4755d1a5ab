"""Weights that come after the executor, with a run, or in a narrower type; arguments in another order."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npu_compiler
from npu_compiler import target_config, targets
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.json_writer import ir_to_dict, save_ir
from npu_compiler.partitioning.constraint_checker import check
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.support.errors import ConfigError, InputError, WeightError
from npu_compiler.targets.cpu.target import CPUTarget
from npu_runtime import DAGExecutor, Executor, WeightStore, get_backend, load_weights

from ..support.toy_ir import ADD, HEAVY, ODD, RELU_, SHAPE, Builder

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(SHAPE)
HALVES = [np.float16, ml_dtypes.bfloat16]


def model() -> IRGraph:
    """y = relu(x @ w + v); ``n`` counts what went through, in place."""
    b = Builder(weights=("w", "v", "n")).node("p", HEAVY, "x", "p_w").node("s", ADD, "p", "p_v")
    return b.node("k", "aten.add_.Tensor", "p_n", "s").node("y", RELU_, "s").out("y", "k")


def weights(seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(SHAPE).astype(dtype) for k in ("w", "v", "n")}


def expected(w: dict[str, np.ndarray]) -> np.ndarray:
    return np.maximum(X @ w["w"].astype(np.float32) + w["v"].astype(np.float32), 0)


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return npu_compiler.compile(model())


def same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_executor_without_weights_waits_for_them(program: CompiledProgram) -> None:
    executor = get_backend("cpu").create_executor(program)
    assert executor.inputs[0].name == "x" and executor.program is program
    for call in (lambda: executor.run([X]), lambda: executor.bind([X], [X.copy(), X.copy()]), executor.profile):
        with pytest.raises(
            WeightError, match=r"needs 2 weights: call load_weights\(weights\), or run\(inputs, weights\)"
        ):
            call()
    with pytest.raises(WeightError, match="lacks 1 of the 2"):
        executor.load_weights({k: v for k, v in weights().items() if k != "v"})
    with pytest.raises(WeightError, match="not in the given store"):
        executor.load_weights(WeightStore({}, {}))
    with pytest.raises(WeightError, match="call load_weights"):
        executor.run([X])
    executor.load_weights(weights())
    same(executor.run([X])["y"], expected(weights()))
    executor.load_weights(load_weights(program, weights(1), executor.backend))
    same(executor.run([X])["y"], expected(weights(1)))


def test_a_copied_executor_returns_to_the_initial_state(program: CompiledProgram) -> None:
    executor, sharer = Executor(program, weights()), None
    executor.run([X])
    sharer = Executor(program, executor.weights, executor.backend, state=executor.state)
    copied, other = pickle.loads(pickle.dumps((executor, sharer)))
    same(copied.run([X])["k"], executor.run([X])["k"])
    total = copied.run([X])["k"]
    same(other.run([X])["k"], total + X @ weights()["w"] + weights()["v"])
    for own in (executor, copied):
        own.load_weights(weights(1))
        w = weights(1)
        same(own.run([X])["k"], w["n"] + X @ w["w"] + w["v"])
    without = pickle.loads(pickle.dumps(Executor(program)))
    same(without.run([X], weights())["y"], expected(weights()))


def test_a_run_may_bring_its_weights(program: CompiledProgram) -> None:
    executor, first, second = Executor(program), weights(), weights(1)
    same(executor.run([X], first)["y"], expected(first))
    before = executor.weights
    total = executor.run([X], first)["k"]
    assert executor.weights is before, "the same object is not read again, and states go on"
    same(total, first["n"] + 2 * (X @ first["w"] + first["v"]))
    same(executor.run([X], weights=second)["y"], expected(second))
    same(executor.run([X])["y"], expected(second))


@pytest.mark.parametrize("force", [(), ("p",)], ids=["npu", "mixed"])
def test_a_partitioned_run_may_bring_its_weights(force: tuple[str, ...]) -> None:
    dag = DAGExecutor(partition(model(), force_cpu=force))
    with pytest.raises(WeightError, match=r"load_weights\(\), or execute"):
        dag.execute([X])
    first = weights()
    same(dag.execute([X], weights=first)["y"], expected(first))
    same(dag.execute([X], weights=first)["k"], first["n"] + 2 * (X @ first["w"] + first["v"]))
    same(dag.execute([X], weights=weights(1))["y"], expected(weights(1)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("force", [None, (), ("p",), ("k",)], ids=["executor", "npu", "mixed", "state on the host"])
def test_narrower_weights_are_widened_exactly(
    program: CompiledProgram, dtype: Any, force: tuple[str, ...] | None
) -> None:
    """A half-precision checkpoint of a float32 model computes as the same values in float32 do, states included."""
    half = weights(dtype=dtype)
    full = {k: v.astype(np.float32) for k, v in half.items()}

    def results(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if force is None:
            return Executor(program, w).run([X])
        return DAGExecutor(partition(model(), force_cpu=force), weights=w).execute([X])

    for got, want in zip(results(half).values(), results(full).values(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("key", ["w", "n"])
def test_narrowing_stays_refused(program: CompiledProgram, key: str) -> None:
    wide = {**weights(), key: weights()[key].astype(np.float64)}
    with pytest.raises(WeightError, match=rf"'{key}' is float64\[4, 4\], expected float32\[4, 4\]; convert"):
        Executor(program, wide)
    with pytest.raises(WeightError, match=rf"'{key}' is float64\[4, 4\], expected float32\[4, 4\]; convert"):
        DAGExecutor(partition(model(), force_cpu=["p", "k"]), weights=wide)


def test_arguments_in_another_order_are_named(program: CompiledProgram) -> None:
    backend = get_backend("cpu")
    for call in (
        lambda: Executor(program, backend),
        lambda: load_weights(weights(), program, backend),  # type: ignore[arg-type]
        lambda: load_weights(program, backend),
        lambda: Executor(weights(), program),  # type: ignore[arg-type]
        lambda: backend.execute([X], program),  # type: ignore[arg-type]
        lambda: Executor(program, weights(), "cpu"),  # type: ignore[arg-type]
        lambda: DAGExecutor(partition(model())).load_weights(program),
    ):
        with pytest.raises(WeightError, match=r"arguments are \(program, weights, backend\)|from a CompiledProgram"):
            call()
    with pytest.raises(InputError, match=r"arguments are \(plan, backend, .*npu_compiler.partition\(ir\) makes a plan"):
        DAGExecutor(program)  # type: ignore[arg-type]


def test_a_buffer_for_an_input(program: CompiledProgram) -> None:
    backend = get_backend("cpu")
    executor = backend.create_executor(program, weights())
    buffer = backend.allocate_buffer(X.astype(np.float16), spec=executor.inputs[0])
    assert buffer.dtype == np.float32 and backend.device == 0
    assert executor.run([buffer])["y"].shape == SHAPE
    with pytest.raises(InputError, match=r"input 'x': shape \[3\], expected \[4, 4\]"):
        backend.allocate_buffer(X[0, :3], spec=executor.inputs[0])


def test_inputs_and_outputs_of_a_program(program: CompiledProgram) -> None:
    assert [i.name for i in program.inputs] == ["x"] and [o.name for o in program.outputs] == ["y", "k"]
    program = CompiledProgram(**{**vars(program), "entries": {**program.entries, "other": program.entries["main"]}})
    with pytest.raises(InputError, match="several entry points, name one; it has main, other"):
        _ = program.inputs


def test_a_code_generator_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (targets, target_config):
        monkeypatch.setattr(table, "_registered", {})
    mine = CPUTarget()
    assert npu_compiler.compile(model(), target=mine).target == "cpu" and targets.get_target("cpu") is mine
    for wrong, says in ((CPUTarget, "the class CPUTarget"), (3, "of type int"), (None, "of type NoneType")):
        with pytest.raises(ConfigError, match=f"target is {says}: pass a name"):
            npu_compiler.compile(model(), target=wrong)  # type: ignore[arg-type]


def test_the_public_check_takes_any_ir(tmp_path: Path) -> None:
    ir = Builder().node("o", ODD, "x").out("o")
    save_ir(ir, tmp_path / "ir.json")
    for source in (ir, ir_to_dict(ir), tmp_path / "ir.json"):
        assert [name for name, _, _ in npu_compiler.check(source)] == ["o"]
    assert npu_compiler.check is check
    assert isinstance(npu_compiler.get_supported_ops(), frozenset) and ADD in npu_compiler.get_supported_ops()
