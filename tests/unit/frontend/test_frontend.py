"""capture(): the IR computes what the model computes, in the documented form."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_compiler.aten.json_reader import graph_weights_used, load_ir
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.support.errors import CaptureError, WeightError

from ...support.captured import Fn, X, check, ops
from ...support.torch_oracle import run_ir

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
    "list": (lambda m, x: torch.histogramdd(x[0], [2] * 4).hist, r"histogramdd.*a list of tensors among others"),
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
