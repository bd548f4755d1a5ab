"""What a GPU program's ``binary`` holds: the launches of every entry point, and the target's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ...errors import ArtifactError

VERSION = 1
ARENA = -1


@dataclass(frozen=True)
class Launch:
    """A call of ``function`` on ``groups`` groups of ``threads``, with ``shared`` bytes of group memory beyond what it
    declares. ``arguments``: (buffer id, byte offset) in order; what lies in the arena has id :data:`ARENA`. ``checks``:
    a last argument is the address of an int that is set when an index is out of range. ``groups`` 0: nothing to do."""

    function: str
    groups: int
    threads: int
    shared: int
    arguments: tuple[tuple[int, int], ...]
    checks: bool


def pack(entries: Mapping[str, Sequence[Launch]], code: Mapping[str, Any]) -> bytes:
    """``entries``: launches by symbol, one for each kernel of the entry point; ``code``: what msgpack can hold."""
    plain = {
        symbol: [[x.function, x.groups, x.threads, x.shared, list(x.arguments), x.checks] for x in launches]
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


def _launch(x: Any) -> Launch:
    function, groups, threads, shared, arguments, checks = x
    numbers = [groups, threads, shared, *(n for a in arguments for n in a)]
    if not isinstance(function, str) or not all(isinstance(n, int) for n in numbers) or min(numbers) < ARENA:
        raise ValueError(f"launch {function!r}")
    return Launch(function, groups, threads, shared, tuple((b, o) for b, o in arguments), bool(checks))
