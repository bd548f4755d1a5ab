"""``capture``: a PyTorch model to IR through ``torch.export``."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from npu_compiler.errors import CaptureError
from npu_compiler.frontend.translate import NeedsFunctionalForm, translate
from npu_compiler.ir import IRGraph

__all__ = ["capture"]

_TORCH_DIR = str(Path(torch.__file__).parent)


def capture(
    model: torch.nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    strict: bool = False,
) -> IRGraph:
    """The IR of ``model``'s forward in eval mode, for the shapes, dtypes and Python values of the example inputs.

    Composite ATen ops (linear, conv2d, batch_norm, layer_norm, scaled_dot_product_attention ...) are kept. Regions under
    ``no_grad`` and ``autocast`` are inlined. Buffers that forward mutates become ``state``; values of constants and of
    non-persistent buffers are stored unless they are on the meta device. All keys of tied weights are listed, and all
    their placeholders map to the first of them, so a checkpoint needs to hold that one only.

    Args:
        model: a module on any device, the meta device included, or the result of ``torch.export.export``. The module is
            exported in eval mode and left as it was.
        example_inputs: the positional arguments of forward: a tuple or list, or a single tensor. Tensors (numpy arrays
            too), also inside lists, tuples and dicts, become graph inputs named after their argument; Python numbers,
            strings, booleans and None are baked in. None for an ``ExportedProgram``.
        example_kwargs: the keyword arguments of forward.
        name: ``model_name`` of the result; the class name by default.
        strict: passed to ``torch.export``; True traces with TorchDynamo.

    Raises:
        CaptureError: the model cannot be a static graph; the message says where and what to change.
    """
    own = isinstance(model, torch.nn.Module)
    if own:
        label = name or type(model).__name__
        program = _export(model, _positional(example_inputs), dict(example_kwargs or {}), label, strict)
    elif isinstance(model, ExportedProgram):
        label, program = name or "exported_program", model
    else:
        raise CaptureError(
            f"expected a torch.nn.Module or a torch.export.ExportedProgram, got {type(model).__name__}; "
            "wrap a function in a module whose forward calls it"
        )
    try:
        return translate(program, label, trust_storages=own)
    except NeedsFunctionalForm:
        # Only torch's own functionalisation knows how to write through views; it rewrites reshapes and casts on the
        # way, which is why it is not the first choice.
        program = _functional(program, label)
    try:
        return translate(program, label, trust_storages=own)
    except NeedsFunctionalForm:
        raise CaptureError(f"{label}: an in-place operation writes through a view; use its out-of-place form") from None


def _positional(example_inputs: Any) -> tuple[Any, ...]:
    if example_inputs is None:
        return ()
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs)
    if isinstance(example_inputs, Mapping):
        raise CaptureError(
            "example_inputs: pass keyword arguments as example_kwargs, or wrap a dict argument in a tuple"
        )
    return (example_inputs,)


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], label: str, strict: bool
) -> ExportedProgram:
    to_tensors = torch.utils._pytree.tree_map_only
    args, kwargs = to_tensors(np.ndarray, torch.from_numpy, (args, kwargs))
    with _eval_mode(model), torch.inference_mode(False):
        try:
            return torch.export.export(model, args, kwargs, strict=strict)
        except Exception as e:  # torch.export documents no exception types
            raise CaptureError(f"{label}: torch.export failed{_user_frame(e)}: {_first_line(e)}{_advice(e)}") from e


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _functional(program: ExportedProgram, label: str) -> ExportedProgram:
    try:
        return program.run_decompositions({})
    except Exception as e:  # as for torch.export
        raise CaptureError(f"{label}: removing in-place operations failed: {_first_line(e)}") from e


def _user_frame(e: BaseException) -> str:
    """Where the model's own code was when ``e`` was raised: the innermost frame outside torch and this package."""
    here = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        if not frame.filename.startswith((_TORCH_DIR, here, "<")):
            return f" at {frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
    return ""


def _first_line(e: BaseException) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def _advice(e: BaseException) -> str:
    kind = type(e).__name__
    if "DataDependent" in kind or "data-dependent" in str(e):
        return "; a Python value or a shape depends on tensor data: use torch.where or fixed sizes instead"
    if "NotImplementedError" in kind and "meta" in str(e):
        return "; run the example on a real device, this operation needs values"
    return ""
