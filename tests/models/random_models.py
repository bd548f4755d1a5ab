"""Models with random parameters under which activations keep a sane size, so that errors mean something."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from npusim import models
from npusim.models.resnet import BasicBlock, ResNet

NORMS = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


def randomise(model: nn.Module, *example: Any, seed: int = 0) -> nn.Module:
    """Random norm parameters and biases, and batch norm statistics near, but not at, those of ``example``."""
    torch.manual_seed(seed)
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and name.endswith("bias"):
                p.normal_(0, 0.1)
        for m in norms:
            m.weight.uniform_(0.5, 1.5)
            m.bias.uniform_(-0.2, 0.2)
        batch = [m for m in norms if isinstance(m, nn.BatchNorm2d)]
        for m in batch:
            m.momentum = None  # the plain average over the calls
        if batch:
            model.train()(*example)
        for m in batch:
            m.running_mean += 0.2 * torch.randn_like(m.running_mean) * m.running_var.sqrt()
            m.running_var *= torch.empty_like(m.running_var).uniform_(0.7, 1.4)
    return model.eval()


def two_stages() -> nn.Module:
    """ResNet-18 without its last two stages, whose kernels differ from these in their sizes only."""
    return ResNet(BasicBlock, (2, 2, 0, 0))


@cache
def image_model(name: str, size: int) -> nn.Module:
    """A classifier of ``npusim.models``, or :func:`two_stages`, calibrated on ``size`` x ``size`` noise. Shared: do not
    change it."""
    torch.manual_seed(1)
    make: Callable[[], nn.Module] = two_stages if name == "two_stages" else getattr(models, name)
    return randomise(make(), torch.randn(8, 3, size, size))


def images(batch: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1000 + seed))
