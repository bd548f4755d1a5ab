"""MobileNetV2 (Sandler et al. 2018, https://arxiv.org/abs/1801.04381), with torchvision's tensor names."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["MobileNetV2", "mobilenet_v2"]

# expansion, channels, repeats, stride of the first repeat: Table 2 of the paper
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_bn_relu6(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise 3x3, linear 1x1 projection."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int):
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [_conv_bn_relu6(channels, hidden, 1)]
        layers += [_conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden)]
        layers += [nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Images float[N, 3, H, W] to logits float[N, num_classes]."""

    def __init__(self, num_classes: int = 1000):
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [_conv_bn_relu6(3, channels, 3, 2)]
        for expansion, out, repeats, stride in _STAGES:
            for i in range(repeats):
                layers.append(InvertedResidual(channels, out, 1 if i else stride, expansion))
                channels = out
        layers.append(_conv_bn_relu6(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def mobilenet_v2(num_classes: int = 1000) -> MobileNetV2:
    """Return MobileNetV2, from images float32[N, 3, 224, 224] to logits float32[N, num_classes]."""
    return MobileNetV2(num_classes)
