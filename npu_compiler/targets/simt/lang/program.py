"""What a GPU program's ``binary`` holds: the launches of every entry point, and the target's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from ....support.errors import ArtifactError
from ....support.records import Field

VERSION = 2
ARENA = -1


class TileMap(NamedTuple):
    """How TMA cuts tiles out of an operand of two-byte elements, innermost dim first. ``strides``: bytes,
    of all dims but the first; ``box``: a tile's size along each dim; ``swizzle``: bytes of a tile's row that are
    permuted together (64, 128). With ``corners`` it takes ``box[1]`` pixels of an image [C, W, H, N] in their order,
    ``steps`` apart along W and H, inside the window from corners[:2] (W, H) to corners[2:] beyond the image's end."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    corners: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A call of ``function`` on ``groups`` workgroups of ``threads``, with ``shared`` bytes of shared memory beyond
    what it declares. ``arguments``: (buffer id, byte offset) in order; what lies in the arena has id :data:`ARENA`.
    ``checks``: a last argument is the address of an int that is set when an index is out of range. ``groups`` 0:
    nothing to do.
    ``maps``: behind all other arguments, tile maps of memory at (buffer id, byte offset)."""

    function: str
    groups: int
    threads: int
    shared: int
    arguments: tuple[tuple[int, int], ...]
    checks: bool
    maps: tuple[tuple[int, int, TileMap], ...] = ()


def pack(entries: Mapping[str, Sequence[Launch]], code: Mapping[str, Any]) -> bytes:
    """``entries``: launches by symbol, one for each kernel of the entry point; ``code``: what msgpack can hold."""
    plain = {
        symbol: [
            [x.function, x.groups, x.threads, x.shared, list(x.arguments), x.checks, list(x.maps)] for x in launches
        ]
        for symbol, launches in entries.items()
    }
    return msgpack.packb({"version": VERSION, "entries": plain, "code": dict(code)})


def unpack(binary: bytes) -> tuple[dict[str, list[Launch]], dict[str, Any]]:
    """Inverse of :func:`pack`. Raises ``ArtifactError`` if it is not such a binary."""
    try:
        plain = Field(msgpack.unpackb(binary, strict_map_key=True), "binary").record(["version", "entries", "code"])
        if plain["version"].integer() != VERSION:
            raise ArtifactError(f"launch list version {plain['version'].value}, this build reads {VERSION}")
        entries = {s: [_launch(x) for x in launches.items()] for s, launches in plain["entries"].mapping().items()}
        return entries, {k: f.value for k, f in plain["code"].mapping().items()}
    except (ArtifactError, TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ArtifactError(f"binary: damaged launch list: {error}; compile the model again") from None


def _launch(x: Field) -> Launch:
    function, groups, threads, shared, arguments, checks, maps = x.row(7)
    return Launch(
        function=function.text(),
        groups=groups.integer(),
        threads=threads.integer(),
        shared=shared.integer(),
        arguments=tuple(_place(*a.row(2)) for a in arguments.items()),
        checks=checks.boolean(),
        maps=tuple((*_place(b, o), _tile_map(m)) for b, o, m in (m.row(3) for m in maps.items())),
    )


def _place(buffer: Field, offset: Field) -> tuple[int, int]:
    return buffer.integer(ARENA), offset.integer()


def _tile_map(x: Field) -> TileMap:
    sizes, strides, box, swizzle, corners, steps = x.row(6)
    return TileMap(
        sizes.integers(), strides.integers(), box.integers(), swizzle.integer(), corners.integers(), steps.integers()
    )
