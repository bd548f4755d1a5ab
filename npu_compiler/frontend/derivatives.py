"""Models whose forward computes derivatives: with ``torch.autograd.grad`` or transforms such as ``torch.func.grad``.

``torch.export`` records calls before autograd, which cannot see into them. Such a model is exported after autograd: the
operations of a derivative are then ordinary ones of the graph. Composite operations, like ``linear``, are decomposed
there, so other models are not exported that way.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch._functorch import eager_transforms, vmap
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..support.errors import CaptureError
from .export_errors import user_frame

__all__ = ["export"]


class _Differentiates(Exception):
    """Raised to end an export at the first derivative."""


def export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], restore: Callable[[], None]
) -> tuple[ExportedProgram, bool]:
    """Export a call of ``model``: after autograd if its forward computes derivatives, or if it calls vmap in a way that
    cannot be exported otherwise.

    ``restore``: called before a second attempt, to undo what the first one changed.

    Returns:
        The program, and whether the model computes derivatives.

    Raises:
        Exception: what ``torch.export`` raises.
        CaptureError: the model calls ``backward()``.
    """
    transforms = _Transforms()
    try:
        with transforms:
            program = torch.export.export(model, args, kwargs, strict=False)
        if not transforms.place:
            return program, False
    except Exception:
        if not transforms.place:
            if not transforms.maps:
                raise
            restore()
            with suppress(Exception):  # the first error is the one to report
                return _export_after_autograd(model, args, kwargs), False
            raise
    if transforms.accumulates:
        raise CaptureError(
            f"forward calls backward(){transforms.place}; call torch.autograd.grad, which returns gradients"
        )
    restore()
    return _export_after_autograd(model, args, kwargs), True


class _Transforms:
    """A context that ends an export at the first derivative, and notes calls of vmap.

    Attributes:
        place: where the first derivative is computed, as text; empty: nowhere.
        accumulates: whether it is ``backward()``, which adds to ``.grad``.
        maps: whether the model calls vmap.
    """

    def __init__(self) -> None:
        self.place, self.accumulates, self.maps = "", False, False
        self._patches, self._thread = ExitStack(), threading.get_ident()

    def __enter__(self) -> _Transforms:
        for module, name, note in (
            (torch.autograd, "_engine_run_backward", self._derivative),
            (eager_transforms, "grad_increment_nesting", self._derivative),
            (eager_transforms, "jvp_increment_nesting", self._derivative),
            (vmap, "vmap_increment_nesting", self._map),
        ):
            self._patches.enter_context(mock.patch.object(module, name, _noted(getattr(module, name), note)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _derivative(self, accumulate_grad: bool = False, **_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.place = self.place or user_frame(traceback.extract_stack())
        self.accumulates |= accumulate_grad
        raise _Differentiates

    def _map(self, **_: Any) -> None:
        self.maps |= threading.get_ident() == self._thread


def _noted(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(**kwargs)
        return function(*args, **kwargs)

    return noted


def _export_after_autograd(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    from torch.export._trace import _export

    with _differentiable(model), sdpa_kernel(SDPBackend.MATH):  # the gradients of other kernels are private to PyTorch
        return _export(model, args, kwargs, strict=False, pre_dispatch=False)


@contextmanager
def _differentiable(model: torch.nn.Module) -> Iterator[None]:
    """Call ``model`` with gradients enabled. Its results are detached: torch would export their gradients, too."""
    call: Callable[..., Any] = type(model).__call__

    def differentiable(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not model:
            return call(self, *args, **kwargs)
        with torch.enable_grad():
            result = call(self, *args, **kwargs)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(result)):
            result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return result

    with mock.patch.object(type(model), "__call__", differentiable):
        yield
