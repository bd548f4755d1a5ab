"""IR is data: what a file says can run nothing but arithmetic on tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.aten.json_reader import load_ir, load_ir_from_dict
from npu_compiler.aten.json_writer import save_ir
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.support.errors import CompileError, IRError
from npu_runtime import DAGExecutor, execute_cpu_partition

torch = pytest.importorskip("torch")
from npu_compiler.frontend import capture  # noqa: E402 - imports torch
from npu_runtime.partitioned.allowed_ops import _objection  # noqa: E402

X = {"name": "x", "shape": [4], "dtype": "uint8"}


def document(*nodes: tuple[str, str, list[str], dict[str, Any]], shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    """IR of one uint8 input ``x``: (name, op, inputs, attrs) per node; the last one is the output."""
    made = [
        {
            "name": name,
            "op_type": op,
            "inputs": [{**X, "name": i, "producer_node": i} for i in inputs],
            "outputs": [{**X, "name": name, "shape": list(shape)}],
            "attrs": attrs,
        }
        for name, op, inputs, attrs in nodes
    ]
    output = {**X, "name": nodes[-1][0], "shape": list(shape), "producer_node": nodes[-1][0]}
    return {"model_name": "file", "graph_inputs": [X], "graph_outputs": [output], "weights": [], "nodes": made}


def refused(ir: dict[str, Any]) -> str:
    with pytest.raises(CompileError) as error:
        DAGExecutor(partition(load_ir_from_dict(ir))).execute([np.zeros(4, np.uint8)])
    return str(error.value)


def test_ir_names_no_file(tmp_path: Path) -> None:
    """The reader refuses text in arguments that choose no mode, and the fallback the ops that take it."""
    victim = tmp_path / "victim"
    mapping = {"filename": str(victim), "shared": True, "size": 4, "dtype": "uint8"}
    for op, inputs, attrs in (("from_file", [], mapping), ("save", ["x"], {"filename": str(victim)})):
        with pytest.raises(IRError, match=r"^nodes\[0\]\.attrs\.filename: expected a number"):
            load_ir_from_dict(document(("y", f"aten.{op}.default", inputs, attrs)))
    assert "filename" in _objection(torch.ops.aten.from_file.default)
    assert "TorchScript" in _objection(torch.ops.aten.save.default)
    assert not victim.exists()


def test_ir_cannot_write_into_an_argument() -> None:
    message = refused(document(("m", "aten.from_file.default", [], {}), ("y", "aten.clone.out", ["x", "m"], {})))
    assert "2 node(s)" in message and "y (aten.clone.out)" in message and "writes to its argument 'out'" in message
    assert "m (aten.from_file.default)" in message and "filename" in message


@pytest.mark.parametrize(
    ("op", "attrs", "why"),
    [
        ("aten.record_stream.default", {}, "trusts"),
        ("aten.fbgemm_pack_gemm_matrix_fp16.default", {}, "trusts"),
        ("aten._reshape_alias.default", {"size": [4], "stride": [1 << 40]}, "private"),
        ("aten.promote_types.default", {"type1": "uint8", "type2": "uint8"}, "no tensor"),
        ("profiler._record_function_enter_new.default", {"name": "a"}, "not an op of PyTorch"),
        ("loaded_libraries.add.default", {}, "has no op"),
        ("load_library.__call__.default", {}, "has no op"),
        ("c10d.barrier.default", {}, "not an op of PyTorch"),
    ],
)
def test_ops_that_do_more_than_compute_are_refused(op: str, attrs: dict[str, Any], why: str) -> None:
    message = refused(document(("y", op, ["x"], attrs)))
    assert f"y ({op})" in message and why in message


def test_text_reaches_no_op_that_opens_something() -> None:
    """Every op with a text argument that the rules let through takes it to choose among modes."""
    texts: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace in ("aten", "prims"):
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            if not _objection(op):
                texts |= {f"{packet}({a.name})" for a in op._schema.arguments if "str" in str(a.real_type)}
    assert "gelu(approximate)" in texts
    assert not [t for t in texts if any(word in t for word in ("file", "path", "url", "print", "_test"))]


def test_ops_of_libraries_run_where_the_model_was_captured_or_the_caller_allows_them(tmp_path: Path) -> None:
    library = torch.library.Library("npusim_test", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")

        class Custom(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.ops.npusim_test.twice(x.relu())

        x = np.array([-1.0, 2.0], np.float32)
        ir = capture(Custom(), (torch.from_numpy(x),))
        (found,) = DAGExecutor(partition(ir)).execute([x]).values()
        np.testing.assert_array_equal(found, [0, 4])
        save_ir(ir, tmp_path / "ir.json")
        with pytest.raises(CompileError, match=r"allowed_ops=\['npusim_test.twice.default'\]"):
            DAGExecutor(partition(load_ir(tmp_path / "ir.json")))
        trusted = load_ir(tmp_path / "ir.json", allowed_ops=["npusim_test.twice.default"])
        (found,) = execute_cpu_partition(trusted, {"x": x}).values()
        np.testing.assert_array_equal(found, [0, 4])
    finally:
        library._destroy()
