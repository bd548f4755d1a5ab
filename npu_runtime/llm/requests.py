"""Checks of the arguments of a language model's calls. Every function raises ``InputError`` that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from npu_compiler.support.errors import InputError
from npu_compiler.support.numbers import index
from npu_compiler.support.records import show

_BYTES = bytes | bytearray | memoryview


def number(name: str, value: Any, holds: Callable[[float], bool], wanted: str) -> float:
    """Return ``value`` as a finite float for which ``holds`` is true; ``wanted`` describes such values in the error."""
    good = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        found = float(value) if good else math.nan
    except OverflowError:
        found = math.inf
    if not (math.isfinite(found) and holds(found)):
        raise InputError(f"{name}={show(value)}: it takes {wanted}")
    return found


def token_ids(prompt: Any) -> list[int]:
    """Return the ids of a list, or of a one-dimensional array, of integers."""
    if isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence | np.ndarray):
        raise InputError(f"a prompt is text, token ids or messages, not a {type(prompt).__name__}")
    if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise InputError(f"a prompt has one dim, not the shape {list(prompt.shape)}")
    ids = []
    for at, value in enumerate(prompt):
        found = index(value)
        if found is None:
            raise InputError(f"a prompt is text, token ids or messages; prompt[{at}] is {show(value)}")
        ids.append(found)
    return ids


def stops(stop: Any) -> tuple[list[str], set[int]]:
    """Return the stop strings and the stop token ids of ``stop``: one of either, an iterable of them, or None."""
    if stop is None:
        return [], set()
    listed = [stop] if isinstance(stop, str) or index(stop) is not None else stop
    if isinstance(listed, _BYTES) or not isinstance(listed, Iterable):
        raise InputError(f"stop={show(stop)}: it takes texts and token ids")
    texts, ids = [], set()
    for value in listed:
        found = index(value)
        if isinstance(value, str):
            texts += [value] if value else []
        elif found is not None:
            ids.add(found)
        else:
            raise InputError(f"stop holds {show(value)}; it takes texts and token ids")
    return texts, ids
