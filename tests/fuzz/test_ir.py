"""What fuzzing IR found: each is refused with the place and the reason, at once."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from npu_compiler.aten.ir import GETITEM, IRGraph, OpNode, TensorSpec
from npu_compiler.aten.json_reader import load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.ops.lower import check_node
from npu_compiler.pipeline import run_phases
from npu_compiler.support.errors import CompileError, IRError


def call(op: str, shape: tuple[int, ...], result: tuple[int, ...], outputs: int = 1, **attrs: Any) -> OpNode:
    x = TensorSpec("x", shape, "float32", ("x", 0))
    return OpNode("n", f"aten.{op}", [x], [TensorSpec(f"n_{i}", result, "float32") for i in range(outputs)], attrs)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (call("softmax.int", (3, 4), (3, 4), dim="x"), "softmax.int: dim='x', expected int"),
        (call("softmax.int", (3, 4), (3, 4), dim=[1]), r"dim=\[1\], expected int"),
        (call("softmax.int", (3, 4), (3, 4), dim=True), "dim=True, expected int"),
        (call("softmax.int", (3, 4), (3, 4), dim=None), "dim=None, expected int"),
        (call("sum.dim_IntList", (3, 4), (3, 1), dim=[[1]]), r"dim=\[\[1\]\], expected int or a list of int or null"),
        (call("sum.dim_IntList", (3, 4), (3, 1), dim=[1], keepdim=3), "keepdim=3, expected bool"),
        (call("clamp.default", (3,), (3,), min={"a": 1}), "min={'a': 1}, expected a tensor or int or float or bool"),
        (call("gelu.default", (3,), (3,), approximate=1), "approximate=1, expected text"),
        (call("full_like.default", (3,), (3,), fill_value=1e30, dtype="int64"), "does not fit int64"),
        (call("add.Tensor", (3,), (3,), other=[1]), "other=.1., expected a number or a tensor"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_type(node: OpNode, reason: str) -> None:
    found = check_node(node)
    assert found is not None and found.rule == "arguments"
    assert re.search(reason, found.detail), found.detail


@pytest.mark.parametrize(
    "node",
    [
        call("adaptive_avg_pool1d.default", (1, 2, 7), (1, 2, 2**31), output_size=[2**31]),
        call("adaptive_avg_pool2d.default", (1, 2, 8, 8), (1, 2, 2**31, 3), output_size=[2**31, 3]),
        call("avg_pool1d.default", (1, 1, 2**38), (1, 1, 2**38), kernel_size=[1]),
        call("chunk.default", (0, 3), (0, 3), chunks=2**62),
        call("split.Tensor", (2**38,), (1,), split_size=1),
        call("tensor_split.sections", (7,), (1,), sections=2**40),
        call("unbind.int", (2**38,), ()),
        call("diff.default", (2**30,), (1,), n=2**30 - 1),
        call("upsample_nearest1d.vec", (1, 1, 3), (1, 1, 2**36), output_size=[2**36], scale_factors=None),
        call(
            "upsample_linear1d.vec",
            (1, 1, 3),
            (1, 1, 2**36),
            output_size=[2**36],
            align_corners=False,
            scale_factors=None,
        ),
    ],
    ids=lambda node: node.op_type,
)
def test_arguments_that_are_too_large(node: OpNode) -> None:
    found = check_node(node)
    assert found is not None and found.rule == "size", found


@pytest.mark.parametrize("target", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize(
    ("op", "shapes", "result", "attrs"),
    [
        ("scaled_dot_product_attention.default", [(0, 4, 3, 16), (0, 2, 700, 16), (0, 2, 700, 16)], (0, 4, 3, 16),
         {"enable_gqa": True}),
        ("sum.dim_IntList", [(0, 2**31)], (0,), {"dim": [1]}),
        ("avg_pool2d.default", [(1, 1, 2**16, 2**15)], (1, 1, 2**16, 2**15),
         {"kernel_size": [3], "padding": [1], "stride": [1]}),
        ("avg_pool2d.default", [(1, 1, 2**16, 2**15)], (1, 1, 2**15, 2**14), {"kernel_size": [2]}),
        ("conv2d.default", [(1, 64, 20, 20), (0, 64, 3, 3)], (1, 0, 18, 18), {}),
        ("mm.default", [(300, 4096), (4096, 0)], (300, 0), {}),
        ("scatter_reduce.two", [(2, 3), (), ()], (2, 3), {"dim": 1, "reduce": "mean"}),
        ("scatter.src", [(2, 3), (2,), (2,)], (2, 3), {"dim": 1}),
        ("index_add.default", [(4, 3), (2, 2), (4, 3)], (4, 3), {"dim": 0}),
    ],
)  # fmt: skip
def test_empty_huge_and_misshapen_tensors(
    op: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], attrs: dict[str, Any], target: str
) -> None:
    """Compiled at once, or refused with a reason."""
    scatters = op.startswith(("scatter", "index_add"))
    dtype = "float16" if op in ("conv2d.default", "mm.default") else "float32"  # products of half types are split
    types = ["int64" if scatters and i == 1 else dtype for i in range(len(shapes))]
    inputs = [TensorSpec(f"x{i}", s, t, (f"x{i}", 0)) for i, (s, t) in enumerate(zip(shapes, types, strict=True))]
    node = OpNode("n", f"aten.{op}", inputs, [TensorSpec("n", result, dtype)], attrs)
    ir = IRGraph("m", inputs, [TensorSpec("n", result, dtype, ("n", 0))], [], {}, [node])
    try:
        run_phases(load_ir(ir_to_dict(ir)), target, until="memory")
        assert not scatters, "these are wrong"
    except CompileError as error:
        assert error.reasons


def test_constants_of_one_repeated_value() -> None:
    """A few characters may stand for a terabyte."""
    document = ir_to_dict(getitem(0))
    document["constants"] = {f"c{i}": {"fill": 1.0, "shape": [2**24], "dtype": "float32"} for i in range(4)}
    load_ir(document)
    document["constants"]["c4"] = {"fill": 1.0, "shape": [1], "dtype": "float32"}
    with pytest.raises(IRError, match=r"constants\['c4'\]: repeated values take 268435460 bytes so far"):
        load_ir(document)


def test_many_keys_and_a_duplicate(tmp_path: Path) -> None:
    """The search for the duplicate was quadratic: minutes for a megabyte."""
    (tmp_path / "a.json").write_text("{" + ",".join(f'"{i}":1' for i in range(200_000)) + ',"199999":2}')
    start = time.process_time()
    with pytest.raises(IRError, match="duplicate key '199999'"):
        load_ir(tmp_path / "a.json")
    assert time.process_time() - start < 30


@pytest.mark.parametrize("index", [None, "0", 1.0, True, [0], 2, -3, 2**70])
def test_a_getitem_selects_an_input(index: Any) -> None:
    ir = getitem(0)
    document = ir_to_dict(ir)
    document["nodes"][1]["attrs"]["index"] = index
    with pytest.raises(IRError, match=r"nodes\[1\]\.attrs\.index"):
        load_ir(document)


def test_a_getitem_has_the_type_of_what_it_selects() -> None:
    document = ir_to_dict(getitem(0))
    document["nodes"][1]["outputs"][0]["shape"] = [9]
    document["graph_outputs"][0]["shape"] = [9]
    with pytest.raises(IRError, match=r"nodes\[1\]\.outputs\[0\]\.shape: \[9\] differs from \[2\]"):
        load_ir(document)


def getitem(index: int) -> IRGraph:
    x = TensorSpec("x", (4,), "float32", ("x", 0))
    halves = call("split.Tensor", (4,), (2,), outputs=2, split_size=2)
    made = [TensorSpec(t.name, t.shape, t.dtype, ("n", i)) for i, t in enumerate(halves.outputs)]
    chosen = OpNode("g", GETITEM, made, [TensorSpec("g", (2,), "float32")], {"index": index})
    return IRGraph("m", [x], [TensorSpec("g", (2,), "float32", ("g", 0))], [], {}, [halves, chosen])
