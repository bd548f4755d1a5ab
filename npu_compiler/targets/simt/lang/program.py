"""The contents of a GPU program's ``binary``: the launches of every entry point, and the target's own code."""

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
    """A tensor map: the tiles in which TMA accesses an operand of two-byte elements. All fields are innermost dim
    first.

    ``sizes``: of the operand, in elements. ``strides``: in bytes, of all dims but the first. ``box``: a tile's size
    along each dim. ``swizzle``: bytes of a tile's row that are permuted together (64, 128), or 0. With ``corners``, the
    map is in im2col mode: a tile is ``box[1]`` pixels of an image [C, W, H, N] in row-major order, ``steps`` apart
    along W and H, in the window from corners[:2] (W, H) to corners[2:], relative to the image's end.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    corners: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A launch of ``function`` with ``workgroups`` of ``threads`` threads; 0: nothing to launch.

    ``shared``: bytes of shared memory in addition to those that the function declares. ``arguments``: (buffer id, byte
    offset) in order; the arena has id :data:`ARENA`. ``checks``: the next argument is the address of two ints, of
    which the first is set to 1 if an index is out of range, the second if an integer is divided by zero. ``maps``: the
    last arguments, tensor maps of the memory at (buffer id, byte offset).
    """

    function: str
    workgroups: int
    threads: int
    shared: int
    arguments: tuple[tuple[int, int], ...]
    checks: bool
    maps: tuple[tuple[int, int, TileMap], ...] = ()


def pack(entries: Mapping[str, Sequence[Launch]], code: Mapping[str, Any]) -> bytes:
    """Return the binary. ``entries``: symbol -> launches, one for each kernel of the entry point. ``code``: the
    target's code, as a dict that msgpack can encode."""
    plain = {
        symbol: [
            [x.function, x.workgroups, x.threads, x.shared, list(x.arguments), x.checks, list(x.maps)] for x in launches
        ]
        for symbol, launches in entries.items()
    }
    return msgpack.packb({"version": VERSION, "entries": plain, "code": dict(code)})


def unpack(binary: bytes) -> tuple[dict[str, list[Launch]], dict[str, Any]]:
    """Return (entries, code) of a binary: the inverse of :func:`pack`. Raises ``ArtifactError`` if it is damaged."""
    try:
        plain = Field(msgpack.unpackb(binary, strict_map_key=True), "binary").record(["version", "entries", "code"])
        if plain["version"].integer() != VERSION:
            raise ArtifactError(f"launch list version {plain['version'].value}, this build reads {VERSION}")
        entries = {s: [_launch(x) for x in launches.items()] for s, launches in plain["entries"].mapping().items()}
        return entries, {k: f.value for k, f in plain["code"].mapping().items()}
    except (ArtifactError, TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ArtifactError(f"binary: damaged launch list: {error}; compile the model again") from None


def _launch(x: Field) -> Launch:
    function, workgroups, threads, shared, arguments, checks, maps = x.row(7)
    return Launch(
        function=function.text(),
        workgroups=workgroups.integer(),
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
