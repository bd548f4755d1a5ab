"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385), with torchvision's tensor names."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["ResNet", "resnet18", "resnet34", "resnet50"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, conv: partial[nn.Conv2d], norm: partial[nn.BatchNorm2d]):
        super().__init__()
        self.conv1 = conv(channels, width, 3, stride, padding=1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, padding=1)
        self.bn2 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width, stride, conv, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.relu(x)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the stride is on the 3x3 or, with ``v1_strides``, on the first."""

    expansion = 4

    def __init__(
        self,
        channels: int,
        width: int,
        stride: int,
        conv: partial[nn.Conv2d],
        norm: partial[nn.BatchNorm2d],
        v1_strides: bool = False,
    ):
        super().__init__()
        out = width * self.expansion
        self.conv1 = conv(channels, width, 1, stride if v1_strides else 1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, 1 if v1_strides else stride, padding=1)
        self.bn2 = norm(width)
        self.conv3 = conv(width, out, 1)
        self.bn3 = norm(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, out, stride, conv, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


def _shortcut(
    channels: int, out: int, stride: int, conv: partial[nn.Conv2d], norm: partial[nn.BatchNorm2d]
) -> nn.Sequential | None:
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(conv(channels, out, 1, stride), norm(out))


class ResNet(nn.Module):
    """Images float[N, 3, H, W] to logits float[N, num_classes].

    Args:
        block: ``BasicBlock`` or a ``Bottleneck`` (or a partial of it).
        depths: blocks in each of the four stages.
        num_classes: size of the output.
        conv_bias: whether convolutions have a bias, as Keras' do.
        bn_eps: epsilon of the batch normalisations.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] | partial[Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        conv_bias: bool = False,
        bn_eps: float = 1e-5,
    ):
        super().__init__()
        conv = partial(nn.Conv2d, bias=conv_bias)
        norm = partial(nn.BatchNorm2d, eps=bn_eps)
        expansion = Bottleneck.expansion if isinstance(block, partial) else block.expansion
        self.conv1 = conv(3, 64, 7, 2, padding=3)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        stages = []
        for stage, depth in enumerate(depths):
            width = 64 << stage
            blocks = []
            for i in range(depth):
                blocks.append(block(channels, width, 2 if stage and not i else 1, conv, norm))
                channels = width * expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(num_classes: int = 1000) -> ResNet:
    """Return ResNet-18, from images float32[N, 3, 224, 224] to logits float32[N, num_classes]."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet34(num_classes: int = 1000) -> ResNet:
    """Return ResNet-34, from images float32[N, 3, 224, 224] to logits float32[N, num_classes]."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes)


def resnet50(num_classes: int = 1000, *, v1_strides: bool = False) -> ResNet:
    """Return ResNet-50, from images float32[N, 3, 224, 224] to logits float32[N, num_classes].

    ``v1_strides`` selects the variant of Keras' weights: the stride of a stage is on its first 1x1 convolution,
    convolutions have biases, and the batch norm epsilon is 1e-3.
    """
    if v1_strides:
        return ResNet(partial(Bottleneck, v1_strides=True), (3, 4, 6, 3), num_classes, conv_bias=True, bn_eps=1e-3)
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)
