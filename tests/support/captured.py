"""Functions as captured models: their IR computes what they compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.json_reader import load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.frontend import capture, state_dict_numpy

from .torch_oracle import run_ir, to_torch


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
