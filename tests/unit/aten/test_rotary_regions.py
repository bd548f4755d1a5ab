"""Rotary tables whose body the extractor lost; caches that come in and go out, as state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler import compile, explain, load_ir, partition
from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.rotary_regions import LOST
from npu_compiler.frontend.kv_state import as_state, loop_carried
from npu_compiler.support.errors import CompileError, IRError
from npu_runtime import CPUBackend, Executor

from ...support.torch_oracle import run_ir

POSITIONS, RATES = ("positions", [2, 3], "int64"), ("rates", [4], "float32")
Tensor = tuple[str, list[int], str]


def spec(t: Tensor, producer: str | None = None, index: int = 0) -> dict[str, Any]:
    where = {} if producer is None else {"producer_node": producer, "producer_output_idx": index}
    return {"name": t[0], "shape": t[1], "dtype": t[2], **where}


def document(inputs: list[Tensor], shape: list[int], dtype: str = "float32", outputs: int = 2) -> dict[str, Any]:
    """A region that is a node ``sin``; the first of its results is returned through a getitem, the last as it is."""
    results = [(f"sin_{i}", shape, dtype) for i in range(outputs)]
    read = [spec(t, "sin", i) for i, t in enumerate(results)]
    picked = ("picked", shape, dtype)
    return {
        "model_name": "rope", "graph_inputs": [spec(t) for t in inputs], "weights": [], "weight_name_mapping": {},
        "nodes": [
            {"name": "sin", "op_type": LOST, "inputs": [spec(t, t[0]) for t in inputs],
             "outputs": [spec(t) for t in results], "attrs": {}},
            {"name": "picked", "op_type": "<built-in function getitem>", "inputs": read, "outputs": [spec(picked)],
             "attrs": {"index": 0}},
        ],
        "graph_outputs": [spec(picked, "picked"), read[-1]],
    }  # fmt: skip


@pytest.mark.parametrize("inputs", [[POSITIONS, RATES], [RATES, POSITIONS], [("sin_cos", [2, 3], "float32"), RATES]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rotary_table_is_spelled_out(inputs: list[Tensor], dtype: str) -> None:
    """Whatever the order of the inputs: types and shapes tell which is which. Angles are float32."""
    ir = load_ir(document(inputs, [2, 3, 8], dtype))
    assert all(n.op_type.startswith("aten.") for n in ir.nodes)
    assert ir.output_names() == ["picked", "sin_1"]
    angles = [n.outputs[0].dtype for n in ir.nodes if n.op_type in ("aten.cos.default", "aten.sin.default")]
    assert angles == ["float32", "float32"]
    at = torch.tensor([[0, 1, 2], [30, 31, 4000]])
    rates = torch.tensor([1.0, 0.3, 0.01, 1e-4])
    values = {"positions": at, "rates": rates, "sin_cos": at.float()}
    found = Executor(compile(ir), {}, CPUBackend()).run([values[name] for name, _, _ in inputs])
    turned = (at[..., None].float() * rates).repeat(1, 1, 2)
    for name, exact in (("picked", turned.cos()), ("sin_1", turned.sin())):
        tolerance = 1e-6 if dtype == "float32" else 4e-3
        np.testing.assert_allclose(np.asarray(found[name], np.float32), exact, rtol=0, atol=tolerance)
    exact, _ = run_ir(ir, {}, [values[name] for name, _, _ in inputs])
    assert exact[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("inputs", "shape", "outputs"),
    [
        ([POSITIONS, RATES], [2, 3, 4], 2),  # not twice the frequencies
        ([POSITIONS, RATES], [2, 3, 8], 1),
        ([POSITIONS, RATES, ("x", [1], "float32")], [2, 3, 8], 2),
        ([("a", [4], "float32"), ("b", [4], "float32")], [4, 8], 2),  # which of them are the positions?
        ([POSITIONS, ("rates", [4], "int64")], [2, 3, 8], 2),
    ],
)
def test_other_regions_stay_refused(inputs: list[Tensor], shape: list[int], outputs: int) -> None:
    ir = load_ir(document(inputs, shape, outputs=outputs))
    assert LOST in [n.op_type for n in ir.nodes]
    assert "lost the body of this set_grad_enabled region" in str(explain(ir))
    with pytest.raises(CompileError, match="sin"):
        compile(ir)
    assert partition(ir).reasons["sin"].rule == "lost_region"


def test_names_of_a_table_do_not_collide() -> None:
    doc = document([("sin_angles", [2, 3], "int64"), ("sin_cos", [4], "float32")], [2, 3, 8])
    names = [n.name for n in load_ir(doc).nodes]
    assert len({*names, "sin_angles", "sin_cos"}) == len(names) + 2


# -------------------------------------------------------------------------------------------------------------- state


def cache_step() -> IRGraph:
    """A cache [1, 8] that a step writes two rows into, its sum, and an input that only passes through."""
    cache, other, row, at = (
        ("cache", [1, 8], "float32"), ("other", [1, 8], "float32"), ("row", [1, 1], "float32"), ("at", [1], "int64"),
    )  # fmt: skip
    mid, out, total = ("mid", [1, 8], "float32"), ("out", [1, 8], "float32"), ("total", [], "float32")
    copy = "aten.index_copy.default"

    def node(t: Tensor, op: str, *inputs: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        return {"name": t[0], "op_type": op, "inputs": list(inputs), "outputs": [spec(t)], "attrs": attrs}

    return load_ir(
        {
            "model_name": "step", "graph_inputs": [spec(t) for t in (cache, other, row, at)], "weights": [],
            "weight_name_mapping": {},
            "nodes": [
                node(mid, copy, spec(cache, "cache"), spec(at, "at"), spec(row, "row"), dim=1),
                node(out, copy, spec(mid, "mid"), spec(at, "at"), spec(row, "row"), dim=1),
                node(total, "aten.sum.default", spec(out, "out")),
            ],
            "graph_outputs": [spec(total, "total"), spec(out, "out"), spec(other, "other")],
        }
    )  # fmt: skip


def test_a_cache_stays_and_is_written_in_place() -> None:
    ir = cache_step()
    assert loop_carried(ir) == {"cache": "out"}
    program = compile(as_state(ir))
    assert [i.name for i in program.entries["main"].inputs] == ["other", "row", "at"]
    assert [o.name for o in program.entries["main"].outputs] == ["total", "other"]
    run = Executor(program, {}, CPUBackend())
    other, totals = np.zeros((1, 8), np.float32), []
    for i in range(4):
        found = run.run([other, np.full((1, 1), i + 1, np.float32), np.array([i])])
        totals.append(float(found["total"]))
    assert totals == [1, 3, 6, 10]
    np.testing.assert_array_equal(run.state.snapshot()["cache"][0], [1, 2, 3, 4, 0, 0, 0, 0])
    begun = Executor(program, {"cache": np.ones((1, 8), np.float32)}, CPUBackend())
    assert begun.run([other, np.zeros((1, 1), np.float32), np.array([7])])["total"] == 7


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"none": "out"}, "has no input 'none'; it has cache, other, row, at"),
        ({"cache": "none"}, "has no output 'none'; it has total, out, other"),
        (
            {"cache": "total"},
            r"'cache' and output 'total' cannot be one state: they are float32\[1, 8\] and float32\[\]",
        ),
    ],
)
def test_pairs_that_are_none(pairs: dict[str, str], message: str) -> None:
    with pytest.raises(IRError, match=message):
        as_state(cache_step(), pairs)
