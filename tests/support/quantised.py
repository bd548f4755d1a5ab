"""Quantised networks as PT2E makes them: weights in int8 with a scale for each channel, activations in 8 bits with one
scale for each tensor, dequantised in front of every convolution and quantised after it."""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from torch import nn

Q = torch.ops.quantized_decomposed
RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


class Activation(nn.Module):
    """Quantises its input to ``dtype`` and dequantises it."""

    def __init__(self, scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8):
        super().__init__()
        self.arguments = (scale, zero_point, *RANGE[dtype], dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *self.arguments), *self.arguments)


class Weight(nn.Module):
    """Dequantises an int8 weight with a scale for each output channel; ``zero_points`` as PT2E has them, or None."""

    def __init__(self, shape: tuple[int, ...], zero_points: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(sum(shape))
        self.register_buffer("q", torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator))
        fan_in = max(1, self.q[0].numel())
        self.register_buffer("scale", (0.5 + torch.rand(shape[0], generator=generator)) / (74 * fan_in**0.5))
        self.register_buffer("zero_point", torch.zeros(shape[0], dtype=torch.int64) if zero_points else None)

    def forward(self) -> torch.Tensor:
        return Q.dequantize_per_channel(self.q, self.scale, self.zero_point, 0, -128, 127, torch.int8)


class Conv(nn.Module):
    """A convolution of dequantised operands with a bias."""

    def __init__(self, cin: int, cout: int, size: int = 3, stride: int = 1, groups: int = 1):
        super().__init__()
        self.weight, self.stride, self.groups = Weight((cout, cin // groups, size, size)), stride, groups
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, cout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.weight.q.shape[-1]
        return nn.functional.conv2d(x, self.weight(), self.bias, self.stride, size // 2, 1, self.groups)


class Layer(nn.Module):
    """A padded convolution with a residual, whose input and result are 8-bit integers of ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.uint8, groups: int = 1, channels: int = 6):
        super().__init__()
        zero = 31 if dtype == torch.uint8 else -40
        self.input, self.conv = Activation(0.02, zero, dtype), Conv(channels, 40, 3, 2, groups)
        self.short, self.out = Conv(channels, 40, 1, 2), Activation(0.01, zero, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        return Q.quantize_per_tensor(torch.relu(self.conv(x) + self.out(self.short(x))), *self.out.arguments)


class QuantisedNet(nn.Module):
    """A residual network: [N, 3, H, W] -> [N, 10]. Its input has a zero point, and with ``signed`` all activations."""

    def __init__(self, signed: bool = False, width: int = 40):
        super().__init__()
        dtype, zero = (torch.int8, -20) if signed else (torch.uint8, 0)
        self.first, self.second, self.short = Conv(3, width, 5, 2), Conv(width, width), Conv(width, width, 1)
        self.spatial = Conv(width, width, 3, 1, width)
        self.fc, self.bias = Weight((10, width), zero_points=False), nn.Parameter(torch.linspace(-1, 1, 10))
        self.input = Activation(0.02, 117)
        self.q = nn.ModuleList([Activation(s, zero, dtype) for s in (0.012, 0.01, 0.02, 0.01, 0.004)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.q[0](torch.relu(self.first(self.input(x))))
        y = self.q[1](torch.relu(self.second(x)))
        x = self.q[2](torch.relu(self.short(y) + x))
        x = self.q[3](nn.functional.hardtanh(self.spatial(x), -1.0, 1.0))
        return nn.functional.linear(self.q[4](x.mean((2, 3))), self.fc(), self.bias)


def small_network() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A network in float32 with its example input, for ``npusim quantize``."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
            self.spatial, self.left = nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, 24, 1)
            self.right, self.head = nn.Conv2d(16, 24, 3, 1, 1), nn.Linear(24, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.max_pool2d(torch.relu_(self.norm(self.stem(x))), 2)
            x = torch.relu(self.left(self.spatial(x)) + self.right(x))
            result: torch.Tensor = self.head(x.mean((2, 3)))
            return result

    torch.manual_seed(0)
    network = Small().eval()
    assert network.norm.running_mean is not None and network.norm.running_var is not None
    with torch.no_grad():
        network.norm.running_mean.uniform_(-0.2, 0.2)
        network.norm.running_var.uniform_(0.5, 1.5)
    return network, (torch.zeros(1, 3, 16, 16),)
