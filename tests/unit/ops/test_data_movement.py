"""Indexing, views and padding beyond plain results: index errors, refusals, memory that is or is not shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npu_compiler.graph import interp
from npu_compiler.graph.expr import const, index, load, where
from npu_compiler.graph.expr_interp import evaluate
from npu_compiler.graph.graph import VIEWS, Graph, Value
from npu_compiler.ops import lower_call
from npu_compiler.ops.table import operators, operators_markdown
from npu_compiler.support.errors import Unsupported

Spec = tuple[list[int], str]
X: Spec = ([3, 4], "float32")


def lowered(op_type: str, specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Graph, list[Value], list[Value]]:
    """The graph, its inputs and the results of one call; inputs are named 0, 1, ..., the first result y."""
    graph = Graph()
    inputs = [graph.input(str(i), shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    results = [r for r in lower_call(graph, op_type, inputs, attrs) if r is not None]
    graph.outputs.append(("y", results[0]))
    return graph, inputs, results


LIST = {"_tensor_list_sizes": [1]}
AT: Spec = ([2], "int64")
MEAN = {"dim": 0, "value": 2, "reduce": "mean"}
RESIZE = {"output_size": [6, 6], "align_corners": False, "scale_factors": None}


@pytest.mark.parametrize(
    ("op_type", "specs", "attrs", "bad"),
    [
        ("aten.embedding.default", (X, AT), {}, 3),
        ("aten.embedding.default", (X, AT), {}, -1),
        ("aten.index_select.default", (X, AT), {"dim": 1}, 4),
        ("aten.gather.default", (X, ([2, 4], "int64")), {"dim": 0}, 3),
        ("aten.take.default", (X, AT), {}, -13),
        ("aten.index.Tensor", (X, AT), LIST, -4),
        ("aten.index_copy.default", (X, AT, ([2, 4], "float32")), {"dim": 0}, 3),
        ("aten.index_add.default", (X, AT, ([2, 4], "float32")), {"dim": 0}, -1),
        ("aten.index_put.default", (X, AT, ([2, 4], "float32")), LIST, 3),
        ("aten.scatter_add.default", (X, ([2, 4], "int64"), ([2, 4], "float32")), {"dim": 1}, 4),
        ("aten.one_hot.default", (AT,), {"num_classes": 5}, 5),
    ],
)
def test_index_out_of_range_is_an_error_at_run_time(
    op_type: str, specs: tuple[Spec, ...], attrs: dict[str, Any], bad: int
) -> None:
    graph, _, _ = lowered(op_type, specs, attrs)
    inputs = {str(i): np.zeros(shape, dtype) for i, (shape, dtype) in enumerate(specs)}
    interp.run(graph, inputs)  # zeros are legal everywhere
    at = next(str(i) for i, (_, dtype) in enumerate(specs) if dtype == "int64")
    inputs[at].flat[-1] = bad
    with pytest.raises(IndexError, match="out of range"):
        interp.run(graph, inputs)


def test_guarded_loads_may_leave_their_operand() -> None:
    """The branch of a where that is not taken is never an error; the one that is taken is."""
    x = np.arange(3.0, dtype=np.float32)
    at = index(0) - 1
    padded = where((at >= 0) & (at < 3), load(0, "float32", [at]), const(9, "float32"))
    assert evaluate(padded, (5,), [x]).tolist() == [9, 0, 1, 2, 9]
    assert evaluate(padded * 2.0 + 1.0, (5,), [x]).tolist() == [19, 1, 3, 5, 19]
    with pytest.raises(IndexError):
        evaluate(where(at < 2, load(0, "float32", [at]), const(9, "float32")), (5,), [x])


@pytest.mark.parametrize(
    ("op_type", "specs", "attrs", "rule"),
    [
        ("aten.index.Tensor", (X, ([3], "bool")), LIST, "data_dependent"),
        ("aten.index.Tensor", (X, ([3], "uint8")), LIST, "data_dependent"),
        ("aten.index_put.default", (X, ([3, 4], "bool"), ([5], "float32")), LIST, "data_dependent"),
        ("aten.one_hot.default", (AT,), {}, "data_dependent"),
        ("aten.index_add.default", (([3], "bool"), AT, ([2], "bool")), {"dim": 0}, "dtype"),
        ("aten.scatter_reduce.two", (X, ([1, 4], "int64"), X), {"dim": 0, "reduce": "max"}, "arguments"),
        ("aten.scatter.value_reduce", (X, ([1, 4], "int64")), MEAN, "arguments"),
        ("aten.scatter.src", (X, ([2, 4], "int64"), ([1, 4], "float32")), {"dim": 0}, "arguments"),
        ("aten.pad.default", (X,), {"pad": [1, 1], "mode": "wrap"}, "attribute"),
        ("aten.reflection_pad1d.default", (X,), {"padding": [4, 0]}, "arguments"),
        ("aten.constant_pad_nd.default", (X,), {"pad": [-3, -3]}, "arguments"),
        ("aten.cat.default", (X, ([3, 5], "float32")), {"_tensor_list_sizes": [2]}, "arguments"),
        ("aten.select.int", (X,), {"dim": 0, "index": 3}, "arguments"),
        ("aten.narrow.default", (X,), {"dim": 1, "start": 3, "length": 2}, "arguments"),
        ("aten.split_with_sizes.default", (X,), {"split_sizes": [1, 1]}, "arguments"),
        ("aten.view.default", (X,), {"size": [5, 2]}, "arguments"),
        ("aten.expand.default", (X,), {"size": [3, 8]}, "arguments"),
        ("aten.topk.default", (X,), {"k": 5}, "arguments"),
        ("aten.upsample_bilinear2d.vec", (([1, 1, 3, 3], "uint8"),), RESIZE, "dtype"),
        ("aten.scaled_dot_product_attention.default", (X, X, X), {"dropout_p": 0.1}, "attribute"),
        ("aten.scaled_dot_product_attention.default", (X, X, X, ([3, 3], "bool")), {"is_causal": True}, "attribute"),
        ("aten.scaled_dot_product_attention.default", (X, X, X, ([2, 3], "bool")), {}, "arguments"),
        ("aten.scaled_dot_product_attention.default", (X, X, X, ([3, 3], "int64")), {}, "dtype"),
    ],
)  # fmt: skip
def test_refused(op_type: str, specs: tuple[Spec, ...], attrs: dict[str, Any], rule: str) -> None:
    with pytest.raises(Unsupported) as caught:
        lowered(op_type, specs, attrs)
    assert caught.value.reason.rule == rule, caught.value


def root(x: Value) -> Value:
    while x.op in VIEWS:
        x = x.node.inputs[0]
    return x


@pytest.mark.parametrize(
    ("op_type", "attrs", "shared"),
    [
        ("aten.view.default", {"size": [4, 3]}, True),
        ("aten.transpose.int", {"dim0": 0, "dim1": 1}, True),
        ("aten.slice.Tensor", {"dim": 1, "start": 1, "end": 3}, True),
        ("aten.diagonal.default", {"offset": 1}, True),
        ("aten.unfold.default", {"dimension": 1, "size": 2, "step": 2}, True),
        ("aten.split.Tensor", {"split_size": 2}, True),
        ("aten.unbind.int", {}, True),
        ("aten._unsafe_view.default", {"size": [12]}, False),
        ("aten.repeat.default", {"repeats": [1, 1]}, False),
        ("aten.flip.default", {"dims": []}, False),
        ("aten.roll.default", {"shifts": [0], "dims": [0]}, False),
        ("aten.cat.default", {"_tensor_list_sizes": [1]}, False),
        ("aten.constant_pad_nd.default", {"pad": [0, 0]}, False),
        ("aten.index_fill.int_Scalar", {"dim": 0, "value": 1}, False),
    ],
)
def test_results_share_memory_exactly_where_pytorch_shares_it(
    op_type: str, attrs: dict[str, Any], shared: bool
) -> None:
    specs = (X, ([0], "int64")) if op_type.startswith("aten.index_fill") else (X,)
    _, inputs, results = lowered(op_type, specs, attrs)
    assert all((root(r) is inputs[0]) == shared for r in results)


def test_operator_table_lists_every_overload_once() -> None:
    rows = list(operators())
    text = operators_markdown()
    assert len(rows) >= 90 and len({r.op_type for r in rows}) == len(rows)
    assert all(text.count(f"| `{r.op_type}` |") == 1 for r in rows)
    bars = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert bars == {5}
