"""Modules in forms that torch.export can trace: without branches on values that do not matter, and scripted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import transformer

__all__ = ["traceable_modules"]


@contextmanager
def traceable_modules(model: torch.nn.Module) -> Iterator[None]:
    """Replace what ``torch.export`` cannot trace in PyTorch's own modules, though results do not depend on it.

    ``torch.nn.Transformer`` and its parts ask whether a mask is the causal one. The answer is only a hint: without it,
    they use the mask. Distributions check their parameters and samples, unless ``validate_args`` is false; TorchDynamo
    turns these checks off, too. ``Module.to`` replaces parameters by themselves, which fails while they are traced.
    Methods of a ``ScriptModule`` are interpreted: under ``torch.export``, PyTorch calls the Python function of which a
    method was made, with one argument too many. A method that is looked up anew does not know that function.
    """
    scripted = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
    methods = [(m, n, v) for m in scripted for n, v in vars(m).items() if isinstance(v, torch._C.ScriptMethod)]
    for module, name, _ in methods:
        del vars(module)[name]
    with (
        mock.patch.object(transformer, "_detect_is_causal_mask", _is_causal),
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        mock.patch.object(torch.nn.Module, "_apply", _applied(torch.nn.Module._apply)),
    ):
        try:
            yield
        finally:
            for module, name, method in methods:
                vars(module)[name] = method


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _applied(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``Module._apply`` that leaves a module as it is if ``fn`` returns all of its tensors unchanged."""

    def applied(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            return self if all(fn(t) is t for t in tensors) else apply(self, fn, recurse)

    return applied
