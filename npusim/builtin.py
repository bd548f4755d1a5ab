"""The image classifiers that the command line knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.errors import InputError

RANDOM = "random: the program is as fast as with trained ones, but its classes are meaningless"


@dataclass(frozen=True)
class Builtin:
    """An image classifier: images float32[N, 3, 224, 224] to 1000 logits.

    Attributes:
        name: the name on the command line.
        program: the name of its programs.
        function: of npusim.models; called with ``options``, it returns the module.
        images: a function of npusim.models.images from an image to the input.
        weights: a function of npusim.models.weights; None: there are no trained weights.
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

# Program name -> the function of npusim.models.images from an image to the input.
PREPROCESSING = {b.program: b.images for b in BUILTINS.values()}


def trained() -> str:
    """Return the names of the models with trained weights, for messages."""
    return " and ".join(b.name for b in BUILTINS.values() if b.weights)


def module(name: str) -> Any:
    """Return the PyTorch module of a built-in model, in eval mode, with trained weights or else reproducible random
    ones.

    Raises:
        DownloadError: the weights cannot be downloaded.
    """
    import torch

    from . import models

    builtin = BUILTINS[name]
    if builtin.weights is not None:
        from .models import weights

        model = getattr(models, builtin.function)(**builtin.options).eval()
        state = getattr(weights, builtin.weights)()
        model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
        return model
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = getattr(models, builtin.function)(**builtin.options).eval()
        for part in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            if part.running_mean is not None and part.running_var is not None:
                part.running_mean.uniform_(-0.1, 0.1)
                part.running_var.uniform_(0.5, 1.5)
    return model


def captured(name: str, batch: int) -> tuple[Any, IRGraph, Mapping[str, np.ndarray]]:
    """Return (module, graph, weights by name) of a built-in model for images float32[batch, 3, 224, 224].

    Raises as :func:`module`, and ``InputError`` if the images do not fit into memory.
    """
    import torch

    from npu_compiler.frontend import capture, state_dict_numpy

    model = module(name)
    try:
        images = torch.zeros(batch, 3, 224, 224)
    except RuntimeError:
        many = f"{batch} images of float32[3, 224, 224]"
        raise InputError(f"{many} do not fit into memory; choose a smaller batch") from None
    ir = capture(model, (images,), name=BUILTINS[name].program)
    return model, ir, state_dict_numpy(model)
