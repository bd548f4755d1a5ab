"""Whole numbers among a caller's arguments."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .errors import InputError
from .records import show


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int from ``low`` to ``high`` (None: unbounded); bool is not a number here. Raises
    ``InputError`` that names the argument."""
    found = index(value)
    if found is None or found < low or (high is not None and found > high):
        upto = "" if high is None else f" to {high}"
        raise InputError(f"{name}={show(value)}: it takes a whole number from {low}{upto}")
    return found


def index(value: Any) -> int | None:
    """Return a whole number, of any integer type, as an int; None for everything else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
