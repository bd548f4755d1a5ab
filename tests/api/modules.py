"""Small modules that several files of tests build."""

from __future__ import annotations

import torch
from torch import nn


class Counting(nn.Module):
    """An MLP that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(torch.relu(self.up(x))) + self.calls


class Counter(nn.Module):
    """As :class:`Counting`, with an op that the NPU lacks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.special.bessel_j1(x.relu() + self.calls) * 2


class Nested(nn.Module):
    """Arguments by keyword and nested; the length of the result depends on a shape."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        return list((x + more["y"]).mul(scale).unbind(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
