"""Checks that the parts of a program fit together, as the runtime and the native code assume.

``serialize.py`` has checked the type of every field. Here ids are matched with buffers, buffers with the arena, and
weights with recipes. The checks run before a program is written and after one is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..graph import interp, verify
from ..graph.graph import LEAVES
from ..support import dtypes
from ..support.buffer_kinds import KINDS, READ_ONLY, SHARED
from ..support.errors import ArtifactError
from ..weights.format import find_layout
from .spec import SYMBOL, BufferSpec, EntryPoint, IOSpec, ProgramSpec

_MAX_ID = 1_000_000
# A recipe may make far more bytes than it reads (an expanded constant), within a bound: this factor, and this floor.
_RECIPE_GROWTH, _RECIPE_FLOOR = 64, 2**24
# Bounds of all recipes together, per byte of weights and constants and as a floor: the bytes they make if nothing is
# freed, and their operations (``interp.cost``). Convolutional nets take up to 15 bytes and 13 operations.
_TOTAL_GROWTH, _TOTAL_FLOOR = 64, 2**28
_OPERATIONS, _OPERATIONS_FLOOR = 256, 2**31


def nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtypes.DTYPES[dtype].size


def validate(program: ProgramSpec) -> None:
    """Raise ``ArtifactError`` with the path of the first field that does not fit."""
    buffers = _check_buffers(program)
    _check_recipes(program)
    _require(program.entries, "entries", "there is no entry point")
    _require(program.binary or program.sources, "binary", "there is neither a binary nor a source to build it from")
    states = {b.name: b for b in buffers.values() if b.kind == "state"}
    for at, (name, entry) in enumerate(program.entries.items()):
        _require(name == entry.name, f"entries[{at}].name", f"{entry.name!r} is listed as {name!r}")
        _check_entry(entry, buffers, states, f"entries[{at}]")
        for number, call in enumerate(entry.calls):
            known = all(0 <= n < len(program.locations) for n in call.locations)
            _require(known, f"entries[{at}].calls[{number}].locations", f"there are {len(program.locations)} locations")


def _require(condition: object, path: str, message: str) -> None:
    if not condition:
        raise ArtifactError(f"{path}: {message}")


def _check_buffers(program: ProgramSpec) -> dict[int, BufferSpec]:
    found: dict[int, BufferSpec] = {}
    states: set[str] = set()
    for at, b in enumerate(program.buffers):
        path = f"buffers[{at}]"
        _require(0 <= b.id < _MAX_ID and b.id not in found, f"{path}.id", f"{b.id} is used twice or out of range")
        _require(b.kind in KINDS, f"{path}.kind", f"{b.kind!r} is not one of {', '.join(KINDS)}")
        _check_type(b.shape, b.dtype, f"{path}.shape")
        _require(dtypes.DTYPES[b.dtype].kind != "complex", f"{path}.dtype", f"{b.dtype} cannot be computed with")
        aligned = b.offset >= 0 and b.offset % dtypes.DTYPES[b.dtype].size == 0
        placed = aligned and (b.kind == "arena" or b.offset == 0)
        _require(placed, f"{path}.offset", f"{b.offset} is not a place for {b.dtype} in {b.kind}")
        if b.format:
            _check_format(b, path)
        if b.kind == "state":
            _require(b.name not in states, f"{path}.name", f"there are two states {b.name!r}")
            states.add(b.name)
        found[b.id] = b
    return found


def _check_format(b: BufferSpec, path: str) -> None:
    try:
        find_layout(b.format)
    except ValueError as error:
        raise ArtifactError(f"{path}.format: {error}") from None
    packed = b.kind == "weight" and b.dtype == "uint8" and b.shape
    _require(packed, f"{path}.format", f"{b.dtype}{list(b.shape)} of kind {b.kind} is not in a weight format")


def _check_type(shape: Sequence[int], dtype: str, path: str) -> None:
    try:
        verify.check_type(shape, dtype)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None


# -- recipes ----------------------------------------------------------------------------------------------------------
def _check_recipes(program: ProgramSpec) -> None:
    try:
        verify.check_graph(program.recipes)
    except ValueError as error:
        raise ArtifactError(f"recipes: {error}") from None
    weights: dict[str, tuple[tuple[int, ...], str]] = {}
    for at, w in enumerate(program.weights):
        _require(w.key not in weights, f"weights[{at}].key", f"{w.key!r} is listed twice")
        _check_type(w.shape, w.dtype, f"weights[{at}].shape")
        weights[w.key] = (tuple(w.shape), w.dtype)
    given = sum(
        [nbytes(w.shape, w.dtype) for w in program.weights]
        + [nbytes(n.out.shape, n.out.dtype) for n in program.recipes.nodes if n.op == "const"]
    )
    limit = _RECIPE_FLOOR + _RECIPE_GROWTH * given
    held, operations = _TOTAL_FLOOR + _TOTAL_GROWTH * given, _OPERATIONS_FLOOR + _OPERATIONS * given
    for at, node in enumerate(program.recipes.nodes):
        path = f"recipes.nodes[{at}]"
        _require(node.op not in ("input", "state"), path, f"a recipe cannot read an {node.op}")
        if node.op == "weight":
            fits = weights.get(node.attrs["key"]) == (node.out.shape, node.out.dtype)
            _require(fits, f"{path}.attrs.key", f"{node.attrs['key']!r} of {node.out!r} is not in weights like this")
        sizes = [nbytes(v.shape, v.dtype) for v in node.outputs]
        if node.op == "reduce":
            sizes.append(nbytes(node.attrs["domain"], node.attrs["expr"].dtype))
        _require(max(sizes) <= limit, path, f"it makes {max(sizes)} bytes out of weights that allow {limit}")
        if node.op not in LEAVES:
            cost = interp.cost(node)
            held, operations = held - cost.bytes, operations - cost.operations
        _require(held >= 0, path, f"the recipes up to here take {-held} bytes more than their weights allow")
        _require(operations >= 0, path, f"the recipes up to here take {-operations} operations more than weights allow")
    _require(not program.recipes.updates, "recipes.updates", "recipes must not update state")
    made = {name: v for name, v in program.recipes.outputs}
    _require(len(made) == len(program.recipes.outputs), "recipes.outputs", "two outputs have one name")
    for at, b in enumerate(program.buffers):
        if b.constant or (b.kind == "state" and b.name in made):
            path = f"buffers[{at}]"
            _require(b.name in made, f"{path}.name", f"no recipe makes {b.name!r}")
            v = made[b.name]
            _require(b.constant or v.op == "const", f"{path}.name", f"the contents of a state are not constant: {v!r}")
            _require((v.shape, v.dtype) == (tuple(b.shape), b.dtype), f"{path}.shape", f"its recipe makes {v!r}")


# -- entry points -----------------------------------------------------------------------------------------------------
def _check_entry(entry: EntryPoint, buffers: dict[int, BufferSpec], states: dict[str, BufferSpec], path: str) -> None:
    _require(SYMBOL.fullmatch(entry.symbol), f"{path}.symbol", f"{entry.symbol!r} is not like {SYMBOL.pattern}")
    size = entry.arena_bytes
    _require(0 <= size <= verify.MAX_BYTES, f"{path}.arena_bytes", f"{size} is out of range")
    _check_io(entry.inputs, buffers, f"{path}.inputs")
    _check_io(entry.outputs, buffers, f"{path}.outputs")
    ids = Counter(i.buffer for i in entry.inputs)
    for at, i in enumerate(entry.inputs):
        own = buffers[i.buffer].kind == "input" and ids[i.buffer] == 1
        _require(own, f"{path}.inputs[{at}].buffer", f"{i.buffer} is not an input of its own")
    written = _check_calls(entry, buffers, path)
    for at, o in enumerate(entry.outputs):
        spec = buffers[o.buffer]
        ready = o.buffer in written or o.buffer in ids or spec.kind in SHARED
        ready = ready or not nbytes(o.shape, o.dtype)
        _require(ready, f"{path}.outputs[{at}].buffer", f"nothing writes buffer {o.buffer}")
    _check_updates(entry, buffers, states, written | set(ids), path)


def _check_io(specs: Sequence[IOSpec], buffers: dict[int, BufferSpec], path: str) -> None:
    names = Counter(s.name for s in specs)
    for at, s in enumerate(specs):
        _require(names[s.name] == 1, f"{path}[{at}].name", f"{s.name!r} is listed twice")
        _require(s.buffer in buffers, f"{path}[{at}].buffer", f"there is no buffer {s.buffer}")
        b = buffers[s.buffer]
        same = s.dtype == b.dtype and math.prod(s.shape) == math.prod(b.shape)
        held = f"{b.dtype}{list(b.shape)}"
        _require(same, f"{path}[{at}].shape", f"{s.dtype}{list(s.shape)} is not what buffer {b.id} holds ({held})")


def _check_calls(entry: EntryPoint, buffers: dict[int, BufferSpec], path: str) -> set[int]:
    """Check that each buffer is written before it is read. Return the buffers that the kernels write."""
    written: set[int] = set()
    own_inputs = {i.buffer for i in entry.inputs}
    for at, call in enumerate(entry.calls):
        for n, id in enumerate([*call.inputs, *call.outputs]):
            output = n >= len(call.inputs)
            where = f"{path}.calls[{at}].{'outputs' if output else 'inputs'}[{n - output * len(call.inputs)}]"
            _require(id in buffers, where, f"there is no buffer {id}")
            b = buffers[id]
            end = b.offset + nbytes(b.shape, b.dtype)
            inside = b.kind != "arena" or end <= entry.arena_bytes
            _require(inside, where, f"buffer {id} ends at byte {end} of an arena of {entry.arena_bytes}")
            _require(b.kind != "input" or id in own_inputs, where, f"buffer {id} is the input of another entry point")
            if output:
                _require(b.kind not in READ_ONLY, where, f"buffer {id} ({b.kind}) is read only")
            elif b.kind in ("arena", "output"):
                known = id in written or end == b.offset
                _require(known, where, f"buffer {id} is read before it is written")
        written.update(call.outputs)
        for field in ("flops", "bytes_read", "bytes_written"):
            _require(getattr(call, field) >= 0, f"{path}.calls[{at}].{field}", "it is negative")
    return written


def _check_updates(
    entry: EntryPoint, buffers: dict[int, BufferSpec], states: dict[str, BufferSpec], ready: set[int], path: str
) -> None:
    seen: set[str] = set()
    for at, (key, id) in enumerate(entry.updates):
        where = f"{path}.updates[{at}]"
        _require(key in states and key not in seen, where, f"{key!r} is not a state, or is updated twice")
        _require(id in buffers, where, f"there is no buffer {id}")
        seen.add(key)
        a, b = states[key], buffers[id]
        same = a.dtype == b.dtype and math.prod(a.shape) == math.prod(b.shape)
        types = f"{b.dtype}{list(b.shape)} to {a.dtype}{list(a.shape)}"
        _require(same, where, f"buffer {id} cannot become state {key!r}: {types}")
        known = id in ready or b.kind in SHARED or not nbytes(b.shape, b.dtype)
        _require(known, where, f"nothing writes buffer {id}")
