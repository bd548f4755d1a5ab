"""Reads the JSON form of the records, checked against their types."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from npu_compiler.support.records import Field

from .records import DEVICES, Profile, Section

_MOST_TEXT = 2**20
_P = TypeVar("_P", bound=Profile)


def read_profile(kind: type[_P], f: Field) -> _P:
    """The profile in a JSON document. Raises the field's error with the path of what is missing, of another type, or
    refers to something that is not there."""
    profile = cast(_P, _read(kind, f))
    for n, section in enumerate(profile.sections):
        _check(section, f.get("sections").items()[n])
    return profile


_hints = cache(get_type_hints)


def _read(kind: Any, f: Field) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints, given = _hints(kind), f.mapping()
        absent = {x.name for x in fields(kind) if x.default is not MISSING} - given.keys()
        return kind(**{x.name: _read(hints[x.name], f.get(x.name)) for x in fields(kind) if x.name not in absent})
    arguments = get_args(kind)
    if get_origin(kind) is types.UnionType:  # X | None
        return f.optional(lambda x: _read(arguments[0], x))
    if get_origin(kind) is dict:
        return {key: _read(arguments[1], value) for key, value in f.mapping().items()}
    if get_origin(kind) is tuple and arguments[1:] == (...,):
        return tuple(_read(arguments[0], x) for x in f.items())
    if get_origin(kind) is tuple:
        return tuple(_read(each, x) for each, x in zip(arguments, f.row(len(arguments)), strict=True))
    return f.integer() if kind is int else f.number(0.0) if kind is float else f.text(_MOST_TEXT)


def _check(section: Section, f: Field) -> None:
    """Rows are numbered, and what refers to rows and blocks by number finds them."""
    rows = f.get("rows").items()
    for n, row in enumerate(section.rows):
        if row.index != n or row.device not in DEVICES or any(earlier >= n for earlier in row.after):
            rows[n].fail(f"a row with its own number, on {' or '.join(DEVICES)}, that reads from earlier ones")
    for arena, where in zip(section.arenas, f.get("arenas").items(), strict=True):
        known = all(n < len(arena.blocks) for n in arena.owners) and all(n < len(rows) for n in arena.rows)
        if not known or arena.peak > len(arena.rows):
            where.fail("an arena of blocks and rows that are there")
