"""Layers that are alike are traced once, and the graph is the one of a capture of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.frontend import capture
from npu_compiler.frontend.repeats import repeated, traced_once
from npu_compiler.support.errors import CaptureError


class Layer(nn.Module):
    def __init__(self, size: int, power: int):
        super().__init__()
        self.fc, self.power = nn.Linear(4, size), power
        self.register_buffer("last", torch.zeros(1, size))

    def forward(self, x: Tensor, table: tuple[Tensor, ...], seen: Tensor) -> Tensor:
        y = self.fc(x).pow(self.power)
        self.get_buffer("last").copy_(y)
        return x + torch.cat(torch.split(y * table[0] + seen.add_(1.0), 2, -1), -1).sum(-1, keepdim=True)


class Net(nn.Module):
    """Layers of three kinds. They share a table or have another, and count their calls in buffers of the model."""

    def __init__(self, reads: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, power) for size, power in [(4, 2), (4, 2), (6, 2), (4, 3), (4, 2)])
        for i in range(5):
            self.register_buffer(f"seen_{i}", torch.zeros(1))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        tables = torch.tanh(x[:, :1]), torch.sin(x[:, :1])
        for i, layer in enumerate(self.layers):
            x = layer(x, (tables[i == 4],), self.get_buffer(f"seen_{i}"))
        return x + self.get_buffer("seen_1") if self.reads else torch.tanh(x)


def captured(net: Net) -> IRGraph:
    example = (torch.zeros(1, 4, device="meta"),)
    with traced_once(net, net.layers, example):
        return capture(net, example)


@pytest.fixture(scope="module")
def net() -> Net:
    with torch.device("meta"):
        return Net()


def test_the_graph_is_that_of_all_layers(net: Net) -> None:
    names = [name for tensors in (net.named_parameters(), net.named_buffers()) for name, _ in tensors]
    short = captured(net)
    assert sum(n.op_type.startswith("npusim_layers.repeat") for n in short.nodes) == 2  # layers 1 and 4 are like 0
    assert not any(w.name.startswith("layers.1.") for w in short.weights)
    whole = capture(net, (torch.zeros(1, 4, device="meta"),))
    assert ir_to_dict(repeated(short, names)) == ir_to_dict(whole)
    assert repeated(short, names).allowed_ops == whole.allowed_ops
    assert list(repeated(short, names).weight_name_mapping) == list(whole.weight_name_mapping)


def test_a_buffer_of_a_repeated_layer_is_not_read_elsewhere() -> None:
    with torch.device("meta"):
        net = Net(reads=True)
    with pytest.raises(CaptureError, match="Net: seen_1 is used outside of the repeated layer that writes it"):
        repeated(captured(net), [])
