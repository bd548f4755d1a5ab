"""capture(): the IR computes what the model computes, in the documented form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.json_reader import graph_weights_used, load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.support.errors import CaptureError, WeightError

from ...support.torch_oracle import run_ir, to_torch


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **buffers: torch.Tensor):
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def leaves(result: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def check(model: nn.Module, *args: Any, tolerance: float = 0.0, **kwargs: Any) -> IRGraph:
    """Capture, write, read and run; outputs and new buffer values must be those of the model itself."""
    weights = {k: v.copy() for k, v in state_dict_numpy(model).items()}
    graph = load_ir(json.loads(json.dumps(ir_to_dict(capture(model, args, example_kwargs=kwargs)))))
    outputs, state = run_ir(graph, weights, leaves((args, kwargs)))
    with torch.no_grad():
        expected = leaves(model.eval()(*args, **kwargs))
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    after = dict(model.named_buffers())
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, to_torch(weights[k]))}
    assert changed <= state.keys()
    for key, got in state.items():
        torch.testing.assert_close(got, after[key], rtol=tolerance, atol=tolerance)
    return graph


def ops(graph: IRGraph) -> list[str]:
    return [n.op_type for n in graph.nodes]


X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


# --------------------------------------------------------------------------------------- same form as the documented IR


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.same = nn.Conv2d(8, 8, 3, padding="same", groups=2, dilation=2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)), inplace=True)
        x = F.max_pool2d(x, 2) + F.avg_pool2d(x, 2, ceil_mode=True)
        x = F.gelu(self.same(x), approximate="tanh") / 2.0
        x = F.dropout(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1), training=self.training)
        return torch.softmax(self.fc(x), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.embedding = nn.Embedding(10, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embedding(ids)
        q, k, v = self.qkv(self.norm(x)).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.out(y.transpose(1, 2).reshape(x.shape)) + x
        scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask < 0, float("-inf")).softmax(-1, dtype=torch.float32)
        return y, scores.to(torch.float16), F.silu(y[:, 1:, ::2]), torch.cat([y, y], dim=-1).clamp(max=6)


class Misc(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        values, _ = x.topk(2, dim=-1)
        return {
            "scalar": 2 - x + x * 3 + x**2 + torch.add(x, x, alpha=2),
            "index": x[:, index],
            "topk": values,
            "stack": torch.stack([x, x.neg()], 1).mean((0, -1), keepdim=True),
            "einsum": torch.einsum("bij,bkj->bik", x, x),
        }


SAME_FORM: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
    (ConvNet(), (torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16),)),
    (Attention(), (torch.arange(6)[None], torch.tril(torch.ones(6, 6)).log())),
    (Misc(), (X, torch.tensor([2, 0]))),
]


@pytest.mark.parametrize(
    ("model", "args"), SAME_FORM, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else ""
)
def test_same_nodes_and_attributes_as_pytorch_ir(model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir is not installed")
    ours = capture(model, args)
    theirs = load_ir(torch_ir.extract_ir(model.eval(), args, strict=False))
    kept = [n for n in theirs.nodes if not n.op_type.startswith(("aten._assert_tensor_metadata", "aten.dropout"))]
    assert [(n.name, n.op_type, n.outputs, n.attrs) for n in ours.nodes] == [
        (n.name, n.op_type, n.outputs, n.attrs) for n in kept
    ]
    for mine, other in zip(ours.nodes, kept, strict=True):
        assert mine.inputs == other.inputs or any(t.name.startswith("dropout") for t in other.inputs)
    assert ours.graph_inputs == theirs.graph_inputs
    assert ours.graph_outputs == theirs.graph_outputs
    assert ours.weights == theirs.weights
    assert ours.weight_name_mapping == theirs.weight_name_mapping
    assert ours.constants.keys() == theirs.constants.keys()


@pytest.mark.parametrize(
    ("model", "args"), SAME_FORM, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else ""
)
def test_ir_computes_what_the_model_computes(model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    check(model, *args)


def test_meta_device_models_give_the_same_ir() -> None:
    with torch.device("meta"):
        model = ConvNet()
    on_meta = capture(model, torch.empty(2, 3, 16, 16, device="meta"))
    assert on_meta.nodes == capture(ConvNet(), torch.zeros(2, 3, 16, 16)).nodes


# ---------------------------------------------------------------------------------------------------- regions and modes


def test_no_grad_regions_are_inlined() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            s, c = torch.sin(x), torch.cos(x)
            with torch.enable_grad():
                s = s * 2
        return (s + c).relu()

    graph = check(Fn(forward), X.clone().requires_grad_())
    assert ops(graph) == [
        f"aten.{o}" for o in ("sin.default", "cos.default", "mul.Tensor", "add.Tensor", "relu.default")
    ]


def test_disabled_autocast_is_inlined() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ x.float().transpose(-1, -2)
        return x.to(torch.bfloat16)

    assert "aten.matmul.default" in ops(check(Fn(forward), X.bfloat16()))


def test_enabled_autocast_casts_as_torch_does() -> None:
    linear = nn.Linear(4, 4)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
            return y + 1

    graph = check(Cast(), X)
    assert next(n for n in graph.nodes if n.op_type == "aten.linear.default").inputs[1].dtype == "bfloat16"


def test_eval_mode_is_enforced_and_restored() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    model[1].eval()
    graph = capture(model, torch.zeros(1, 3, 2, 2))
    assert ops(graph) == ["aten.conv2d.default", "aten.batch_norm.default"]
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert graph.nodes[1].attrs["training"] is False
    with pytest.raises(CaptureError):
        capture(model, torch.zeros(1, 2, 2, 2))
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hugging_face_decoder_is_captured_exactly(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).to(dtype)
    graph = check(model, torch.arange(8)[None], use_cache=False, return_dict=False)
    assert {"aten.cos.default", "aten.scaled_dot_product_attention.default"} <= set(ops(graph))
    assert not any(op.startswith("wrap_with") for op in ops(graph))
    used = graph_weights_used(graph)
    assert "lm_head.weight" not in used
    assert not any("inv_freq" in key for key in used)


def test_exported_programs_are_accepted_and_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    program = torch.export.export(model.eval(), (X,))
    assert capture(program, name="seq").nodes == capture(model, X).nodes
    assert "aten.addmm.default" in ops(capture(program.run_decompositions(), name="core"))
    with pytest.raises(CaptureError, match="training mode"):
        capture(torch.export.export(model.train(), (X,)))
    bn = nn.BatchNorm1d(4).train()
    with pytest.raises(CaptureError, match=r"training mode; call model.eval\(\)"):
        capture(torch.export.export(bn, (X[0],)))


# --------------------------------------------------------------------------------------- constants, state, tied weights


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]
)
def test_constants_keep_value_and_dtype(dtype: torch.dtype) -> None:
    table = torch.arange(12).reshape(3, 4).to(dtype)
    graph = check(Fn(lambda m, x: (x + table, m.big + x.sum()), big=torch.zeros(0)), X)
    (constant,) = (v for v in graph.constants.values() if v.shape == (3, 4))
    assert constant.dtype == (ml_dtypes.bfloat16 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


def test_non_persistent_buffers_are_constants() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("freq", torch.arange(4.0) + 0.5, persistent=False)
            self.register_buffer("scale", torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.freq * self.scale

    graph = check(M(), X)
    np.testing.assert_array_equal(graph.constants["freq"], np.arange(4, dtype=np.float32) + 0.5)
    assert list(graph_weights_used(graph)) == ["scale"]


def test_whole_buffer_writes_become_state_without_functionalisation() -> None:
    def forward(m: Any, position: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        m.cache.index_copy_(1, position, k)
        m.count.add_(1)
        return m.cache.sum(1) * m.count

    model = Fn(forward, cache=torch.zeros(2, 8, 4), count=torch.zeros((), dtype=torch.int64))
    graph = check(model, torch.tensor([3, 4, 5]), X)
    assert [n.op_type for n in graph.nodes[:2]] == ["aten.index_copy_.default", "aten.add_.Tensor"]
    assert [(u.key, u.value.producer) for u in graph.state] == [("cache", ("index_copy_", 0)), ("count", ("add_", 0))]


def test_writes_through_views_become_state() -> None:
    def forward(m: Any, k: torch.Tensor) -> torch.Tensor:
        m.cache[:, 2:5] = k
        m.cache[0, 0].mul_(2)
        return m.cache + 1

    graph = check(Fn(forward, cache=torch.ones(2, 8, 4)), X)
    assert [u.key for u in graph.state] == ["cache"]
    assert not any(op.split(".")[1].endswith("_") for op in ops(graph))


@pytest.mark.parametrize(
    "write", [lambda w: w.unsqueeze_(0), lambda w: w.transpose_(0, 1).add_(1), lambda w: w[0].mul_(2) + w.squeeze_()]
)
def test_buffers_keep_their_shapes(write: Callable[..., Any]) -> None:
    """What a call leaves is there in the next one, which was captured for the shape of the first."""
    with pytest.raises(CaptureError, match=r"changes the shape of 'w' from \[1, 3, 2\] to .* write to a view"):
        capture(Fn(lambda m, x: (write(m.w), x + 1)[1], w=torch.ones(1, 3, 2)), X)
    graph = check(Fn(lambda m, x: (m.w.unsqueeze_(0).add_(1).squeeze_(0), x + m.w.sum())[1], w=torch.ones(3, 2)), X)
    assert [u.value.shape for u in graph.state] == [(3, 2)]


def test_copy_into_a_buffer_and_buffer_read_before_and_after() -> None:
    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = m.memory * 1
        m.memory.copy_(x)
        return before, m.memory

    graph = check(Fn(forward, memory=torch.ones(2, 3, 4)), X)
    assert [u.key for u in graph.state] == ["memory"]


ALIASING: dict[str, Callable[..., Any]] = {
    "temporary": lambda m, x: (x * 2).relu_().add_(1),
    "base_after_view_write": lambda m, x: (y := x * 2, y[0].zero_(), y)[2],
    "view_before_write": lambda m, x: (y := x * 2, v := y[1], y.add_(5), v)[3],
    "view_of_view": lambda m, x: (y := x * 2, y.transpose(0, 1)[1].mul_(3), y.flatten())[2],
    "chunks": lambda m, x: (y := x * 2, c := y.chunk(2, -1), c[0].add_(1), (c[1], y))[3],
    "dead_base": lambda m, x: (x * 2).view(-1).sigmoid_(),
    "eval_dropout_returns_its_input": lambda m, x: (y := x * 2, z := F.dropout(y, 0.5, m.training), z.add_(1), y)[3],
    "eval_dropout_output": lambda m, x: (y := x * 2, z := F.dropout(y, 0.5, m.training), y[0].add_(1), z)[3],
    "copy_of_strided": lambda m, x: (y := torch.clamp(x.mT, -9, 9), z := y.flatten(), z.add_(1), y)[3],
    "view_of_strided": lambda m, x: (y := torch.clamp(x.mT, -9, 9), z := y.mT.flatten(), z.add_(1), y)[3],
    "requested_copy": lambda m, x: (y := x * 2, z := y.to(x.dtype, copy=True), z.add_(1), y)[3],
    "out_argument": lambda m, x: (y := x * 2, v := y[1], torch.add(y, x, out=y), v)[3],
    "masked": lambda m, x: (y := x.clone(), y.masked_fill_(y < 0, 0.0), y.index_fill_(1, torch.tensor([1]), 7), y)[3],
    "lifted": lambda m, x: (t := torch.tensor([1.0, 2, 3, 4]), t.add_(1), x * t)[2],
    "setitem": lambda m, x: (y := torch.zeros(2, 3, 4), y.__setitem__((slice(None), 1), x[:, 0]), y + x)[2],
}


@pytest.mark.parametrize("case", ALIASING)
def test_in_place_operations_and_aliases(case: str) -> None:
    check(Fn(ALIASING[case]), X.clone())


@pytest.mark.parametrize("case", ALIASING)
def test_in_place_operations_in_a_saved_program(case: str, tmp_path: Path) -> None:
    """Storages do not survive saving: schemas must find the aliases."""
    program = torch.export.export(Fn(ALIASING[case]).eval(), (X.clone(),))
    torch.export.save(program, tmp_path / "p.pt2")
    graph = capture(torch.export.load(tmp_path / "p.pt2"))
    outputs, _ = run_ir(graph, {}, [X.clone()])
    for got, want in zip(outputs, leaves(Fn(ALIASING[case]).eval()(X.clone())), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 2), lambda x: x[1:], lambda x: x[:1]])
def test_strides_of_another_layout_are_refused(view: Callable[..., Any]) -> None:
    """Values of a program are dense: the strides would find other elements."""
    with pytest.raises(CaptureError, match=r"as_strided.*contiguous copy"):
        capture(Fn(lambda m, x: view(x * 2).as_strided((12, 2), (1, 1))), X)
    check(Fn(lambda m, x: view(x * 2).clone(memory_format=torch.contiguous_format).as_strided((3, 2), (1, 2))), X)


def test_writes_through_windows_are_refused() -> None:
    """PyTorch's functional form of them has zeros between the windows."""
    with pytest.raises(CaptureError, match=r"writes through unfold\(\).*write to slices"):
        capture(Fn(lambda m, x: (y := x * 2, y.unfold(-1, 1, 2).add_(1), y)[2]), X)
    check(Fn(lambda m, x: (y := x * 2, w := y.unfold(-1, 1, 2), y[0].add_(1), w)[3]), X)


def test_in_place_inside_no_grad_sees_outer_aliases() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y[0]
        with torch.no_grad():
            y.add_(1)
        return view * 3

    check(Fn(forward), X)


def test_writing_to_an_input_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes to its input 'args_0'.*clone"):
        capture(Fn(lambda m, x: x.relu_() + 1), X.clone())


def test_tied_weights_are_listed_and_share_one_key() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    graph = check(Tied(), torch.tensor([[1, 2]]))
    assert [w.name for w in graph.weights] == ["embed.weight", "head.weight"]
    assert set(graph.weight_name_mapping.values()) == {"embed.weight"}
    assert list(graph_weights_used(graph)) == ["embed.weight"]
    with torch.device("meta"):
        meta = capture(Tied(), torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    assert meta.weight_name_mapping == graph.weight_name_mapping


# --------------------------------------------------------------------------------------------------- inputs and outputs


def test_nested_inputs_are_named_and_python_values_baked() -> None:
    class Nested(nn.Module):
        def forward(self, d: Any, pair: Any, n: int, flag: bool, *, scale: Any = None, mode: str = "") -> Any:
            y = d["a"] * n + pair[1] + (1 if flag else 0)
            return {"y": y * scale if mode == "mul" else y, "none": None, "same": pair[0]}

    args = ({"a": X, "b": X + 1}, [X + 2, X + 3], 3, True)
    graph = check(Nested(), *args, scale=X, mode="mul")
    assert [t.name for t in graph.graph_inputs] == ["d_a", "d_b", "pair_0", "pair_1", "scale"]
    assert graph.graph_outputs[1].producer == ("pair_0", 0)


def test_tensors_in_keyword_arguments_become_inputs() -> None:
    def forward(m: Any, edges: torch.Tensor, x: torch.Tensor, sorter: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(edges, x, sorter=sorter, right=True)

    graph = check(Fn(forward), torch.tensor([3.0, 1.0, 2.0]), X, torch.tensor([1, 2, 0]))
    assert [t.name for t in graph.nodes[-1].inputs] == ["args_0", "args_1", "args_2"]


def test_none_tensor_before_a_given_one_is_written() -> None:
    graph = check(Fn(lambda m, x: F.layer_norm(x, (4,), None, m.b), b=torch.ones(4)), X)
    assert graph.nodes[0].attrs["weight"] is None
    assert [t.name for t in graph.nodes[0].inputs] == ["args_0", "b_b"]


def test_outputs_that_are_inputs_weights_views_and_duplicates() -> None:
    graph = check(Fn(lambda m, x: (x, m.w, x + 1, x.view(-1), (y := x * 2), y), w=torch.ones(3)), X)
    assert [graph.key(t) for t in graph.graph_outputs[:2]] == [("args_0", 0), ("b_w", -1)]
    assert graph.graph_outputs[4] == graph.graph_outputs[5]


def test_unused_inputs_stay() -> None:
    assert [t.name for t in check(Fn(lambda m, x, y: x + 1), X, X).graph_inputs] == ["args_0", "args_1"]


def test_numpy_examples_and_single_tensors() -> None:
    model = Fn(lambda m, x: x + 1)
    assert capture(model, X).nodes == capture(model, (X.numpy(),)).nodes == capture(model, [X]).nodes


def test_strict_mode_gives_the_same_result() -> None:
    model = ConvNet()
    x = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    outputs, _ = run_ir(capture(model, x, strict=True), state_dict_numpy(model), [x])
    torch.testing.assert_close(outputs[0], model.eval()(x), rtol=0, atol=0)


def test_name_collisions_keep_values_apart() -> None:
    graph = check(Fn(lambda m, x: (x.median(-1).values, x.median(-1).indices, x.median())), X)
    assert [n.name for n in graph.nodes if n.op_type.startswith("aten.median")] == ["median", "median_1", "median_2"]


# --------------------------------------------------------------------------------------------------------------- errors


def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (branch, r"test_frontend.py.*branch.*torch.where"),
    "raises": (lambda m, x: x.reshape(5, 5), r"torch.export failed at .*test_frontend.py.*invalid for input of size"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_uncapturable_models_say_where_and_why(case: str) -> None:
    function, message = ERRORS[case]
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(Fn(function), X)


def test_dynamic_shapes_name_the_dimension() -> None:
    dynamic = torch.export.export(Fn(lambda m, x: x + 1), (X,), dynamic_shapes=(({1: torch.export.Dim("n")},),))
    with pytest.raises(CaptureError, match=r"'args_0'.*dimension 1 of its result is dynamic.*static shapes"):
        capture(dynamic)


@pytest.mark.parametrize("bad", [lambda x: x, None, "model.pt"])
def test_not_a_model(bad: Any) -> None:
    with pytest.raises(CaptureError, match=r"expected a torch\.nn\.Module"):
        capture(bad, X)


def test_dict_of_examples_is_refused() -> None:
    with pytest.raises(CaptureError, match="example_kwargs"):
        capture(nn.Linear(4, 4), {"input": X})


# ----------------------------------------------------------------------------------------------------------- state_dict


def test_state_dict_numpy_shares_memory() -> None:
    model = nn.Linear(3, 2).bfloat16()
    arrays = state_dict_numpy(model)
    assert arrays["weight"].dtype == ml_dtypes.bfloat16
    with torch.no_grad():
        model.weight.fill_(1.5)
    assert np.all(arrays["weight"].astype(np.float32) == 1.5)


def test_state_dict_numpy_refuses_what_has_no_values() -> None:
    with pytest.raises(WeightError, match="weight: is on the meta device"):
        state_dict_numpy(nn.Linear(2, 2, device="meta"))


def test_compiler_data_types_do_not_import_torch() -> None:
    code = "import sys, npu_compiler.aten.json_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
