"""Lowering: in-place ops and shared memory as PyTorch has them, the compute dtype, state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.aten.ir import IRGraph, OpNode, StateUpdate, TensorSpec
from npu_compiler.aten.json_reader import load_ir
from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call
from npu_compiler.ops.lower import lower_ir
from npu_compiler.pipeline import run_phases
from npu_compiler.support import dtypes
from npu_compiler.support.errors import CompileError, IRError

from ...support.graph_tools import run_kernels
from ...support.toy_ir import ADD, RELU, VIEW, Builder

torch = pytest.importorskip("torch", reason="the reference is PyTorch")


# -- in-place ops against PyTorch: recorded with their writes, as pytorch-ir records them -----------------------------
def view_of_all(x):
    y = x * 1
    y.view(-1).add_(1)
    return y, y.view(2, -1)


def window_of_rows(x):
    y = x * 1
    y[:, 1:3].relu_()
    return y


def copy_into_row(x):
    y = x * 1
    y[0].copy_(y[1] * 2)
    return y


def clone_breaks_the_alias(x):
    y = x * 1
    z = y.clone()
    y.add_(1)
    return y, z


def contiguous_copies_a_transpose(x):
    y = (x * 1).t()
    z = y.contiguous()
    y.add_(5)
    return y, z


def contiguous_is_the_same_tensor(x):
    y = x * 1
    z = y.contiguous()
    y.add_(5)
    return y, z


def reshape_copies_a_transpose(x):
    y = (x * 1).t()
    z = y.reshape(-1)
    y.add_(5)
    return y, z


def reshape_is_a_view(x):
    y = x * 1
    z = y.reshape(-1)
    y.add_(5)
    return y, z


def flatten_copies_a_transpose(x):
    y = x * 1
    z = y.t()
    w = z.flatten()
    z.add_(1)
    return w, y


def views_of_views(x):
    y = x * 1
    z = y.t()
    z[1].mul_(3)
    w = y.transpose(0, 1)[1]
    y.sub_(1)
    return y, z, w


def every_second_row(x):
    y = x * 1
    z = y[::2]
    z += 1
    y.mul_(2)
    return z, y


def halves(x):
    y = x * 1
    a, b = y.chunk(2, 1)
    a.add_(b)
    return y, a, b


def chained_writes(x):
    y = x * 1
    y[1:].fill_(7).mul_(2)
    y[:, :2].zero_().add_(3)
    return y


def result_of_a_write_is_the_tensor(x):
    y = x * 1
    z = y[0].add_(1)
    y.mul_(2)
    z.sub_(1)
    return y, z


def same_dtype_is_no_copy(x):
    y = x * 1
    y.to(torch.float32).add_(1)
    return y


def other_dtype_is_a_copy(x):
    y = x * 1
    z = y.to(torch.float64)
    z.add_(1)
    return y, z


def expanded_reader(x):
    y = x * 1
    z = y.expand(2, *y.shape)
    y.add_(1)
    return z


def unflattened(x):
    y = x * 1
    z = y.flatten()
    w = z.unflatten(0, (2, -1))
    w.neg_()
    return y, z, w


def kept_old_contents(x):
    y = x * 1
    z = y + 0
    y.relu_()
    return y, z


def written_input(x):
    y = x.view(-1)
    x.add_(1)
    return y * 1, x * 1


PROGRAMS = (
    view_of_all, window_of_rows, copy_into_row, clone_breaks_the_alias, contiguous_copies_a_transpose,
    contiguous_is_the_same_tensor, reshape_copies_a_transpose, reshape_is_a_view, flatten_copies_a_transpose,
    views_of_views, every_second_row, halves, chained_writes, result_of_a_write_is_the_tensor, same_dtype_is_no_copy,
    other_dtype_is_a_copy, expanded_reader, unflattened, kept_old_contents, written_input,
)  # fmt: skip


def recorded(module: torch.nn.Module, *args: torch.Tensor) -> IRGraph:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir records in-place ops as they are")
    return load_ir(torch_ir.extract_ir(module.eval(), args, strict=False))


class Wrapped(torch.nn.Module):
    def __init__(self, f: Callable):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheduled", [False, True], ids=["graph", "schedule"])
def test_in_place_ops_mean_what_they_mean_in_pytorch(program: Callable, scheduled: bool) -> None:
    x = torch.arange(24.0).reshape(4, 6) - 3
    want = program(x.clone())
    ir = recorded(Wrapped(program), x)
    inputs = {ir.graph_inputs[0].name: x.numpy()}
    if scheduled:
        got = run_kernels(run_phases(ir, "cpu", None, until="memory"), inputs)
    else:
        got = interp.run(lower_ir(ir), inputs)
    for a, b in zip(got.values(), want if isinstance(want, tuple) else [want], strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_a_gathered_view_of_a_written_tensor_is_refused() -> None:
    def overlapping_windows(x):
        y = x * 1
        d = y.unfold(1, 2, 1)
        y.add_(10)
        return y, d

    with pytest.raises(CompileError, match="gathered view"):
        lower_ir(recorded(Wrapped(overlapping_windows), torch.zeros(4, 4)))


def test_writing_to_an_expanded_tensor_is_refused() -> None:
    b = Builder().node("e", "aten.expand.default", "x", shape=(2, 4, 4), size=[2, 4, 4])
    with pytest.raises(CompileError, match="expanded tensor is written"):
        lower_ir(b.node("r", "aten.relu_.default", "e", shape=(2, 4, 4)).out("r"))


# -- state ------------------------------------------------------------------------------------------------------------
class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2, 3))

    def forward(self, x):
        self.total.add_(x)
        self.table[1].copy_(x)
        self.table.mul_(2)
        return self.total * 2, self.table.sum()


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_buffers_that_are_written_become_state(dtype: str | None) -> None:
    model, x = Counter(), torch.tensor([1.0, 2.0, -3.0])
    ir = recorded(model, x)
    held = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    for _ in range(3):
        want = model(x)
        graph = lower_ir(ir, dtype)
        results = interp.run(graph, {ir.graph_inputs[0].name: x.numpy()}, held)
        np.testing.assert_array_equal(results[graph.outputs[0][0]], want[0].numpy())
        np.testing.assert_array_equal(results[graph.outputs[1][0]], want[1].numpy())
        held = {k: results[f"state:{k}"] for k in held}
        for key, value in model.state_dict().items():
            np.testing.assert_array_equal(held[key], value.numpy())
            assert held[key].dtype == np.float32


def test_state_declared_in_the_ir() -> None:
    b = Builder(weights=["buffer"]).node("y", ADD, "x", "p_buffer")
    ir = b.out("y")
    ir.state.append(StateUpdate("buffer", b.specs["y"]))
    graph = lower_ir(ir)
    assert [n.op for n in graph.nodes if n.op in ("weight", "state")] == ["state"]
    x, held = np.full((4, 4), 2, np.float32), np.full((4, 4), 5, np.float32)
    np.testing.assert_array_equal(interp.run(graph, {"x": x}, {"buffer": held})["state:buffer"], x + held)
    ir.state.append(StateUpdate("nobody", b.specs["y"]))
    with pytest.raises(IRError, match="'nobody'"):
        lower_ir(ir)


def test_tied_weights_are_one_value() -> None:
    b = Builder(weights=["w"]).node("y", ADD, "x", "p_w")
    b.ir.weight_name_mapping["p_again"] = "w"
    b.specs["p_again"] = TensorSpec("p_again", (4, 4), "float32")
    graph = lower_ir(b.node("z", ADD, "y", "p_again").out("z"))
    assert sum(n.op == "weight" for n in graph.nodes) == 1


# -- outputs and refusals ---------------------------------------------------------------------------------------------
def test_outputs_may_be_inputs_weights_and_repeated() -> None:
    graph = lower_ir(Builder(weights=["w"]).node("y", RELU, "x").out("y", "x", "p_w", "y"))
    assert [n for n, _ in graph.outputs] == ["y", "x", "p_w", "y#1"]
    x, w = np.eye(4, dtype=np.float32) - 0.5, np.ones((4, 4), np.float32)
    for run in (interp.run(graph, {"x": x}, {"w": w}),):
        np.testing.assert_array_equal(run["x"], x)
        np.testing.assert_array_equal(run["p_w"], w)
        np.testing.assert_array_equal(run["y#1"], np.maximum(x, 0))


def test_every_refusal_is_reported_at_once() -> None:
    b = Builder().node("a", "aten.nothing.default", "x").node("b", RELU, "a").node("c", RELU, "b", inplace=True)
    with pytest.raises(CompileError) as caught:
        lower_ir(b.out("c"))
    assert [(name, reason.rule) for name, _, reason in caught.value.reasons] == [("a", "no_kernel"), ("c", "attribute")]


def test_a_wrong_shape_in_the_ir_is_refused() -> None:
    with pytest.raises(CompileError, match=r"states shape \[4, 5\], the op gives \[4, 4\]"):
        lower_ir(Builder().node("a", RELU, "x", shape=(4, 5)).out("a"))
    with pytest.raises(CompileError, match="cannot reshape"):
        lower_ir(Builder().node("a", VIEW, "x", shape=(3, 5), size=[3, 5]).out("a"))


# -- compute dtype ----------------------------------------------------------------------------------------------------
def positions(dtype: str) -> tuple[IRGraph, Graph]:
    """x * w + float(arange(5000)) + sin(float(ids))."""
    n = 5000
    x, ids = TensorSpec("x", (n,), "float32", ("x", 0)), TensorSpec("ids", (n,), "int64", ("ids", 0))

    def spec(name: str, kind: str = "float32") -> TensorSpec:
        return TensorSpec(name, (n,), kind, (name, 0))

    nodes = [
        OpNode("steps", "aten.arange.default", [], [spec("steps")], {"end": n, "dtype": "float32"}),
        OpNode("place", "aten.to.dtype", [ids], [spec("place")], {"dtype": "torch.float32"}),
        OpNode("angle", "aten.mul.Tensor", [spec("place")], [spec("angle")], {"other": 0.25}),
        OpNode("scaled", "aten.mul.Tensor", [x], [spec("scaled")], {"other": 0.5}),
        OpNode("count", "aten.add.Tensor", [ids, ids], [spec("count", "int64")], {}),
    ]
    outputs = [spec("steps"), spec("place"), spec("angle"), spec("scaled"), spec("count", "int64")]
    ir = IRGraph("positions", [x, ids], outputs, [], {}, nodes)
    return ir, lower_ir(ir, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_compute_dtype_leaves_integers_and_positions_exact(dtype: str) -> None:
    _, graph = positions(dtype)
    x, ids = np.linspace(-1, 1, 5000, dtype=np.float32), np.arange(5000) * 7
    got = interp.run(graph, {"x": x, "ids": ids})
    np.testing.assert_array_equal(got["steps"], np.arange(5000, dtype=np.float32))
    np.testing.assert_array_equal(got["place"], ids.astype(np.float32))
    np.testing.assert_array_equal(got["angle"], ids.astype(np.float32) * 0.25)
    np.testing.assert_array_equal(got["count"], ids * 2)
    narrow = dtypes.numpy_dtype(dtype)
    np.testing.assert_array_equal(
        got["scaled"], (x.astype(narrow).astype(np.float32) * 0.5).astype(narrow).astype(np.float32)
    )
    assert all(got[name].dtype == np.float32 for name in ("steps", "place", "angle", "scaled"))


def test_a_narrow_compute_dtype_stores_matrices_in_it_and_vectors_exactly() -> None:
    linear = recorded(torch.nn.Linear(8, 4), torch.zeros(2, 8))
    graph = lower_ir(linear, "bfloat16")
    product = next(n for n in graph.nodes if n.op == "matmul")
    assert [v.dtype for v in product.inputs] == ["bfloat16", "bfloat16"]
    assert {n.attrs["key"]: n.out.dtype for n in graph.nodes if n.op == "weight"} == {
        "weight": "float32",
        "bias": "float32",
    }
    assert [v.dtype for _, v in graph.outputs] == ["float32"]


@pytest.mark.parametrize("dims", [1, 2])
def test_phases_without_taps_have_the_dtype_of_the_others(dims: int) -> None:
    """A transposed convolution whose stride is larger than its kernel."""
    layer = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)[dims - 1](4, 6, 2, stride=3).half()
    graph = lower_ir(recorded(layer, torch.zeros(1, 4, *[5] * dims).half()))
    parts = [n for n in graph.nodes if n.op == "concat"]
    assert parts and all(v.dtype == n.out.dtype for n in parts for v in n.inputs)


def test_several_matrices_are_multiplied_in_the_order_of_fewest_multiplications() -> None:
    """Of equal orders, from left to right; products that another one reads are rounded, so that both operands of every
    product have the matrices' dtype."""

    def sizes(*matrices: tuple[int, int]) -> list[tuple[int, ...]]:
        graph = Graph()
        inputs = [graph.input(str(i), m, "bfloat16") for i, m in enumerate(matrices)]
        attrs = {"_tensor_list_sizes": [len(matrices)]}
        (y,) = (r for r in lower_call(graph, "aten.linalg_multi_dot.default", inputs, attrs) if r is not None)
        graph.outputs.append(("y", y))
        products = [n for n in graph.nodes if n.op == "matmul"]
        assert {x.dtype for n in products for x in n.inputs} == {"bfloat16"}
        return [n.out.shape for n in products]

    assert sizes((50, 2), (2, 50), (50, 1)) == [(2, 1), (50, 1)]
    assert sizes((1, 50), (50, 2), (2, 50)) == [(1, 2), (1, 50)]
    assert sizes((4, 4), (4, 4), (4, 4)) == [(4, 4), (4, 4)]
    assert sizes((9, 2), (2, 8), (8, 3), (3, 9)) == [(2, 3), (2, 9), (9, 9)]
