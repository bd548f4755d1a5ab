"""What a failed export reports: the line of the model, the first line of PyTorch's error, and advice."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

__all__ = ["failure", "first_line", "user_frame"]

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_LINE = 120  # characters of a line of code in a message
_FOR_PYTORCH = re.compile(r"\.? (Please file|For the potential source|See https|If this type|If you don't).*")


def user_frame(frames: traceback.StackSummary) -> str:
    """Return the innermost frame outside torch and this package: ' at file:line in function (code)', or ''."""
    for frame in reversed(frames):
        if not frame.filename.startswith(_OUTSIDE):
            code = frame.line or ""
            code = code if len(code) <= _LINE else f"{code[:_LINE]} …"
            return f" at {frame.filename}:{frame.lineno} in {frame.name} ({code})"
    return ""


def failure(e: BaseException) -> str:
    """Return what went wrong in an export, at which line of the model, and what to do instead."""
    place = user_frame(traceback.extract_tb(e.__traceback__))
    return f"torch.export failed{place}: {first_line(e)}{_advice(e)}"


_ADVICE = {
    "DynamicOutputShapeException": "the shape of its result depends on data, and PyTorch cannot export that; call it "
    "on the result of the model",
    ".numpy() is not supported": "NumPy's functions cannot be exported: use those of torch",
    "in output, which is not a known type": "return a tuple or a dict of tensors, or register the class with "
    "torch.export.register_dataclass",
    "_nested_tensor": "nested tensors cannot be exported: pad them to one length",
    "failed to unpack the object": "a size that is computed from tensor data cannot be exported: pass it as a Python "
    "number; of packed sequences, use the padded ones",
}
"""What to do instead, by words in an error of torch.export."""


def first_line(e: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {_FOR_PYTORCH.sub('', lines[0])}" if lines else type(e).__name__


def _advice(e: BaseException) -> str:
    kind = type(e).__name__
    if "DataDependent" in kind or "data-dependent" in str(e):
        return (
            "; Python's own control flow depends on tensor data here: use torch.where, torch.cond or fixed sizes, or "
            "say what holds with torch._check"
        )
    if "NotImplementedError" in kind and "meta" in str(e):
        return "; run the example on a real device, this operation needs values"
    return next((f"; {advice}" for words, advice in _ADVICE.items() if words in f"{kind}: {e}"), "")
