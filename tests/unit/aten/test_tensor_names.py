"""IR whose tensors are known by their names: edges without producer fields, weights without placeholders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npu_compiler.aten.json_reader import load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.partitioning.constraint_checker import check
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.support.errors import IRError
from npu_runtime import DAGExecutor

from ...support.ir_documents import document, tensor
from .test_json_reader import same


def by_name(t: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in t.items() if not k.startswith("producer")}


def test_tensors_are_found_by_unique_names() -> None:
    """IR whose edges are names, without producer fields, and whose weights go by their own names."""
    full, bare = document(), document()
    for node in bare["nodes"]:
        node["inputs"] = [by_name(t) for t in node["inputs"]]
    bare["state"][0]["value"] = by_name(bare["state"][0]["value"])
    assert same(load_ir(bare), load_ir(full))


@pytest.mark.parametrize("target", ["npu", "mixed"])
def test_weights_by_their_own_name(target: str) -> None:
    """An empty weight_name_mapping: the program and the partitions read and write the same weights."""
    w, k = tensor("w", [4, 3]), tensor("k", [2, 4])
    doc = {
        "graph_inputs": [tensor("x", [2, 3])],
        "graph_outputs": [tensor("y", [2, 4]), tensor("w", [4, 3])],
        "weights": [w, k],
        "nodes": [
            {"name": n, "op_type": f"aten.{op}", "inputs": i, "outputs": [tensor(n, [2, 4])], "attrs": {}}
            for n, op, i in (
                ("h", "linear.default", [tensor("x", [2, 3]), w]),
                ("kept", "add_.Tensor", [k, tensor("h", [2, 4])]),
                ("y", "sigmoid.default", [tensor("kept", [2, 4])]),
            )
        ],
    }
    graph = load_ir(doc)
    assert same(load_ir(ir_to_dict(graph)), graph) and check(graph) == []
    plan = partition(graph, force_cpu=["h"] if target == "mixed" else [])
    weights = {"w": np.arange(12, dtype=np.float32).reshape(4, 3) / 8, "k": np.ones((2, 4), np.float32)}
    x = np.full((2, 3), 0.25, np.float32)
    executor = DAGExecutor(plan, weights=weights)
    total = weights["k"]
    for _ in range(2):
        total = total + x @ weights["w"].T
        outputs = executor.execute([x])
        np.testing.assert_allclose(outputs["y"], 1 / (1 + np.exp(-total)), rtol=1e-5)
        np.testing.assert_array_equal(outputs["w"], weights["w"])


@pytest.mark.parametrize(("clash", "says"), [("outputs", "a weight and a node or its output"), ("twice", "2 tensors")])
def test_names_that_are_not_unique(clash: str, says: str) -> None:
    d = document()
    name = "table" if clash == "outputs" else "topk_0"
    d["nodes"][0]["outputs"][0]["name"] = name
    d["nodes"][3]["inputs"][0] = {**by_name(d["nodes"][3]["inputs"][0]), "name": name}
    with pytest.raises(IRError, match=rf"^nodes\[3\]\.inputs\[0\]\.name: {says}.* named '{name}'; producer_node must"):
        load_ir(d)
