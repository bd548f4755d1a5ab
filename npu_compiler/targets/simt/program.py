"""What a GPU program's ``binary`` holds: the launches of every entry point, and the target's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from ...errors import ArtifactError

VERSION = 2
ARENA = -1


class TileMap(NamedTuple):
    """How the copy engine cuts tiles out of an operand of two-byte elements, innermost dim first. ``strides``: bytes,
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
    """A call of ``function`` on ``groups`` groups of ``threads``, with ``shared`` bytes of group memory beyond what it
    declares. ``arguments``: (buffer id, byte offset) in order; what lies in the arena has id :data:`ARENA`. ``checks``:
    a last argument is the address of an int that is set when an index is out of range. ``groups`` 0: nothing to do.
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
        plain = msgpack.unpackb(binary)
        if plain["version"] != VERSION:
            raise ArtifactError(f"binary: launch list version {plain['version']}, this build reads {VERSION}")
        entries = {str(s): [_launch(x) for x in launches] for s, launches in plain["entries"].items()}
        return entries, dict(plain["code"])
    except (TypeError, ValueError, KeyError, msgpack.UnpackException) as error:
        raise ArtifactError(f"binary: damaged launch list: {error!r}; compile the model again") from None


def _tile_map(sizes: Any, strides: Any, box: Any, swizzle: Any, corners: Any, steps: Any) -> TileMap:
    return TileMap(tuple(sizes), tuple(strides), tuple(box), int(swizzle), tuple(corners), tuple(steps))


def _launch(x: Any) -> Launch:
    function, groups, threads, shared, arguments, checks, plain = x
    maps = tuple((b, o, _tile_map(*m)) for b, o, m in plain)
    numbers = [groups, threads, shared, *(n for a in arguments for n in a), *(n for m in maps for n in m[:2])]
    if not isinstance(function, str) or not all(isinstance(n, int) for n in numbers) or min(numbers) < ARENA:
        raise ValueError(f"launch {function!r}")
    return Launch(function, groups, threads, shared, tuple((b, o) for b, o in arguments), bool(checks), maps)
