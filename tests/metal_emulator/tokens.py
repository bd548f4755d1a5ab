"""The tokens of a Metal text."""

from __future__ import annotations

import re
from dataclasses import dataclass


class MSLError(Exception):
    """The text is not in the subset of the Metal Shading Language that the emulator knows."""


NEWEST = 320  # version of the language

_TOKEN = re.compile(
    r"(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<space>\s+)"
    r"|(?P<text>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark>::|->|<<=|>>=|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|<<|.)",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"\s*#\s*(?:line\s+)?(\d+)\s+\"")  # what a preprocessor leaves: # 12 "file"


@dataclass
class Token:
    kind: str
    text: str
    line: int


def tokens(source: str) -> list[Token]:
    """Tokens with their lines. Comments become blanks of the same number of lines."""
    out, line = [], 1
    for m in _TOKEN.finditer(source):
        kind, text = str(m.lastgroup), m.group()
        marker = MARKER.match(text) if kind == "directive" else None
        if marker:
            line = int(marker[1]) - 1
        if kind == "comment":
            out.append(Token("space", "\n" * text.count("\n") or " ", line))
        else:
            out.append(Token(kind, text, line))
        line += text.count("\n")
    return out


def split(parameters: list[Token]) -> list[list[Token]]:
    """A parameter list at its top-level commas."""
    out: list[list[Token]] = [[]]
    depth = 0
    for t in parameters:
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(t.text, 0)
        if t.text == "," and depth == 0:
            out.append([])
        elif t.kind != "space" or out[-1]:
            out[-1].append(t)
    return [p for p in out if p]


def number(text: str) -> str:
    """A literal with Metal's meaning: unsuffixed floats are float. :class:`MSLError` if Metal has no such literal."""
    low = text.lower()
    digits = not low.startswith("0x")
    floating = ("." in low or re.search(r"\de[+-]?\d", low) is not None) if digits else "p" in low
    if low.endswith(("ll", "llu")):
        raise MSLError(f"there is no long long in Metal: {text}")
    if digits and low.endswith("bf"):
        return f"metal::bfloat({text[:-2]}f)"
    if digits and low.endswith("h"):
        return f"metal::half({text[:-1]}{'' if floating else '.0'}f)"
    if floating and low.endswith("l"):
        raise MSLError(f"there is no long double in Metal: {text}")
    return text if not floating or low.endswith("f") else f"{text}f"
