"""Models that the command line knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_compiler.aten.ir import IRGraph

Progress = Callable[[str, int, int], None]

RANDOM = "random: the program computes as fast as with trained ones, but its classes mean nothing"


@dataclass(frozen=True)
class Builtin:
    """An image classifier: images float32[N, 3, 224, 224] to 1000 logits.

    ``program`` names its programs. ``function`` (with ``options``) makes the module; ``images``, a function of
    npusim.models.images, makes an image its input. ``weights``: a function of npusim.models.weights, or None where
    no trained ones are known.
    """

    name: str
    program: str
    function: str
    images: str
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


BUILTINS = {
    b.name: b
    for b in (
        Builtin("resnet18", "ResNet18", "resnet18", "imagenet_input"),
        Builtin("resnet50", "ResNet50", "resnet50", "imagenet_input"),
        Builtin("resnet50-imagenet", "ResNet50ImageNet", "resnet50", "resnet50_input", "resnet50_weights",
                {"v1_strides": True}),
        Builtin("efficientnet-lite0", "EfficientNetLite0", "efficientnet_lite0", "efficientnet_lite0_input",
                "efficientnet_lite0_weights"),
    )
}  # fmt: skip

# Program name -> how an image becomes its input (functions of npusim.models.images).
PREPROCESSING = {b.program: b.images for b in BUILTINS.values()}


def trained() -> str:
    """The names of those that have trained weights, for messages."""
    return " and ".join(b.name for b in BUILTINS.values() if b.weights)


def module(name: str, progress: Progress | None = None) -> Any:
    """The PyTorch module in eval mode; where there are no trained weights, reproducible random ones and statistics."""
    import torch

    from . import models

    builtin = BUILTINS[name]
    torch.manual_seed(0)
    model = getattr(models, builtin.function)(**builtin.options).eval()
    if builtin.weights is not None:
        from .models import weights

        state = getattr(weights, builtin.weights)(progress=progress)
        model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
        return model
    with torch.no_grad():
        for part in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            if part.running_mean is not None and part.running_var is not None:
                part.running_mean.uniform_(-0.1, 0.1)
                part.running_var.uniform_(0.5, 1.5)
    return model


def captured(name: str, batch: int, progress: Progress | None = None) -> tuple[Any, IRGraph, Mapping[str, np.ndarray]]:
    """(module, IR, weights) of a built-in model for images of ``batch``."""
    import torch

    from npu_compiler.frontend import capture, state_dict_numpy

    model = module(name, progress)
    ir = capture(model, (torch.zeros(batch, 3, 224, 224),), name=BUILTINS[name].program)
    return model, ir, state_dict_numpy(model)
