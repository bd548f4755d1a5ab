"""A small IR document, to be changed by tests."""

from __future__ import annotations

from typing import Any


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
