"""Structural equality of nodes, and the weight that dominates a load-time value."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from .graph import LOOPS, Node, Value


def structural_key(node: Node, inputs: Iterable[Hashable]) -> Hashable:
    """Return a key that two nodes of any graphs share if they compute the same from equal ``inputs``."""
    return node.op, tuple(inputs), _frozen(node.attrs), tuple((o.shape, o.dtype) for o in node.outputs)


def _frozen(attrs: Any) -> Hashable:
    """Return a hashable form of node attributes; arrays compare by content."""
    if isinstance(attrs, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(attrs.items()))
    if isinstance(attrs, list | tuple):
        return tuple(_frozen(v) for v in attrs)
    if isinstance(attrs, np.ndarray):
        return attrs.shape, attrs.dtype.str, attrs.tobytes()
    return attrs


def looks_up(node: Node, table: Value, static: set[Value]) -> bool:
    """Whether a node at run time reads so few elements of a load-time table that it may as well decode them.
    ``static``: all load-time values."""
    return node.op in LOOPS and node.out not in static and math.prod(node.domain) * 4 <= table.numel


def main_weight(v: Value) -> str:
    """Return the largest state_dict entry that a load-time value is computed from; it names the buffer."""
    best, name, seen, stack = -1, "const", set(), [v]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op == "weight" and x.numel > best:
            best, name = x.numel, x.node.attrs["key"]
        stack.extend(x.node.inputs)
    return name
