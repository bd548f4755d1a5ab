"""Capture leaves PyTorch and the process as they were, and threads can capture at once."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from npu_compiler import capture
from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig

from ...llm import small_model


class Remembers(nn.Module):
    """Sets an attribute in each call, so that capture runs it twice to see whether the results depend on it."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return torch.relu(self.linear(x))


def test_threads_capture_at_once() -> None:
    """torch.export is not made for threads: without turns, most of these captures failed with its internal errors."""
    models = [Remembers(width).eval() for width in range(2, 6)]

    def width(model: Remembers) -> int:
        ir = capture(model, (torch.zeros(3, model.linear.in_features),))
        return ir.graph_outputs[0].shape[1]

    with ThreadPoolExecutor(len(models)) as pool:
        assert list(pool.map(width, models)) == [m.linear.in_features for m in models]


def test_random_numbers_modes_and_streams_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> list[object]:
        modes = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), model.training)
        return [torch.get_rng_state().tolist(), modes, sys.stderr, warnings.filters[:]]

    def seed_every_device(seed: int) -> None:
        raise AssertionError("the random numbers of GPUs are not restored")

    monkeypatch.setattr(torch, "manual_seed", seed_every_device)
    model = Remembers(4).train()
    before = state()
    capture(model, (torch.zeros(3, 4),))
    assert isinstance(model.last, torch.Tensor | None) and state() == before


def test_what_was_made_in_inference_mode_is_captured() -> None:
    class Counts(Remembers):
        def __init__(self) -> None:
            super().__init__(4)
            self.register_buffer("calls", torch.zeros(()))
            self.tied = self.linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.tied(super().forward(x)) + self.calls

    with torch.inference_mode():
        model, x = Counts().eval(), torch.zeros(2, 4)
        ir = capture(model, (x,))
    assert model.linear.weight.is_inference() and model.tied is model.linear
    assert set(ir.weight_name_mapping.values()) == {"calls", "linear.bias", "linear.weight"}  # the tied ones once


def test_language_models_are_captured_in_inference_mode() -> None:
    config = LLMConfig.from_hf(small_model.config(num_hidden_layers=1, max_position_embeddings=16))
    with torch.inference_mode():
        assert llm_graphs(config, max_len=16, chunks=()).keys() == {"decode"}
