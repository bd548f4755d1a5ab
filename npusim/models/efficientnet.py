"""EfficientNet-Lite0: EfficientNet-B0 (Tan and Le 2019, https://arxiv.org/abs/1905.11946) without squeeze-excitation
and with ReLU6, under the tensor names of the PyTorch checkpoint that the Python registry carries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EfficientNetLite0", "efficientnet_lite0"]

# repeats, kernel, stride of the first repeat, expansion, channels: Table 1 of the paper
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv2d(nn.Conv2d):
    """A convolution without bias and with TensorFlow's "same" padding: ceil(size / stride) outputs; if the padding is
    odd, the extra row and column are at the bottom and right."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[2:]]
        if any(p % 2 for p in pads):
            height, width = pads
            x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
            pads = [0, 0]
        return F.conv2d(x, self.weight, None, self.stride, [p // 2 for p in pads], groups=self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class MBConv(nn.Module):
    """1x1 expansion (if any), depthwise convolution, linear 1x1 projection."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        hidden = channels * expansion
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = SameConv2d(channels, hidden, 1)
            self._bn0 = _norm(hidden)
        self._depthwise_conv = SameConv2d(hidden, hidden, kernel, stride, groups=hidden)
        self._bn1 = _norm(hidden)
        self._project_conv = SameConv2d(hidden, out, 1)
        self._bn2 = _norm(out)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """Images float[N, 3, 224, 224], normalised by ``efficientnet_lite0_input``, to logits float[N, num_classes]."""

    def __init__(self, num_classes: int = 1000):
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, 2)
        self._bn0 = _norm(32)
        channels, blocks = 32, []
        for repeats, kernel, stride, expansion, out in _STAGES:
            for i in range(repeats):
                blocks.append(MBConv(channels, out, kernel, 1 if i else stride, expansion))
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv2d(channels, 1280, 1)
        self._bn1 = _norm(1280)
        self._fc = nn.Linear(1280, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        return self._fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def efficientnet_lite0(num_classes: int = 1000) -> EfficientNetLite0:
    """Return EfficientNet-Lite0, from images float32[N, 3, 224, 224] to logits float32[N, num_classes]."""
    return EfficientNetLite0(num_classes)
