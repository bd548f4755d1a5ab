"""PyTorch models to IR. Capturing a model imports torch at first use; reading LLM checkpoints does not need it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import capture
    from .tensors import state_dict_numpy

__all__ = ["capture", "state_dict_numpy"]

_LAZY = {"capture": "export", "state_dict_numpy": "tensors"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
