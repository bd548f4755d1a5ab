"""The IR reader: what it accepts, what it gives, and that every error is an IRError with the right JSON path."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_compiler.aten.ir import IRGraph, OpNode, StateUpdate, TensorSpec
from npu_compiler.aten.json_reader import graph_weights_used, load_ir, load_ir_from_dict
from npu_compiler.aten.json_writer import ir_to_dict, save_ir
from npu_compiler.aten.rotary_regions import LOST
from npu_compiler.support import dtypes
from npu_compiler.support.errors import IRError

DATA = Path(__file__).parents[3] / "tests" / "data" / "ir"
FILES = sorted(p for p in DATA.glob("*.json") if "mapping" not in p.name)
NODES = {
    "mlp": 9,
    "convnet": 14,
    "simple_convnet_ir": 10,
    "resnet18": 69,
    "resnet50": 175,
    "qwen2_prefill": 168,
    "qwen2_decode": 162,
    "qwen2_prefill_bf16": 168,
    "qwen2_decode_bf16": 162,
    "qwen2_prefill_tf5.23": 166,
    "qwen2_decode_tf5.23": 160,
}


def tensor(name: str, shape: list[Any], dtype: str = "float32", producer: str | None = None, index: int = 0) -> Any:
    t: dict[str, Any] = {"name": name, "shape": shape, "dtype": dtype}
    return t if producer is None else {**t, "producer_node": producer, "producer_output_idx": index}


def document() -> dict[str, Any]:
    """x, w -> linear -> topk (two outputs) -> getitem, plus a state buffer and constants of every kind."""
    k = tensor("b_k", [2, 4])
    return {
        "model_name": "tiny",
        "pytorch_version": "2.13.0",
        "graph_inputs": [tensor("x", [2, 3])],
        "graph_outputs": [tensor("values", [2, 2]), tensor("x", [2, 3]), tensor("p_w", [4, 3])],
        "weights": [tensor("w", [4, 3]), tensor("k", [2, 4]), tensor("unused", []), tensor("table", [2], "bfloat16")],
        "weight_name_mapping": {"p_w": "w", "b_k": "k", "c_table": "table"},
        "nodes": [
            {
                "name": "linear",
                "op_type": "aten.linear.default",
                "inputs": [tensor("x", [2, 3], producer="x"), tensor("p_w", [4, 3])],
                "outputs": [tensor("linear", [2, 4])],
                "attrs": {},
            },
            {
                "name": "add",
                "op_type": "aten.add.Tensor",
                "inputs": [tensor("linear", [2, 4], producer="linear"), k],
                "outputs": [tensor("add", [2, 4])],
                "attrs": {"alpha": 2},
            },
            {
                "name": "topk",
                "op_type": "aten.topk.default",
                "inputs": [tensor("add", [2, 4], producer="add")],
                "outputs": [tensor("topk_0", [2, 2]), tensor("topk_1", [2, 2], "int64")],
                "attrs": {"k": 2, "dim": -1},
            },
            {
                "name": "values",
                "op_type": "<built-in function getitem>",
                "inputs": [
                    tensor("topk_0", [2, 2], producer="topk"),
                    tensor("topk_1", [2, 2], "int64", producer="topk", index=1),
                ],
                "outputs": [tensor("values", [2, 2])],
                "attrs": {"index": 0},
            },
            {
                "name": "mul",
                "op_type": "aten.mul.Tensor",
                "inputs": [tensor("c_table", [2], "bfloat16")],
                "outputs": [tensor("mul", [2], "bfloat16")],
                "attrs": {"other": 2.0, "_tensor_list_sizes": [1], "_tensor_list_none_masks": [[True, False]]},
            },
        ],
        "constants": {"table": {"data": [1.0, 2.5], "dtype": "bfloat16"}},
        "state": [{"key": "k", "value": tensor("add", [2, 4], producer="add")}],
    }


def same(a: IRGraph, b: IRGraph) -> bool:
    fields = (
        "model_name",
        "graph_inputs",
        "graph_outputs",
        "weights",
        "weight_name_mapping",
        "state",
        "pytorch_version",
    )
    return (
        all(getattr(a, f) == getattr(b, f) for f in fields)
        and repr(a.nodes) == repr(b.nodes)
        and a.constants.keys() == b.constants.keys()
        and all(
            v.dtype == b.constants[k].dtype
            and v.shape == b.constants[k].shape
            and v.tobytes() == b.constants[k].tobytes()
            for k, v in a.constants.items()
        )
    )


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_documented_files_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    graph = load_ir(path)
    lost = sum(n["op_type"] == LOST for n in json.loads(path.read_text())["nodes"])
    assert lost == ("code" in path.stem or "fill" in path.stem)
    assert len(graph.nodes) == NODES[path.stem] + 8 * lost  # a rotary table, instead of a region without a body
    assert all(t.producer is not None for t in graph.graph_outputs)
    assert all("torch." not in json.dumps(n.attrs) for n in graph.nodes)
    save_ir(graph, tmp_path / "ir.json")
    assert same(load_ir(str(tmp_path / "ir.json")), graph)


def test_all_documented_files_are_there() -> None:
    assert {p.stem for p in FILES} == NODES.keys()


def test_sources_of_every_kind() -> None:
    graph = load_ir(document())
    assert load_ir(graph) is graph
    assert same(load_ir_from_dict(document()), graph)
    assert same(load_ir(json.loads(json.dumps(document()))), graph)
    with pytest.raises(IRError, match=r"^\$: expected a path, a dict, a torch_ir.IR object or an IRGraph, got int"):
        load_ir(3)


def test_references_carry_their_producers() -> None:
    graph = load_ir(document())
    assert graph.graph_inputs[0].producer == ("x", 0)
    assert [graph.key(t) for t in graph.graph_outputs] == [("values", 0), ("x", 0), ("p_w", -1)]
    assert graph.state == [StateUpdate("k", TensorSpec("add", (2, 4), "float32", ("add", 0)))]
    assert list(graph_weights_used(graph)) == ["w", "k"]


def test_reading_does_not_change_the_source() -> None:
    d = document()
    load_ir(d)
    assert d == document()


def test_pytorch_ir_objects_with_raw_torch_values() -> None:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir is not installed")
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.bn = torch.nn.BatchNorm2d(4)

        def forward(self, x: Any, index: Any) -> Any:
            y = torch.relu_(self.bn(self.conv(x)))
            y = y.softmax(1, dtype=torch.float64).to(torch.bfloat16) + torch.arange(6, dtype=torch.bfloat16)
            y = y.masked_fill(y > 1, float("-inf")).contiguous(memory_format=torch.channels_last)
            table = torch.tensor([[True, False], [False, True]]), torch.tensor([1, 2], dtype=torch.int8)
            return y[:, index], y.max(1)[1], table[0] & True, table[1] + torch.tensor(1.5, dtype=torch.bfloat16)

    args = (torch.zeros(2, 3, 8, 8), torch.tensor([0, 2]))
    graph = load_ir(torch_ir.extract_ir(Model().eval(), args, strict=False))
    attrs = {n.op_type: n.attrs for n in graph.nodes}
    assert attrs["aten.softmax.int"]["dtype"] == "float64"
    assert attrs["aten.arange.default"] == {"end": 6, "dtype": "bfloat16", "device": "cpu", "pin_memory": False}
    assert attrs["aten.contiguous.default"]["memory_format"] == "channels_last"
    assert attrs["aten.masked_fill.Scalar"]["value"] == -math.inf
    assert attrs["aten.index.Tensor"]["_tensor_list_none_masks"] == [[True, False]]
    assert {str(v.dtype) for v in graph.constants.values()} == {"bool", "int8", "bfloat16"}
    assert same(load_ir(ir_to_dict(graph)), graph)


def test_keyword_tensors_lost_by_pytorch_ir_are_an_error() -> None:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir is not installed")
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def forward(self, edges: Any, x: Any, order: Any) -> Any:
            return torch.searchsorted(edges, x, sorter=order)

    args = (torch.zeros(3), torch.zeros(2), torch.tensor([0, 1, 2]))
    with pytest.raises(IRError, match=r"^nodes\[0\]\.attrs\.sorter: .*npu_compiler\.capture"):
        load_ir(torch_ir.extract_ir(Model(), args, strict=False))


# ------------------------------------------------------------------------------------------------ constants, attributes


@pytest.mark.parametrize("name", dtypes.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3,), (5, 40), (8, 32)])
def test_constants_round_trip_bit_for_bit(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = dtypes.numpy_dtype(name)
    value = (np.arange(math.prod(shape)).reshape(shape) % 7 - 2).astype(dtype)
    if shape == (8, 32):
        value = np.full(shape, 3).astype(dtype)
    if dtypes.is_float(name) and value.size > 4:
        value.flat[:4] = [math.nan, math.inf, -math.inf, -0.0]
    graph = IRGraph("c", [], [], [TensorSpec("c", shape, name)], {"c_c": "c"}, [], {"c": value})
    save_ir(graph, tmp_path / "c.json")
    assert same(load_ir(tmp_path / "c.json"), graph)


def test_repeated_values_are_stored_once() -> None:
    graph = IRGraph(
        "c", [], [], [TensorSpec("c", (1000, 1000), "float32")], {}, [], {"c": np.zeros((1000, 1000), "f4")}
    )
    assert ir_to_dict(graph)["constants"] == {"c": {"shape": [1000, 1000], "dtype": "float32", "fill": 0.0}}
    assert ir_to_dict(load_ir(ir_to_dict(graph))) == ir_to_dict(graph)


@pytest.mark.parametrize(
    ("data", "dtype", "expected"),
    [
        ([[1, 2], [3, 4]], "bfloat16", np.array([[1, 2], [3, 4]], ml_dtypes.bfloat16)),
        ([-128, 127], "int8", np.array([-128, 127], np.int8)),
        ([True, False], "bool", np.array([True, False])),
        ([255], "uint8", np.array([255], np.uint8)),
        (9007199254740993, "int64", np.array(9007199254740993, np.int64)),
        ([math.inf, -math.inf], "float16", np.array([math.inf, -math.inf], np.float16)),
    ],
)
def test_nested_lists_come_back_in_their_real_dtype(data: Any, dtype: str, expected: np.ndarray) -> None:
    d = document()
    d["constants"]["extra"] = {"data": data, "dtype": dtype}
    value = load_ir(d).constants["extra"]
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def test_empty_constants_get_the_declared_shape() -> None:
    d = document()
    d["weights"] += [tensor("e", [0, 3]), tensor("m", [2, 0], "bfloat16")]
    d["weight_name_mapping"]["c_m"] = "m"
    d["constants"]["e"] = {"data": [], "dtype": "float32"}
    constants = load_ir(d).constants
    assert constants["e"].shape == (0, 3)
    assert (constants["m"].shape, constants["m"].dtype) == ((2, 0), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("dtype", "torch.float32", "float32"),
        ("dtype", "torch.half", "float16"),
        ("dtype", None, None),
        ("out_dtype", "torch.bfloat16", "bfloat16"),
        ("device", "meta", "meta"),
        ("layout", "torch.strided", "strided"),
        ("memory_format", "torch.contiguous_format", "contiguous_format"),
        ("other", "torch.int64", "int64"),
        ("equation", "torch.ij->ji", "torch.ij->ji"),
        ("approximate", "tanh", "tanh"),
        ("end", 9223372036854775807, 9223372036854775807),
        ("value", -math.inf, -math.inf),
        ("size", (1, -1), [1, -1]),
        ("min", None, None),
        ("scale", np.float64(0.5), 0.5),
    ],
)
def test_attributes_are_normalised(key: str, written: Any, read: Any) -> None:
    d = document()
    d["nodes"][0]["attrs"] = {key: written}
    (value,) = load_ir(d).nodes[0].attrs.values()
    assert value == read
    assert type(value) is type(read)


def test_infinity_and_nan_literals(tmp_path: Path) -> None:
    d = document()
    d["nodes"][0]["attrs"] = {"value": -math.inf, "other": math.nan}
    (tmp_path / "i.json").write_text(json.dumps(d))
    assert "-Infinity" in (tmp_path / "i.json").read_text()
    attrs = load_ir(tmp_path / "i.json").nodes[0].attrs
    assert attrs["value"] == -math.inf
    assert math.isnan(attrs["other"])


# ------------------------------------------------------------------------------------------------------ name collisions


def test_colliding_tensor_names_are_kept_apart() -> None:
    """median.dim gives median_0 and median_1, and a later node is called median_1 too."""
    d = document()
    x = tensor("x", [2, 3], producer="x")
    d["nodes"] = [
        {"name": "median", "op_type": "aten.median.dim", "inputs": [x], "attrs": {"dim": 1},
         "outputs": [tensor("median_0", [2]), tensor("median_1", [2])]},
        {"name": "median_1", "op_type": "aten.median.default", "inputs": [x], "attrs": {},
         "outputs": [tensor("median_1", [2])]},
    ]  # fmt: skip
    d["state"] = []
    d["graph_outputs"] = [tensor("median_1", [2]), tensor("median_1", [2], producer="median", index=1)]
    assert [t.producer for t in load_ir(d).graph_outputs] == [("median_1", 0), ("median", 1)]
    d["nodes"][1]["name"] = "other"
    with pytest.raises(IRError, match=r"^graph_outputs\[0\]\.name: 2 tensors are named 'median_1'"):
        load_ir(d)


# --------------------------------------------------------------------------------------------------------------- errors


def put(path: str, value: Any) -> Any:
    """A mutation: set (or with ``DELETE`` remove) the value at a Python expression path."""

    def mutate(d: dict[str, Any]) -> None:
        *parents, last = eval(f"[{path.replace('/', ',')}]")
        for p in parents:
            d = d[p]
        if value is DELETE:
            del d[last]
        else:
            d[last] = value

    return mutate


DELETE = object()
IN = '"nodes"/1/"inputs"/0/'
ERRORS: list[tuple[Any, str]] = [
    (put('"nodes"', DELETE), "$: missing key 'nodes'"),
    (put('"nodes"', {}), "nodes: expected a list, got a dict"),
    (put('"nodes"/1', 7), "nodes[1]: expected an object, got 7"),
    (put('"nodes"/1/"op_type"', DELETE), "nodes[1]: missing key 'op_type'"),
    (put('"nodes"/1/"op_type"', ""), "nodes[1].op_type: expected a non-empty string, got ''"),
    (put('"nodes"/1/"name"', None), "nodes[1].name: expected a non-empty string, got None"),
    (put('"nodes"/1/"name"', "linear"), "nodes[1].name: duplicate node name 'linear', also nodes[0]"),
    (put('"nodes"/1/"name"', "x"), "nodes[1].name: a graph input has the same name 'x'"),
    (put('"nodes"/1/"name"', "p_w"), "nodes[1].name: a weight placeholder has the same name 'p_w'"),
    (
        put('"graph_inputs"/0/"shape"/0', "N"),
        "graph_inputs[0].shape[0]: expected a non-negative integer, got 'N'; shapes must be",
    ),
    (
        put(IN + '"shape"/0', "N"),
        "nodes[1].inputs[0].shape: [N, 4] differs from [2, 4], which",
    ),
    (put(IN + '"shape"/0', -1), "nodes[1].inputs[0].shape[0]: expected a non-negative integer, got -1"),
    (put(IN + '"shape"/0', True), "nodes[1].inputs[0].shape[0]: expected a non-negative integer, got True"),
    (put(IN + '"shape"/0', 2.0), "nodes[1].inputs[0].shape[0]: expected a non-negative integer, got 2.0"),
    (put(IN + '"shape"/0', 10**30), "nodes[1].inputs[0].shape[0]: 1000000000000000000000000000000 does not fit 64"),
    (put(IN + '"shape"/0', 10**9000), "nodes[1].inputs[0].shape[0]: a 29898-bit integer does not fit 64 bits"),
    (put(IN + '"shape"', [1 << 20] * 3), "nodes[1].inputs[0].shape: '[1048576, 1048576, 1048576]' exceeds"),
    (put(IN + '"shape"', [1] * 65), "nodes[1].inputs[0].shape: rank 65 exceeds 64"),
    (put(IN + '"shape"', [2, 5]), "nodes[1].inputs[0].shape: [2, 5] differs from [2, 4], which 'linear' declares"),
    (put(IN + '"dtype"', "float16"), "nodes[1].inputs[0].dtype: 'float16' differs from 'float32', which 'linear'"),
    (put(IN + '"dtype"', "float8"), "nodes[1].inputs[0].dtype: unknown dtype 'float8'; known: bool"),
    (put(IN + '"producer_node"', "nope"), "nodes[1].inputs[0].producer_node: no node or graph input is named 'nope'"),
    (put(IN + '"producer_node"', "topk"), "nodes[1].inputs[0].producer_node: node 'topk' (nodes[2]) is used before"),
    (put(IN + '"producer_node"', "add"), "nodes[1].inputs[0].producer_node: node 'add' (nodes[1]) is used before"),
    (
        put(IN[:-1], tensor("topk_0", [2, 2])),
        "nodes[1].inputs[0].name: 'topk_0' is not a weight, constant, graph input or output of an earlier node",
    ),
    (put(IN[:-1], tensor("topk", [2, 2])), "nodes[1].inputs[0].producer_node: node 'topk' (nodes[2]) is used before"),
    (
        put(IN + '"producer_output_idx"', 1),
        "nodes[1].inputs[0].producer_output_idx: 'linear' has 1 output(s), no output",
    ),
    (put(IN + '"producer_output_idx"', -1), "nodes[1].inputs[0].producer_output_idx: expected a non-negative integer"),
    (
        put('"nodes"/0/"inputs"/0/"producer_output_idx"', 1),
        "nodes[0].inputs[0].producer_output_idx: 'x' has 1 output(s)",
    ),
    (put('"nodes"/1/"outputs"/0/"producer_node"', "x"), "nodes[1].outputs[0].producer_node: an output of node 'add'"),
    (put('"nodes"/1/"inputs"/1/"name"', "p_x"), "nodes[1].inputs[1].name: 'p_x' is not a weight, constant"),
    (put('"nodes"/1/"inputs"/1/"shape"', [4]), "nodes[1].inputs[1].shape: [4] differs from [2, 4], which weights"),
    (put('"nodes"/1/"attrs"', []), "nodes[1].attrs: expected an object, got a list"),
    (put('"nodes"/1/"attrs"/"alpha"', 1 << 64), "nodes[1].attrs.alpha: integer 18446744073709551616 does not fit"),
    (put('"nodes"/1/"attrs"/"alpha"', object()), "nodes[1].attrs.alpha: expected a number, string, boolean, null or"),
    (put('"nodes"/1/"attrs"/"dtype"', 6), "nodes[1].attrs.dtype: expected a dtype name such as 'float32', got 6"),
    (put('"nodes"/1/"attrs"/"dtype"', "torch.qint8"), "nodes[1].attrs.dtype: unknown dtype 'torch.qint8'"),
    (put('"nodes"/4/"attrs"/"_tensor_list_sizes"', [2]), "nodes[4].attrs._tensor_list_sizes: the lists hold 2 tensors"),
    (
        put('"nodes"/4/"attrs"/"_tensor_list_sizes"', [-1]),
        "nodes[4].attrs._tensor_list_sizes[0]: expected a non-negative",
    ),
    (
        put('"nodes"/4/"attrs"/"_tensor_list_none_masks"', [[1]]),
        "nodes[4].attrs._tensor_list_none_masks[0]: expected a",
    ),
    (put('"nodes"/4/"attrs"/"_tensor_list_none_masks"', [[], []]), "nodes[4].attrs._tensor_list_none_masks: 2 masks"),
    (
        put('"graph_inputs"/0/"shape"/0', None),
        "graph_inputs[0].shape[0]: expected a non-negative integer, got None; shap",
    ),
    (put('"graph_outputs"/0/"name"', "zz"), "graph_outputs[0].name: 'zz' is not a weight, constant"),
    (put('"graph_outputs"/0/"shape"', [1]), "graph_outputs[0].shape: [1] differs from [2, 2], which 'values' declares"),
    (put('"weights"/1/"name"', "w"), "weights[1].name: duplicate weight 'w'"),
    (put('"weight_name_mapping"/"p_w"', "v"), "weight_name_mapping['p_w']: 'v' is neither in weights nor in constants"),
    (put('"weight_name_mapping"/"x"', "w"), "weight_name_mapping['x']: a graph input has the same name"),
    (put('"constants"', []), "constants: expected an object, got a list"),
    (put('"constants"/"table"/"data"', [1.0]), "constants['table']: is bfloat16[1], but weights declares bfloat16[2]"),
    (put('"constants"/"table"/"dtype"', "float32"), "constants['table']: is float32[2], but weights declares bfloat16"),
    (put('"constants"/"table"/"data"', [1.0, "a"]), "constants['table'].data: expected numbers of dtype bfloat16"),
    (put('"constants"/"table"/"data"', [1.0, [2]]), "constants['table'].data: not a regular nested list of numbers"),
    (put('"constants"/"t"', {"data": [300], "dtype": "uint8"}), "constants['t'].data: value out of range for uint8"),
    (put('"constants"/"t"', {"data": [1.5], "dtype": "int64"}), "constants['t'].data: expected numbers of dtype int64"),
    (
        put('"constants"/"t"', {"data": [1e300], "dtype": "float32"}),
        "constants['t'].data: value out of range for float32",
    ),
    (put('"constants"/"t"', {"data": [2], "dtype": "bool"}), "constants['t'].data: expected numbers of dtype bool"),
    (put('"constants"/"t"', {"dtype": "bool", "shape": [1]}), "constants['t']: missing key 'data_b64'"),
    (
        put('"constants"/"t"', {"dtype": "bool", "shape": [1], "data_b64": "Ag=="}),
        "constants['t'].data_b64: a bool must",
    ),
    (
        put('"constants"/"t"', {"dtype": "int8", "shape": [2], "data_b64": "Ag=="}),
        "constants['t'].data_b64: holds 1 byte",
    ),
    (
        put('"constants"/"t"', {"dtype": "int8", "shape": [1], "data_b64": "A\xff"}),
        "constants['t'].data_b64: not base64",
    ),
    (put('"constants"/"t"', {"dtype": "int8", "shape": [1], "fill": [1]}), "constants['t'].fill: expected one number"),
    (put('"state"/0/"key"', "zz"), "state[0].key: 'zz' is neither in weights nor in constants"),
    (put('"state"/0/"value"/"shape"', [1]), "state[0].value.shape: [1] differs from [2, 4], which 'add' declares"),
    (put('"state"/0/"key"', "w"), "state[0].value.shape: [2, 4] differs from [4, 3], which weights declares for 'w'"),
    (lambda d: d["state"].append(d["state"][0]), "state[1].key: duplicate state 'k'"),
    (lambda d: d["graph_inputs"].append(d["graph_inputs"][0]), "graph_inputs[1].name: duplicate graph input 'x'"),
    (put('"model_name"', 3), "model_name: expected a string, got 3"),
]


@pytest.mark.parametrize(("mutate", "message"), ERRORS, ids=[m[:70] for _, m in ERRORS])
def test_errors_name_the_json_path(mutate: Any, message: str) -> None:
    d = document()
    mutate(d)
    with pytest.raises(IRError) as e:
        load_ir(d)
    assert str(e.value).startswith(message)


def test_attributes_that_contain_themselves_are_refused() -> None:
    d = document()
    loop: list[Any] = []
    loop.append(loop)
    d["nodes"][0]["attrs"] = {"size": loop}
    with pytest.raises(IRError, match=r"^nodes\[0\]\.attrs\.size\[0\].*: nested more than 16 levels deep"):
        load_ir(d)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON: Expecting value at line 1 column 1"),
        (b'{"nodes": [}', "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "$: expected an object, got a list"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"nodes": [{"attrs": {"dim": 1, "dim": 2}}]}', "nodes[0].attrs: duplicate key 'dim'"),
        (b'{"nodes": 1, "nodes": 2}', "$: duplicate key 'nodes'"),
    ],
)
def test_unreadable_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(IRError) as e:
        load_ir(path)
    assert message in str(e.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path, "a\0b"):
        with pytest.raises(IRError, match=r"^\$: "):
            load_ir(path)


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.json"
    save_ir(load_ir(document()), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_ir(IRGraph("other", [], [], [], {}, []), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]


def test_unwritable_attributes_are_refused() -> None:
    graph = IRGraph("g", [], [], [], {}, [OpNode("n", "op", [], [], {"value": 1j})])
    with pytest.raises(IRError, match=r"^nodes\[0\]\.attrs\.value: "):
        ir_to_dict(graph)


# --------------------------------------------------------------------------------------------------------- mutated JSON

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 6),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.sampled_from(["", "x", "linear", "add", "topk", "p_w", "w", "k", "float32", "int64", "torch.bool", "N", "AAAA"]),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-1, 5), max_size=4),
    st.recursive(st.none(), lambda s: st.lists(s, min_size=1, max_size=2), max_leaves=30),
    st.sampled_from([tensor("x", [2, 3]), tensor("add", [2, 4], producer="add"), {"data": [1], "dtype": "int8"}]),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for k, v in items for p in [(value, k), *places(v)]]


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_documents_give_a_graph_or_an_ir_error(data: st.DataObject) -> None:
    d = copy.deepcopy(document())
    for _ in range(data.draw(st.integers(1, 4))):
        spots = places(d)
        container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        action = data.draw(st.sampled_from(["replace", "delete", "duplicate", "swap"]))
        if action == "replace":
            container[key] = copy.deepcopy(data.draw(JUNK))
        elif action == "delete":
            del container[key]
        elif action == "duplicate" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif action == "swap" and isinstance(container, list):
            container.reverse()
        if not places(d):
            break
    try:
        graph = load_ir(d)
    except IRError as e:
        assert ": " in str(e)
        return
    assert same(load_ir(ir_to_dict(graph)), graph)
    known = {graph.key(t) for t in graph.graph_inputs}
    for node in graph.nodes:
        assert all(t.producer is None or t.producer in known for t in node.inputs)
        known |= {(node.name, i) for i in range(len(node.outputs))}
    assert all(t.producer is None or t.producer in known for t in graph.graph_outputs)
