"""The IR reader: what it accepts, what it gives, and what it writes."""

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

from ...support.ir_documents import document, tensor

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
