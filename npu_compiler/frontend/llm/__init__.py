"""Decoder LLMs: a checkpoint's config to IR. Reading configs and checkpoints needs no torch; the definitions do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, open_checkpoint
from .config import LLMConfig, parameter_shapes
from .rope import Rope

if TYPE_CHECKING:
    from .graphs import llm_graphs, scoring_graphs
    from .modules import Decoder, load_decoder

__all__ = [
    "Checkpoint",
    "Decoder",
    "LLMConfig",
    "Rope",
    "llm_graphs",
    "load_decoder",
    "open_checkpoint",
    "parameter_shapes",
    "scoring_graphs",
]

_LAZY = {"Decoder": "modules", "llm_graphs": "graphs", "load_decoder": "modules", "scoring_graphs": "graphs"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
