"""Which module and line of the model's Python code a node comes from, as torch.export recorded it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath

import torch

from ..aten.ir import Location

__all__ = ["LOCATION_KEYS", "location_of"]

LOCATION_KEYS = ("nn_module_stack", "stack_trace")  # in the meta of a node
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_TORCH = str(Path(torch.__file__).parent)
_ROOT = re.compile(r"^L(?:__self__|\['self'\])\.?")  # how strict mode calls the model


def location_of(node: torch.fx.Node) -> Location | None:
    """Return the module that calls ``node`` and the innermost line outside of PyTorch; None if neither is known."""
    module, kind = _innermost(node.meta.get("nn_module_stack") or {})
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if not f[0].startswith(_TORCH)]
    source = f"{_short(frames[-1][0])}:{frames[-1][1]}" if frames else ""
    return Location(module, kind, source) if kind or source else None


def _innermost(stack: Mapping[str, tuple[str, object]]) -> tuple[str, str]:
    """Return (path, class) of the last module of a stack."""
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    return _ROOT.sub("", path), name.rpartition(".")[2]


@cache
def _short(file: str) -> str:
    """Return a file's path relative to the directory from which Python imports it, without this machine's folders."""
    roots = [root for root in sys.path if root and PurePath(file).is_relative_to(root)]
    return PurePath(file).relative_to(max(roots, key=len)).as_posix() if roots else PurePath(file).name
