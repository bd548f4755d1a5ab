"""Checked decoding of plain data (JSON, msgpack, GGUF metadata) into typed values; errors start with the value's
path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from . import dtypes
from .errors import ArtifactError, NPUError

MAX_INT = 2**62
MAX_TEXT = 2**16
_MAX_SHOWN = 80

_T = TypeVar("_T")


def show(value: object) -> str:
    """Return any value as short text for a message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a {value.bit_length()}-bit integer"  # Python refuses to print very long ones
    if isinstance(value, str):
        value = value[:_MAX_SHOWN]
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class Field:
    """A value of a document and its path (``entries[0].calls[3].flops``).

    Each method returns the value as one type, or raises ``error``, whose message starts with the path. A program has
    tens of thousands of fields, so paths are put together only for messages.
    """

    __slots__ = ("_parent", "_step", "error", "value")

    def __init__(self, value: Any, path: str = "", error: type[NPUError] = ArtifactError, parent: Field | None = None):
        self.value, self.error, self._parent, self._step = value, error, parent, path

    @property
    def path(self) -> str:
        """Where the value is in the document; '' for the document itself."""
        if self._parent is None:
            return self._step
        above = self._parent.path
        return above + self._step if above else self._step.removeprefix(".")

    def fail(self, expected: str) -> NoReturn:
        """Raise ``error``: the path, what was expected, and the value."""
        raise self.error(f"{self.path or 'body'}: expected {expected}, got {show(self.value)}")

    def _child(self, value: Any, step: str) -> Field:
        return Field(value, step, self.error, self)

    # -- scalars ------------------------------------------------------------------------------------------------------
    def integer(self, low: int = 0, high: int = MAX_INT) -> int:
        """Return an integer in [low, high]."""
        if type(self.value) is not int or not low <= self.value <= high:
            self.fail(f"a whole number from {low} to {high}")
        return self.value

    def number(self, low: float | None = None) -> float:
        """Return a float, infinities and NaN included; with ``low``, a finite one that is at least ``low``."""
        if type(self.value) not in (int, float):
            self.fail("a number")
        try:
            value = float(self.value)
        except OverflowError:
            self.fail("a number that a float can hold")
        if low is not None and not low <= value < float("inf"):
            self.fail(f"a finite number from {low:g} on")
        return value

    def boolean(self) -> bool:
        """Return a bool."""
        if type(self.value) is not bool:
            self.fail("true or false")
        return self.value

    def text(self, limit: int = MAX_TEXT, pattern: str = "") -> str:
        """Return a string of at most ``limit`` characters that matches ``pattern`` as a whole, if given."""
        fits = isinstance(self.value, str) and len(self.value) <= limit
        if not fits or (pattern and not re.fullmatch(pattern, self.value)):
            self.fail(f"a text{f' like {pattern}' if pattern else ''} of at most {limit} characters")
        return str(self.value)

    def blob(self) -> bytes:
        """Return bytes."""
        """Return bytes."""
        if not isinstance(self.value, bytes):
            self.fail("bytes")
        return self.value

    def dtype(self) -> str:
        """Return the IR name of a dtype."""
        if not isinstance(self.value, str) or self.value not in dtypes.DTYPES:
            self.fail(f"one of {', '.join(dtypes.DTYPES)}")
        return str(self.value)

    def optional(self, read: Callable[[Field], _T]) -> _T | None:
        """Return ``read`` of this field; None for a null."""
        return None if self.value is None else read(self)

    # -- lists and maps -----------------------------------------------------------------------------------------------
    def items(self) -> list[Field]:
        """Return the fields of a list."""
        if not isinstance(self.value, list | tuple):
            self.fail("a list")
        return [self._child(v, f"[{i}]") for i, v in enumerate(self.value)]

    def row(self, length: int) -> list[Field]:
        """Return the fields of a list of this length."""
        items = self.items()
        if len(items) != length:
            raise self.error(f"{self.path or 'body'}: expected a list of {length}, got one of {len(items)}")
        return items

    def mapping(self) -> dict[str, Field]:
        """Return the fields of a map with string keys."""
        if not isinstance(self.value, dict) or not all(isinstance(k, str) for k in self.value):
            self.fail("a map with text keys")
        return {k: self._child(v, f".{k}") for k, v in self.value.items()}

    def record(self, names: Sequence[str]) -> dict[str, Field]:
        """Return the fields of a map that has exactly these keys."""
        found = self.mapping()
        if found.keys() != set(names):
            other = ", ".join(sorted(found.keys() ^ set(names)))
            self.fail(f"the fields {', '.join(names)} (missing or unknown: {other[:_MAX_SHOWN]})")
        return found

    def get(self, key: str) -> Field:
        """Return an entry of a map, or a null if it has none."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        return self._child(self.value.get(key), f".{key}")

    def texts(self, limit: int = MAX_TEXT) -> tuple[str, ...]:
        """Return a list of strings."""
        if isinstance(self.value, list) and all(type(v) is str and len(v) <= limit for v in self.value):
            return tuple(self.value)
        return tuple(f.text(limit) for f in self.items())

    def integers(self, low: int = -MAX_INT, high: int = MAX_INT) -> tuple[int, ...]:
        """Return a list of integers in [low, high]."""
        if isinstance(self.value, list) and all(type(v) is int and low <= v <= high for v in self.value):
            return tuple(self.value)
        return tuple(f.integer(low, high) for f in self.items())


def parse_json(text: str | bytes, origin: str, error: type[NPUError], **options: Any) -> Any:
    """Return the document; raises ``error``, which names ``origin``, for text that is not UTF-8, not JSON or nested too
    deeply. ``options`` are those of ``json.loads``."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **options)
    except RecursionError:
        raise error(f"{origin} cannot be read as JSON: it is nested too deep") from None
    except ValueError as e:
        raise error(f"{origin} cannot be read as JSON: {e}") from None
