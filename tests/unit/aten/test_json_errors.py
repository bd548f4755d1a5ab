"""Malformed IR documents and unreadable files are refused with the JSON path or the place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_compiler.aten.json_reader import load_ir
from npu_compiler.support.errors import IRError

from ...support.ir_documents import document, tensor


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
    (put('"nodes"/1/"attrs"/"alpha"', "1.5"), "nodes[1].attrs.alpha: expected a number, boolean, null or list, got"),
    (put('"nodes"/4/"attrs"/"other"', [1.5, "x"]), "nodes[4].attrs.other[1]: expected a number, boolean, null or list"),
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
        (b"", "it is not valid JSON: Expecting value at line 1 column 1"),
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
        with pytest.raises(IRError, match=r"(cannot be read|embedded null)"):
            load_ir(path)
