"""What a lowering cannot honour exactly is refused, with a stable rule, and never computed differently."""

from __future__ import annotations

from typing import Any

import pytest

from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call
from npu_compiler.ops.lower import check_node
from npu_compiler.support.errors import CompileError, Unsupported
from npu_runtime.partitioned.fallback import HostPartition

BN = ([2, 3, 4, 4], [3], [3], [3], [3])
CASES: list[tuple[str, tuple[list[int], ...], dict[str, Any], str, str]] = [
    ("aten.batch_norm.default", BN, {"training": True, "momentum": 0.1, "eps": 1e-5}, "training", "eval"),
    ("aten.native_batch_norm.default", BN, {"training": True, "momentum": 0.1, "eps": 1e-5}, "training", "eval"),
    ("aten.instance_norm.default", BN, {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}, "training", "eval"),
    ("aten.dropout.default", ([4],), {"p": 0.5, "train": True}, "training", "eval"),
    ("aten.native_dropout.default", ([4],), {"p": 0.5, "train": None}, "training", "eval"),
    ("aten.rrelu.default", ([4],), {"training": True}, "training", "eval"),
    ("aten.gelu.default", ([4],), {"approximate": "cubic"}, "arguments", "cubic"),
    ("aten.sum.dim_IntList", ([2, 3],), {"dim": [2]}, "arguments", "dim 2"),
    ("aten.amax.default", ([2, 0],), {"dim": [1]}, "arguments", "empty"),
    ("aten.add.Tensor", ([2, 3], [4]), {}, "arguments", "broadcast"),
    ("aten.add.Tensor", ([2], [2]), {"beta": 3}, "attribute", "beta"),
    ("aten.add.Tensor", ([2], [2], [2]), {}, "arguments", "more than"),
    ("aten.mm.default", ([2, 3], [4, 5]), {}, "arguments", "mm"),
    (
        "aten.einsum.default",
        ([2, 3], [3, 4]),
        {"equation": "ij->ij", "_tensor_list_sizes": [2]},
        "arguments",
        "2 given",
    ),
    ("aten.arange.start_step", (), {"start": 0, "end": 4, "step": 0}, "arguments", "zero"),
    ("aten.max_pool2d.default", ([1, 1, 4, 4],), {"kernel_size": [2, 2], "padding": [2, 2]}, "arguments", "padding 2"),
    ("aten.no_such_op.default", ([2],), {}, "no_kernel", "on the host"),
]


@pytest.mark.parametrize(
    ("op_type", "shapes", "attrs", "rule", "says"), CASES, ids=lambda c: c if isinstance(c, str) else ""
)
def test_refused(op_type: str, shapes: tuple[list[int], ...], attrs: dict[str, Any], rule: str, says: str) -> None:
    graph = Graph()
    inputs = [graph.input(str(i), shape, "float32") for i, shape in enumerate(shapes)]
    with pytest.raises(Unsupported) as caught:
        lower_call(graph, op_type, inputs, attrs)
    assert caught.value.reason.rule == rule
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("op_type", "dtype", "attrs", "says"),
    [
        ("aten.relu.default", "complex64", {}, "complex64"),
        ("aten.bitwise_or.Scalar", "float32", {"other": 3}, "'or' of float32"),
        ("aten.bitwise_right_shift.Tensor_Scalar", "float16", {"other": 3}, "'shr' of float"),
        ("aten.bitwise_not.default", "float64", {}, "'not' of float64"),
        ("aten.pow.Tensor_Scalar", "int64", {"exponent": -1}, "negative integer power"),
        ("aten.add.Scalar", "int64", {"other": 1, "alpha": 0.5}, "factor of 0.5"),
    ],
)
def test_refused_dtype(op_type: str, dtype: str, attrs: dict[str, Any], says: str) -> None:
    graph = Graph()
    with pytest.raises(Unsupported, match=says):
        lower_call(graph, op_type, [graph.input("x", [2], dtype)], attrs)


def node(op_type: str, shapes: list[list[int]], out: list[int], out_dtype: str = "float32", **attrs: Any) -> OpNode:
    inputs = [TensorSpec(f"x{i}", tuple(shape), "float32", (f"x{i}", 0)) for i, shape in enumerate(shapes)]
    return OpNode("n", op_type, inputs, [TensorSpec("n", tuple(out), out_dtype)], attrs)


CONV = "aten.conv2d.default", [[1, 4, 5, 5], [6, 2, 3, 3]], [1, 6, 3, 3]
TRANSPOSED = "aten.conv_transpose2d.input", [[1, 4, 5, 5], [4, 2, 3, 3]], [1, 4, 7, 7]


@pytest.mark.parametrize("groups", [0, -2, "2", 3, 2.0, True])
@pytest.mark.parametrize("call", [CONV, TRANSPOSED], ids=["conv", "transposed"])
def test_groups_that_cannot_divide_the_channels(call: tuple[Any, ...], groups: object) -> None:
    """The check refuses them, so that no later phase meets them."""
    assert check_node(node(*call, groups=2)) is None
    reason = check_node(node(*call, groups=groups))
    assert reason is not None and reason.rule == "arguments"


def test_a_weight_for_other_channels() -> None:
    reason = check_node(node("aten.conv2d.default", [[1, 4, 5, 5], [6, 3, 3, 3]], [1, 6, 3, 3]))
    assert reason is not None and "3 * 1 channels" in reason.detail


@pytest.mark.parametrize("dim", [[0, 0], [1, -1], [-2, 1, 0]])
@pytest.mark.parametrize("op", ["aten.mean.dim", "aten.sum.dim_IntList", "aten.amax.default", "aten.logsumexp.default"])
def test_a_dim_that_is_named_twice(op: str, dim: list[int]) -> None:
    reason = check_node(node(op, [[2, 3]], [], dim=dim))
    assert reason is not None and "twice" in reason.detail


def test_a_dtype_that_contradicts_the_output() -> None:
    to = "aten.to.dtype", [[2]], [2]
    assert check_node(node(*to, "float16", dtype="float16")) is None
    wrong = node(*to, "float64", dtype="complex64")
    reason = check_node(node(*to, "float64", dtype="float16"))
    assert reason is not None and all(word in reason.detail for word in ("aten.to.dtype", "float16", "float64"))
    assert check_node(wrong) is not None
    x, y = wrong.inputs[0], TensorSpec("n", (2,), "float64", ("n", 0))
    with pytest.raises(CompileError, match="contradicts"):  # nor does the host compute something else
        HostPartition(IRGraph("m", [x], [y], [], {}, [wrong]))


def test_none_tensors_leave_no_gap() -> None:
    """Batch norm without weight and bias has three inputs; with explicit nulls it may lack only one of them."""
    attrs = {"training": False, "momentum": 0.1, "eps": 1e-5}
    for given, extra in ((3, {}), (4, {}), (4, {"weight": None})):
        graph = Graph()
        inputs = [graph.input(str(i), shape, "float32") for i, shape in enumerate(BN[:given])]
        (out,) = lower_call(graph, "aten.batch_norm.default", inputs, attrs | extra)
        assert out is not None and out.shape == (2, 3, 4, 4)
        graph.outputs.append(("y", out))
        graph.clean()
        read = {v for node in graph.nodes if node.op == "pointwise" for v in node.inputs}
        assert all(v in read for v in inputs), "an input was bound to a parameter that is not used"
