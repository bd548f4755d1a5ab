"""Programs in Core ATen form (``run_decompositions()``) become the kernels of the programs that they come from."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_runtime import CPUBackend, Executor
from npusim import models

HIDDEN_ROW = torch.ones(6, 6, dtype=torch.bool).tril().index_fill(0, torch.tensor([3]), False)
MASKS = {
    "none": None,
    "added": torch.linspace(-3, 3, 36).reshape(6, 6),
    "hidden row": HIDDEN_ROW,
    "of keys": torch.tensor([[[[1, 1, 0, 1, 1, 0]]]]) > 0,
}


class Attention(nn.Module):
    def __init__(self, mask: torch.Tensor | None, causal: bool, grouped: bool):
        super().__init__()
        self.register_buffer("mask", mask)
        self.causal, self.grouped = causal, grouped

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (x.unflatten(2, (-1, 8)).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(
            *heads, attn_mask=self.mask, is_causal=self.causal, scale=0.4, enable_gqa=self.grouped
        )
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize(("mask", "causal"), [*((m, False) for m in MASKS), ("none", True)])
def test_attention_is_one_kernel(mask: str, causal: bool, grouped: bool) -> None:
    torch.manual_seed(0)
    model = Attention(MASKS[mask], causal, grouped)
    q, k, v = torch.randn(2, 6, 32), *torch.randn(2, 2, 6, 16 if grouped else 32)
    exported = torch.export.export(model, (q, k, v)).run_decompositions()
    assert not any("attention" in str(n.target) for n in exported.graph.nodes)
    program = npu_compiler.compile(capture(exported), "cpu")
    (entry,) = program.entries.values()
    assert [c.kind for c in entry.calls] == ["attention"]
    (out,) = Executor(program, state_dict_numpy(model), CPUBackend()).run([q.numpy(), k.numpy(), v.numpy()]).values()
    torch.testing.assert_close(torch.from_numpy(out), model(q, k, v))


@pytest.mark.parametrize("keys", [6, 9])
@pytest.mark.parametrize("op", ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_results_of_attention_take_part_only_if_they_are_used(op: str, keys: int, dtype: torch.dtype) -> None:
    class Calls(nn.Module):
        def __init__(self, results: int):
            super().__init__()
            self.results = results

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return getattr(torch.ops.aten, op)(q, k, k, is_causal=True)[: self.results]

    q, k = torch.randn(2, 4, 6, 8, dtype=dtype), torch.randn(2, 4, keys, 8, dtype=dtype)
    kinds = []
    for results in (1, 2):
        program = npu_compiler.compile(capture(torch.export.export(Calls(results), (q, k))), "cpu")
        (entry,) = program.entries.values()
        kinds.append([c.kind for c in entry.calls])
    assert kinds[0] == ["attention"] and "attention" not in kinds[1]


IDS = torch.arange(24).reshape(2, 12)
MODELS = {
    "vit": (
        models.vit, dict(image=32, patch=8, depth=2, width=48, heads=4, num_classes=10), (torch.ones(1, 3, 32, 32),)
    ),
    "bert": (
        models.bert, dict(vocab=50, positions=16, depth=2, width=48, heads=4, hidden=96),
        (IDS, torch.ones_like(IDS), torch.zeros_like(IDS)),
    ),
    "transformer": (
        nn.Transformer, dict(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, batch_first=True),
        (torch.ones(2, 8, 32), torch.ones(2, 6, 32)),
    ),
    "resnet": (models.resnet18, {}, (torch.ones(1, 3, 32, 32),)),
    "lstm": (nn.LSTM, dict(input_size=16, hidden_size=32), (torch.ones(2, 3, 16),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_become_the_same_kernels(name: str) -> None:
    build, settings, inputs = MODELS[name]
    exported = torch.export.export(build(**settings).eval(), inputs)
    counts = []
    for form in (exported, exported.run_decompositions()):
        (entry,) = npu_compiler.compile(capture(form), "cpu").entries.values()
        counts.append(Counter(c.kind for c in entry.calls))
    assert counts[0] == counts[1]
