"""Damage: changes to bytes and to trees of lists, maps and leaves, drawn from a ``random.Random``."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

INTEGERS = (
    0, 1, -1, 2, 3, 7, 8, 31, 32, 64, 127, 128, 255, 256, 1000, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, -2, -(2**31), -(2**63), 10**30,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-45, 1e30, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "", " ", "x", "a.b", "float32", "int64", "bool", "0", "-1", "nan", "None", "\0", "\ud800", "é" * 9, "../x",
    "x" * 300,
)  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    """A value that is probably wrong wherever it is put; plain JSON (whose writer takes NaN)."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(INTEGERS)
        case 2:
            return rng.choice(FLOATS)
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice((None, True, False))
        case 5:
            return rng.choice(([], {}, [[]], [0], [None], [0, 0], [-1], [1, 1, 1], [2**40], ["x"], {"x": 1}, [[1], {}]))
        case 6:
            return rng.randint(-4, 40)
        case _:
            return [odd_value(rng) for _ in range(rng.randrange(4))]


def near_number(rng: random.Random, value: int | float) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, float(value) if abs(value) < 1e300 else 0))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of lists and dicts."""
    found, stack = [], [tree]
    while stack:
        inner = stack.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        for key in keys:
            found.append((inner, key))
            stack.append(inner[key])
    return found


def mutate_tree(rng: random.Random, tree: Any, values: Sequence[Any] = ()) -> None:
    """One change somewhere in ``tree``, in place: an odd value (or one of ``values``), a near number, a value from
    elsewhere in the tree, one entry more, one less, or another key."""
    spots = places(tree)
    if not spots:
        return
    container, key = rng.choice(spots)
    old = container[key]
    action = rng.choice(("odd", "odd", "near", "swap", "copy", "drop", "double", "rename"))
    if action == "near" and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = near_number(rng, old)
    elif action == "swap":
        other, place = rng.choice(spots)
        container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(old)
    elif action == "copy":
        other, place = rng.choice(spots)
        container[key] = copy.deepcopy(other[place])
    elif action == "drop":
        del container[key]
    elif action == "double" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif action == "rename" and isinstance(container, dict):
        container[rng.choice((*TEXTS, *container))] = container.pop(key)
    else:
        container[key] = copy.deepcopy(rng.choice(values)) if values and rng.random() < 0.5 else odd_value(rng)


def mutate_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One to four changes of ``data``: flipped bits, odd bytes and numbers, pieces cut, doubled, moved or taken from
    ``other``, and an early end."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.randrange(len(damaged) + 1), rng.choice((1, 1, 2, 4, 8, rng.randint(1, 64)))
        match rng.randrange(8):
            case 0 | 1 if at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(damaged):
                damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 3:
                width = rng.choice((2, 4, 8))
                number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)) % 256**width
                damaged[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 4:
                del damaged[at : at + size]
            case 5:
                damaged[at:at] = damaged[at : at + size]
            case 6 if other:
                place = rng.randrange(len(other))
                damaged[at : at + size] = other[place : place + size]
            case 7 if rng.random() < 0.5:
                del damaged[at:]
            case _:
                damaged[at:at] = rng.randbytes(size)
    return bytes(damaged)
