"""A builder of C++ text: nested blocks, and values with the kind of register that holds them.

A value that varies along the lane dim has one of the kinds ``vf``, ``vd``, ``vi32``, ``vi64`` and ``mask`` (a bool as
vi32 0 or -1). A value that is equal in all lanes is ``vf`` or ``vd`` (a splat), or a scalar ``long``, ``int`` or
``bool``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...graph.expr import Expr
from ...support import dtypes

SCALAR_OF = {"vf": "float", "vd": "double", "vi32": "int", "vi64": "long", "mask": "bool"}
CTYPE = {"mask": "vi32"}
LANE_TYPE = {"vf": "float", "vd": "double", "vi64": "int64_t", "vi32": "int32_t", "mask": "int32_t"}


class Value(NamedTuple):
    """A C++ name or literal and the kind of register that holds it."""

    text: str
    kind: str


class Block:
    """A block of C++ under construction.

    ``binds``: the dims whose index variable it defines, and 'row' if it defines reduction results. ``kind``: 'loop',
    'branch', or 'mask' for code that runs under a lane mask.
    """

    def __init__(
        self,
        parent: Block | None,
        header: str,
        footer: str = "}",
        binds: frozenset[Any] = frozenset(),
        kind: str = "loop",
    ):
        self.parent, self.header, self.footer, self.binds, self.kind = parent, header, footer, binds, kind
        self.items: list[str | Block] = []
        self.values: dict[Expr, Value] = {}
        self.offsets: dict[Any, str] = {}
        self.mask = ""

    @property
    def branch(self) -> bool:
        """Whether the block is the arm of a branch."""
        return self.kind != "loop"

    def chain(self) -> Iterator[Block]:
        """Yield this block and those around it, innermost first."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.parent

    def lines(self, indent: int = 0) -> Iterator[str]:
        """Yield the lines of the block, indented by ``indent`` levels."""
        inner = indent
        if self.header:
            yield from ("  " * indent + line for line in self.header.splitlines())
            inner += 1
        for item in self.items:
            if isinstance(item, Block):
                yield from item.lines(inner)
            else:
                yield "  " * inner + item
        if self.header:
            yield "  " * indent + self.footer

    @contextmanager
    def child(
        self, header: str, footer: str = "}", binds: frozenset[Any] = frozenset(), kind: str = "loop"
    ) -> Iterator[Block]:
        """Open a nested block. Code hoisted out of it is placed before it."""
        block = Block(self, header, footer, binds, kind)
        yield block
        self.items.append(block)


def literal(value: Any, kind: str) -> str:
    """Return a C++ constant of a scalar type or of the lanes of a vector kind."""
    kind = SCALAR_OF.get(kind, kind)
    if kind in ("float", "double"):
        suffix = "f" if kind == "float" else ""
        number = np.float32(value) if kind == "float" else np.float64(value)
        if np.isnan(number):
            return f'__builtin_nan{suffix}("")'
        text = f"__builtin_inf{suffix}()" if np.isinf(number) else str(abs(number)) + suffix
        return f"(-{text})" if np.signbit(number) else text
    if kind == "bool":
        return "true" if value else "false"
    value = int(value)
    if value == -(2**63):
        return "INT64_MIN"
    text = f"{value}{'L' if kind == 'long' else ''}"
    if value == -(2**31) and kind == "int":
        text = "INT32_MIN"
    return f"({text})" if value < 0 else text


def vector_kind(dtype: str) -> str:
    """Return the vector kind whose lanes hold ``dtype`` for arithmetic."""
    if dtype == "bool":
        return "mask"
    if dtypes.is_float(dtype):
        return "vd" if dtype == "float64" else "vf"
    return "vi64" if dtype == "int64" else "vi32"


def uniform_kind(dtype: str) -> str:
    """Return the kind that holds a ``dtype`` value shared by all lanes."""
    kind = vector_kind(dtype)
    return kind if kind in ("vf", "vd") else SCALAR_OF[kind]


def wrap(text: str, dtype: str) -> str:
    """Wrap an int32 lane or scalar to the range of a smaller integer type."""
    return f"wrap<{dtypes.DTYPES[dtype].ctype}>({text})" if dtype in ("int8", "uint8", "int16") else text


def convert(value: Value, kind: str) -> str:
    """Convert a value to another kind: splat, widen, or mask to number and back."""
    text, have = value
    if have == kind:
        return text
    if kind in ("long", "int", "bool"):
        return f"({kind}){text}"
    if kind == "mask":
        return f"splat<vi32>(-(int){text})"
    if have == "mask":
        return f"({text} & 1)" if kind == "vi32" else f"cvt<{kind}>({text} & 1)"
    if have in ("long", "int", "bool"):
        return f"splat<{kind}>(({SCALAR_OF[kind]}){text})"
    return f"cvt<{kind}>({text})"


def strip_parentheses(text: str) -> str:
    """Remove redundant outer parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and at < len(text) - 1:
            return text
    return text[1:-1]
