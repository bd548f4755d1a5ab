"""Models that the command line knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_compiler.ir import IRGraph

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Builtin:
    """An image classifier: images float32[N, 3, 224, 224] to 1000 logits. ``pretrained``: it has real weights."""

    name: str
    function: str
    pretrained: bool


BUILTINS = {
    b.name: b
    for b in (
        Builtin("resnet18", "resnet18", False),
        Builtin("resnet50", "resnet50", False),
        Builtin("efficientnet-lite0", "efficientnet_lite0", True),
    )
}

# Program name -> how an image becomes its input (functions of npusim.models.images).
PREPROCESSING = {"EfficientNetLite0": "efficientnet_lite0_input"}


def module(name: str, progress: Progress | None = None) -> Any:
    """The PyTorch module in eval mode; where there are no real weights, reproducible random ones and statistics."""
    import torch

    from npusim import models

    builtin = BUILTINS[name]
    torch.manual_seed(0)
    model = getattr(models, builtin.function)().eval()
    if builtin.pretrained:
        from npusim.models import weights

        state = getattr(weights, f"{builtin.function}_weights")(progress=progress)
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
    return model, capture(model, (torch.zeros(batch, 3, 224, 224),)), state_dict_numpy(model)
