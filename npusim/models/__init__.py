"""Model definitions for demos, tests and benchmarks, and the real weights that package registries carry.

The definitions import torch at their first use; ``npusim.models.weights`` and ``npusim.models.images`` do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_DEFINITIONS = {
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "mobilenet_v2": "mobilenet",
    "efficientnet_lite0": "efficientnet",
    "vit": "transformer",
    "vit_b_16": "transformer",
    "bert": "transformer",
}

__all__ = [*_DEFINITIONS]


def __getattr__(name: str) -> Any:
    if name in _DEFINITIONS:
        return getattr(import_module(f"{__name__}.{_DEFINITIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
