"""Mixed NPU and host execution against PyTorch: values, aliasing, state, freshness, errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npu_compiler
from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, NPU, PartitionPlan
from npu_compiler.support import dtypes
from npu_compiler.support.errors import BackendError, CompileError, InputError, WeightError
from npu_runtime import DAGExecutor, execute_cpu_partition, get_backend
from npu_runtime.backends.base import DeviceBuffer

from ..support.toy_ir import ADD, HEAVY, ODD, RELU, RELU_, SHAPE, SIGMOID, VIEW, Builder

torch = pytest.importorskip("torch")
from npu_compiler.frontend import capture, state_dict_numpy  # noqa: E402 - imports torch

RNG = np.random.default_rng(7)
SAME = {"size": [4, 4]}


def array(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape or SHAPE).astype(np.float32)


def run_both(
    ir: IRGraph, inputs: dict[str, np.ndarray], weights: dict[str, np.ndarray], **options: Any
) -> PartitionPlan:
    """The plan's results equal those of the whole graph on PyTorch, where in-place ops really share memory."""
    plan = partition(ir, **options)
    copies = ({k: v.copy() for k, v in d.items()} for d in (inputs, weights))
    expected = execute_cpu_partition(ir, *copies)
    found = DAGExecutor(plan, weights=weights).execute(inputs)
    assert list(found) == ir.output_names()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    return plan


class Mixed(torch.nn.Module):
    """Two independent branches with an op in each that the NPU lacks, an in-place op and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Any) -> Any:
        left, right = torch.special.bessel_j1(self.a(x).abs() + 1), torch.special.bessel_j0(self.b(x))
        y = self.c(left).relu_() + self.c(right)
        return y, left, torch.softmax(y, -1)


def test_mixed_model_equals_pytorch() -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(3, 16)
    plan = partition(capture(model, (x,)))
    assert [p.device for p in plan.partitions] == [NPU, HOST, NPU]
    assert len(plan.transfers) == 4  # one value each way per branch
    executor = DAGExecutor(plan, weights=state_dict_numpy(model))
    with torch.no_grad():
        expected = model(x)
    for found, want in zip(executor.execute([x]).values(), expected, strict=True):
        np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=1e-5)


def test_outputs_are_fresh_and_ordered() -> None:
    ir = Builder(weights=("w",)).node("o", ODD, "x").node("m", HEAVY, "o", "p_w").out("m", "x", "o", "p_w", "m")
    executor = DAGExecutor(partition(ir), weights={"w": (w := array())})
    x = array() + 2
    first = executor.execute({"x": x})
    assert list(first) == ["m", "x", "o", "p_w", "m#1"]
    kept = {k: v.copy() for k, v in first.items()}
    np.testing.assert_array_equal(first["x"], x)
    np.testing.assert_array_equal(first["p_w"], w)
    np.testing.assert_array_equal(first["m"], first["m#1"])
    executor.execute({"x": array() + 3})
    assert all(np.array_equal(first[k], kept[k]) for k in kept)
    for value in first.values():
        value[...] = 0  # the caller's own: neither inputs nor weights change
    assert x.any() and w.any()
    np.testing.assert_array_equal(executor.execute({"x": x})["m"], kept["m"])


def test_graph_without_nodes() -> None:
    ir = Builder(weights=("w",)).out("x", "p_w")
    x, w = array(), array()
    found = DAGExecutor(partition(ir), weights={"w": w}).execute([x])
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["p_w"], w)
    assert not np.may_share_memory(found["x"], x) and not np.may_share_memory(found["p_w"], w)


def test_weights_can_be_replaced() -> None:
    ir = (
        Builder(weights=("w", "v")).node("m", HEAVY, "x", "p_w").node("o", ODD, "p_v").node("y", ADD, "m", "o").out("y")
    )
    executor = DAGExecutor(partition(ir))
    x = array()
    with pytest.raises(WeightError, match="load_weights"):
        executor.execute([x])
    for _ in range(2):
        w, v = array(), array() + 3
        executor.load_weights({"w": torch.from_numpy(w), "v": v})
        want = x @ w + torch.special.bessel_j1(torch.from_numpy(v)).numpy()
        np.testing.assert_allclose(executor.execute([x])["y"], want, rtol=1e-5, atol=1e-5)


def test_device_buffers_in_and_out() -> None:
    ir = Builder().node("m", HEAVY, "x", "x").node("o", ODD, "m").node("y", HEAVY, "o", "m").out("y", "o", "x")
    backend = get_backend("cpu")
    executor = DAGExecutor(partition(ir), backend)
    x = np.abs(array())
    plain = executor.execute([x])
    buffers = executor.execute([backend.allocate_buffer(x)], device_outputs=True)
    assert all(isinstance(b, DeviceBuffer) for b in buffers.values())
    for name, value in plain.items():
        np.testing.assert_array_equal(buffers[name].to_numpy(), value)
    again = executor.execute([buffers["y"]], device_outputs=True)  # stays on the device
    np.testing.assert_array_equal(again["x"].to_numpy(), plain["y"])


def test_each_partition_is_compiled_once() -> None:
    compiled: list[str] = []

    def compile_fn(ir: IRGraph) -> Any:
        compiled.append(ir.model_name)
        return npu_compiler.compile(ir)

    ir = Builder().node("m", HEAVY, "x", "x").node("o", ODD, "m").node("y", HEAVY, "o", "o").out("y")
    executor = DAGExecutor(partition(ir), compile_fn=compile_fn)
    executor.execute([array()])
    executor.execute([array()])
    assert compiled == ["toy.p0", "toy.p2"]


def test_compute_dtype_through_compile_fn() -> None:
    ir = Builder(weights=("w",)).node("m", HEAVY, "x", "p_w").node("o", ODD, "m").node("y", HEAVY, "o", "p_w").out("y")
    half = DAGExecutor(partition(ir), compile_fn=partial(npu_compiler.compile, dtype="float16"))
    x, w = np.abs(array()) + 0.5, np.abs(array()) + 0.5
    half.load_weights({"w": w})
    want = torch.special.bessel_j1(torch.from_numpy(x @ w)).numpy() @ w
    found = half.execute([x])["y"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2)
    assert not np.array_equal(found, want)


# ---------------------------------------------------------------------------------------------------------- aliasing


IN_PLACE: dict[str, list[tuple[Any, ...]]] = {  # nodes as (name, op, *inputs[, attrs]); the result is y
    "tensor": [("m", HEAVY, "x", "x"), ("r", RELU_, "m"), ("o", ODD, "m"), ("y", ADD, "o", "m")],
    "old value": [
        ("m", HEAVY, "x", "x"), ("s", SIGMOID, "m"), ("r", RELU_, "m"), ("o", ODD, "r"), ("y", HEAVY, "o", "s"),
    ],
    "base of a written view": [
        ("m", HEAVY, "x", "x"), ("v", VIEW, "m", SAME), ("r", RELU_, "v"), ("o", ODD, "m"), ("y", HEAVY, "o", "m"),
    ],
    "view of a written input": [("v", VIEW, "x", SAME), ("r", RELU_, "x"), ("o", ODD, "v"), ("y", HEAVY, "o", "v")],
    "storage made on the host": [
        ("o", ODD, "x"), ("v", VIEW, "o", SAME), ("r", RELU_, "v"), ("k", HEAVY, "x", "x"), ("p", ODD, "k"),
        ("y", ADD, "o", "p"),
    ],
    "transposed view": [
        ("t", "aten.transpose.int", "x", {"dim0": 0, "dim1": 1}), ("k", HEAVY, "x", "x"), ("r", RELU_, "t"),
        ("o", ODD, "k"), ("l", HEAVY, "o", "x"), ("y", ADD, "l", "x"),
    ],
    "in-place op of the host": [("m", HEAVY, "x", "x"), ("r", "aten.sinc_.default", "m"), ("y", HEAVY, "m", "r")],
}  # fmt: skip


@pytest.mark.parametrize("nodes", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_in_place_ops_across_partitions(nodes: list[tuple[Any, ...]]) -> None:
    b = Builder()
    for name, op, *rest in nodes:
        attrs = rest.pop() if isinstance(rest[-1], dict) else {}
        b.node(name, op, *rest, **attrs)
    x = array()
    kept = x.copy()
    plan = run_both(b.out("y"), {"x": x}, {})
    assert any(p.device == HOST for p in plan.partitions)
    np.testing.assert_array_equal(x, kept)  # the caller's input is not written


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4, 4))

    def forward(self, x: Any) -> Any:
        self.count.add_(x)
        return torch.special.bessel_j1(x + 3) @ self.count


@pytest.mark.parametrize("force", [(), ("aten.matmul.default",), ("aten.add_.Tensor", "aten.add.Tensor"), None])
def test_state_persists_and_resets(force: Sequence[str] | None) -> None:
    model, x = Counter(), torch.rand(4, 4)
    weights = {k: v.copy() for k, v in state_dict_numpy(model).items()}
    ir = capture(model, (x,))
    plan = partition(ir, force_cpu=force) if force is not None else partition(ir, lambda op: False)
    executor = DAGExecutor(plan, weights=weights)
    expected = [model(x).numpy() for _ in range(3)]
    for want in expected:
        np.testing.assert_allclose(executor.execute([x])["matmul"], want, rtol=1e-5)
    assert (weights["count"] == 1).all()
    executor.load_weights(weights)
    np.testing.assert_allclose(executor.execute([x])["matmul"], expected[0], rtol=1e-5)


def test_state_passed_between_partitions() -> None:
    b = Builder(weights=("kv",)).node("new", HEAVY, "p_kv", "x").node("o", ODD, "new").node("y", HEAVY, "o", "p_kv")
    ir = b.out("y", "new")
    ir.state.append(npu_compiler.aten.ir.StateUpdate("kv", b.specs["new"]))
    plan = partition(ir)
    assert plan.feeds
    kv, x = np.abs(array()) + 1, np.abs(array()) + 1
    executor = DAGExecutor(plan, weights={"kv": kv})
    for _ in range(2):
        found = executor.execute([x])
        new = kv @ x
        np.testing.assert_allclose(found["y"], torch.special.bessel_j1(torch.from_numpy(new)).numpy() @ kv, rtol=1e-4)
        found["new"][...] = 0  # the caller's own copy
        kv = new


BUFFERS: dict[str, tuple[list[tuple[str, ...]], list[str], dict[str, str]]] = {  # nodes, outputs, new contents
    "returned, on the NPU": ([("m", HEAVY, "p_a", "x"), ("o", ODD, "m")], ["o", "p_a"], {"a": "m"}),
    "returned, on the host": ([("o", ODD, "p_a"), ("m", HEAVY, "o", "x")], ["m", "p_a"], {"a": "o"}),
    "returned, read by no node": ([("m", HEAVY, "x", "x"), ("o", ODD, "m")], ["o", "p_a"], {"a": "o"}),
    "swapped": (
        [("m", HEAVY, "p_a", "x"), ("o", ODD, "m"), ("y", HEAVY, "o", "p_b")], ["y"], {"a": "p_b", "b": "m"},
    ),
    "an input": ([("m", HEAVY, "p_a", "x"), ("o", ODD, "m")], ["o"], {"a": "x"}),
    "a weight": ([("m", HEAVY, "p_a", "x"), ("o", ODD, "m")], ["o"], {"a": "p_b"}),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "outputs", "updates"), BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers_that_the_model_itself_reads(
    nodes: list[tuple[str, ...]], outputs: list[str], updates: dict[str, str]
) -> None:
    b = Builder(weights=("a", "b"))
    for node in nodes:
        b.node(*node)
    ir = b.out(*outputs)
    ir.state += [npu_compiler.aten.ir.StateUpdate(key, b.specs[name]) for key, name in updates.items()]
    weights = {"a": np.abs(array()) / 2, "b": np.abs(array()) / 2}
    executor, state, x = DAGExecutor(partition(ir), weights=weights), dict(weights), np.abs(array()) / 2
    for _ in range(3):
        wanted = execute_cpu_partition(ir, {"x": x}, state)
        for name, found in executor.execute([x]).items():
            np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6)


def test_a_buffer_that_starts_as_a_constant() -> None:
    b = Builder()
    b.ir.constants["c"], b.ir.weight_name_mapping["c_c"] = np.full(SHAPE, 0.3, np.float32), "c"
    b.specs["c_c"] = TensorSpec("c_c", SHAPE, "float32")
    ir = b.node("o", ODD, "c_c").node("y", HEAVY, "o", "x").out("y")
    ir.state.append(npu_compiler.aten.ir.StateUpdate("c", b.specs["o"]))
    executor, x, state = DAGExecutor(partition(ir)), np.abs(array()), {}
    for _ in range(3):
        wanted = execute_cpu_partition(ir, {"x": x}, state)["y"]
        np.testing.assert_allclose(executor.execute([x])["y"], wanted, rtol=1e-5, atol=1e-6)
    executor.reset()
    np.testing.assert_allclose(executor.execute([x])["y"], execute_cpu_partition(ir, {"x": x})["y"], rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- host fallback


def one_op(
    op: str, inputs: Sequence[np.ndarray], outputs: Sequence[tuple[tuple[int, ...], str]], **attrs: Any
) -> list[np.ndarray]:
    specs = [TensorSpec(f"i{n}", a.shape, dtypes.name_of(a.dtype), (f"i{n}", 0)) for n, a in enumerate(inputs)]
    outs = [TensorSpec(f"o_{n}", s, d) for n, (s, d) in enumerate(outputs)]
    results = [TensorSpec(f"o_{n}", s, d, ("o", n)) for n, (s, d) in enumerate(outputs)]
    ir = IRGraph("one", specs, results, [], {}, [OpNode("o", op, specs, outs, attrs)])
    return list(execute_cpu_partition(ir, {t.name: a for t, a in zip(specs, inputs, strict=True)}).values())


def test_arguments_by_schema() -> None:
    x = array(2, 3)
    np.testing.assert_array_equal(one_op("aten.mul.Tensor", [x], [((2, 3), "float32")], other=2.0)[0], x * 2)
    np.testing.assert_array_equal(one_op("aten.add.Tensor", [x, x], [((2, 3), "float32")], alpha=2)[0], x + 2 * x)
    np.testing.assert_array_equal(
        one_op("aten.clamp.default", [x], [((2, 3), "float32")], min=None, max=0)[0], np.minimum(x, 0)
    )
    cast = one_op("aten.to.dtype", [x], [((2, 3), "bfloat16")], dtype="torch.bfloat16")[0]
    assert cast.dtype == ml_dtypes.bfloat16 and np.array_equal(cast, x.astype(ml_dtypes.bfloat16))
    made = one_op(
        "aten.arange.start", [], [((3,), "int64")], start=1, end=4, dtype="int64", device="meta", layout="strided"
    )
    np.testing.assert_array_equal(made[0], [1, 2, 3])
    parts = one_op("aten.split.Tensor", [x], [((1, 3), "float32")] * 2, split_size=1)
    np.testing.assert_array_equal(np.concatenate(parts), x)
    picked = one_op(
        "aten.index.Tensor", [x, np.array([2, 0])], [((2, 2), "float32")],
        _tensor_list_sizes=[1], _tensor_list_none_masks=[[True, False]],
    )  # fmt: skip
    np.testing.assert_array_equal(picked[0], x[:, [2, 0]])
    both = one_op("aten.cat.default", [x, x], [((2, 6), "float32")], _tensor_list_sizes=[2], dim=-1)
    np.testing.assert_array_equal(both[0], np.concatenate([x, x], -1))
    scaled = one_op("aten.linear.default", [x, array(4, 3)], [((2, 4), "float32")])
    assert scaled[0].shape == (2, 4)


def test_half_types_pass_through_without_copies() -> None:
    x = array(3, 4).astype(ml_dtypes.bfloat16)
    viewed = one_op("aten.view.default", [x], [((12,), "bfloat16")], size=[12])[0]
    assert np.shares_memory(viewed, x) and viewed.dtype == x.dtype


def test_in_place_op_writes_its_input() -> None:
    x = array(2, 3)
    result = one_op("aten.relu_.default", [x], [((2, 3), "float32")])[0]
    assert np.shares_memory(result, x) and (x >= 0).all()


def test_mixed_float_inputs_are_promoted() -> None:
    a, b = array(2, 3).astype(ml_dtypes.bfloat16), array(3, 2)
    found = one_op("aten.matmul.default", [a, b], [((2, 2), "float32")])[0]
    np.testing.assert_allclose(found, a.astype(np.float32) @ b, rtol=1e-5)


@pytest.mark.parametrize(
    ("op", "attrs", "found", "stated"),
    [
        ("aten.mul.Tensor", {"other": {"complex": [1, 2]}}, "complex64", "float32"),
        ("aten.mul.Tensor", {"other": 0.5}, "float32", "int64"),
    ],
)
def test_a_result_of_another_kind_of_numbers_is_not_cut(op: str, attrs: Any, found: str, stated: str) -> None:
    with pytest.raises(BackendError, match=rf"^node 'o' \({op}\) gives {found}, the IR states {stated}; re-export"):
        one_op(op, [array(2, 3)], [((2, 3), stated)], **attrs)


def test_an_in_place_op_is_not_repeated_on_copies() -> None:
    """It would write to a copy of its input, and views of the old memory would keep the old values."""
    a, b, c = array(2, 2).astype(ml_dtypes.bfloat16), array(2, 3), array(3, 2)
    with pytest.raises(BackendError, match=r"aten.addmm_.default\) failed on the host"):
        one_op("aten.addmm_.default", [a, b, c], [((2, 2), "bfloat16")])


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("aten.no_such_op.default", {}, r"n \(aten.no_such_op.default\): PyTorch .* has no op"),
        ("wrap_with_set_grad_enabled", {}, "npu_compiler.capture"),
        ("aten.relu.default", {"bogus": 1}, "takes no argument bogus"),
        ("aten.add.Tensor", {}, "tensor argument other is missing"),
    ],
)
def test_unrunnable_node_is_named(op: str, attrs: dict[str, Any], message: str) -> None:
    ir = Builder().node("n", op, "x", **attrs).out("n")
    with pytest.raises(CompileError, match=message) as caught:
        DAGExecutor(partition(ir, lambda op: False))
    assert [(name, kind) for name, kind, _ in caught.value.reasons] == [("n", op)]


def test_failing_op_is_named() -> None:
    ir = Builder().node("n", "aten.matmul.default", "x", "x").out("n")
    ir.nodes[0].attrs["_tensor_list_sizes"] = []
    ir.nodes[0].outputs[0] = TensorSpec("n", (5,), "float32")
    ir.graph_outputs = [TensorSpec("n", (5,), "float32", ("n", 0))]
    with pytest.raises(BackendError, match=r"node 'n' \(aten.matmul.default\) gives shape \[4, 4\]"):
        execute_cpu_partition(ir, {"x": array()})


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing x"),
        ({"y": np.zeros(SHAPE, np.float32)}, "missing x and unknown y"),
        ([np.zeros((4, 5), np.float32)], r"'x': shape \[4, 5\], expected \[4, 4\]"),
        ([np.zeros(SHAPE, np.float64)], "'x': dtype float64, expected float32"),
        (["text"], "'x'"),
        ([], "got 0 inputs, expected 1"),
    ],
)
def test_wrong_inputs_are_named(inputs: Any, message: str) -> None:
    executor = DAGExecutor(partition(Builder().node("o", ODD, "x").node("y", RELU, "o").out("y")))
    with pytest.raises(InputError, match=message):
        executor.execute(inputs)


@pytest.mark.parametrize("given", [{}, {"w": np.zeros((2, 2), np.float32)}, {"w": np.zeros(SHAPE, np.int64)}])
def test_wrong_weights_are_named(given: dict[str, np.ndarray]) -> None:
    ir = Builder(weights=("w",)).node("o", ODD, "p_w").node("y", HEAVY, "o", "x").out("y")
    executor = DAGExecutor(partition(ir))
    executor.load_weights({"w": (w := np.abs(array()) + 1)})
    with pytest.raises(WeightError, match="'w'"):
        executor.load_weights(given)
    want = torch.special.bessel_j1(torch.from_numpy(w)).numpy()
    np.testing.assert_allclose(executor.execute([np.eye(4, dtype=np.float32)])["y"], want, rtol=1e-5)  # as before


def test_refused_node_lists_its_reason() -> None:
    ir = Builder().node("o", ODD, "x").out("o")
    with pytest.raises(CompileError) as caught:
        npu_compiler.compile(ir)
    assert [(name, op) for name, op, _ in caught.value.reasons] == [("o", ODD)]
