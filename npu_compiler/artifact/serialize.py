"""A program in a ``.npubin`` file: a msgpack map of its fields, in the container of ``container.py``.

Nothing is used before all of it has been checked: the header, then the type and range of every field (errors carry its
path, as in ``entries[0].calls[3].flops``), then how the fields fit together (:mod:`npu_compiler.artifact.validate`).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

import numpy as np

from ..aten.ir import Location
from ..graph import expr, verify
from ..graph.graph import Graph, Value
from ..support import dtypes
from ..support.errors import ArtifactError
from ..support.records import MAX_INT, Field
from . import container
from .spec import LAYOUT_MARKER, SOURCE_NAME, BufferSpec, EntryPoint, IOSpec, KernelCall, ProgramSpec, WeightSpec
from .validate import validate

TARGET_NAME = "[a-z][a-z0-9_]*"
DEVICE_NAME = "(?:[a-z][a-z0-9_]*(?::[A-Za-z0-9_.-]+)?)?"
_MAX_BUILD_DEPTH = 8

P = TypeVar("P", bound=ProgramSpec)


# -- files ------------------------------------------------------------------------------------------------------------
def save(program: ProgramSpec, path: str | os.PathLike[str]) -> None:
    """Write ``program`` to ``path``, atomically: a failure leaves the old file. Raises ``ArtifactError``."""
    container.write(path, dumps(program))


def load(path: str | os.PathLike[str], kind: type[P]) -> P:
    """Read and validate a program of class ``kind``. Raises ``ArtifactError`` with the file's name and the offset or
    field that is wrong."""
    return container.read(path, lambda data: loads(data, kind))


def dumps(program: ProgramSpec) -> bytes:
    """Return the bytes of the file. Raises ``ArtifactError`` for a program that would not load again."""
    validate(program)
    return container.pack(container.PROGRAM, program_to_plain(program))


def loads(data: bytes, kind: type[P]) -> P:
    """Return the program, of class ``kind``, in the bytes of a file. Raises ``ArtifactError``."""
    return parse(container.unpack(data, container.PROGRAM)[1], kind)


def parse(plain: Any, kind: type[P]) -> P:
    """Return the program, of class ``kind``, in the body of a file. Raises ``ArtifactError``."""
    program = program_from_plain(plain, kind)
    validate(program)
    return program


def layout_digest(program: ProgramSpec) -> str:
    """Return a digest (64 hex digits) of all that the native code assumes: symbols, operands, buffers, memory sizes."""
    buffers = [(b.id, b.kind, b.dtype, tuple(b.shape), b.offset, b.format) for b in program.buffers]
    entries = [
        (e.symbol, [i.buffer for i in e.inputs], [o.buffer for o in e.outputs], [b for _, b in e.updates],
         [(tuple(c.inputs), tuple(c.outputs)) for c in e.calls], e.arena_bytes)
        for e in program.entries.values()
    ]  # fmt: skip
    return hashlib.sha256(repr((buffers, entries)).encode()).hexdigest()


def stamp_layout(program: ProgramSpec) -> None:
    """Write :func:`layout_digest` into the binary, in place of the marker, if it has one.

    The runtime refuses a stamped binary whose program has another layout. Binaries for a Mac are not stamped, because
    any change would void their signature.
    """
    if program.binary.startswith(b"\x7fELF"):
        program.binary = program.binary.replace(LAYOUT_MARKER.encode(), layout_digest(program).encode(), 1)


# -- writing ----------------------------------------------------------------------------------------------------------
def program_to_plain(program: ProgramSpec) -> dict[str, Any]:
    """Return the program as dicts, lists, text, numbers and bytes."""
    plain: dict[str, Any] = _plain(program)
    plain["entries"] = [_plain(e) for e in program.entries.values()]
    plain["recipes"] = graph_to_plain(program.recipes)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, IOSpec | BufferSpec | KernelCall | EntryPoint | WeightSpec | ProgramSpec | Location):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in ("entries", "recipes")}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def graph_to_plain(g: Graph) -> dict[str, Any]:
    """Return a graph as plain data; nodes refer to each other by position."""
    place = {v: [i, v.index] for i, node in enumerate(g.nodes) for v in node.outputs}
    nodes = [
        {
            "op": node.op,
            "inputs": [place[v] for v in node.inputs],
            "outputs": [[list(v.shape), v.dtype] for v in node.outputs],
            "attrs": {k: _ATTR_KINDS[kind][0](node.attrs[k]) for k, kind in verify.ATTRS[node.op].items()},
            "sources": list(node.sources),
        }
        for node in g.nodes
    ]
    return {
        "name": g.name,
        "nodes": nodes,
        "outputs": [[name, *place[v]] for name, v in g.outputs],
        "updates": [[key, *place[v]] for key, v in g.updates],
    }


def _array_to_plain(arr: np.ndarray) -> dict[str, Any]:
    return {"dtype": dtypes.name_of(arr.dtype), "shape": list(arr.shape), "data": arr.tobytes()}


# -- reading ----------------------------------------------------------------------------------------------------------
@cache
def _names(record: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(f.name for f in fields(record))


def _tensor(dtype: Field, shape: Field) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a tensor that can exist."""
    dims, name = shape.integers(0), dtype.dtype()
    try:
        verify.check_type(dims, name)
    except ValueError as error:
        raise ArtifactError(f"{shape.path}: {error}") from None
    return dims, name


def program_from_plain(plain: Any, kind: type[P]) -> P:
    """Return the program, of class ``kind``, that :func:`program_to_plain` made ``plain`` of. The type and range of
    every field are checked, but not how fields fit together. Raises ``ArtifactError`` with the path of the field."""
    f = Field(plain).record(_names(ProgramSpec))
    entries: dict[str, EntryPoint] = {}
    for at, row in enumerate(f["entries"].items()):
        entry = _entry(row)
        if entries.setdefault(entry.name, entry) is not entry:
            raise ArtifactError(f"entries[{at}].name: there are two entry points {entry.name!r}")
    return kind(
        name=f["name"].text(),
        target=f["target"].text(32, TARGET_NAME),
        dtype=f["dtype"].dtype(),
        entries=entries,
        buffers=[_buffer(b) for b in f["buffers"].items()],
        weights=[_weight(w) for w in f["weights"].items()],
        recipes=graph_from_plain(f["recipes"]),
        sources=_sources(f["sources"]),
        binary=f["binary"].blob(),
        requires=f["requires"].texts(),
        build=free_map(f["build"]),
        device=f["device"].text(96, DEVICE_NAME),
        locations=[_location(x) for x in f["locations"].items()],
    )


def _sources(f: Field) -> dict[str, str]:
    found = f.mapping()
    for name in found:
        if not SOURCE_NAME.fullmatch(name):
            Field(name, f.path).fail(f"names of sources like {SOURCE_NAME.pattern}")
    return {name: text.text(2**31) for name, text in found.items()}


def free_map(f: Field) -> dict[str, Any]:
    """Return the field ``build``: any plain values, because the runtime does not read them."""
    return {k: _free(v, _MAX_BUILD_DEPTH) for k, v in f.mapping().items()}


def _free(f: Field, depth: int) -> Any:
    """A value of any plain type: the runtime does not read ``build``."""
    if isinstance(f.value, dict | list) and depth == 0:
        f.fail("less nesting")
    if isinstance(f.value, dict):
        return {k: _free(v, depth - 1) for k, v in f.mapping().items()}
    if isinstance(f.value, list):
        return [_free(v, depth - 1) for v in f.items()]
    if f.value is not None and not isinstance(f.value, str | int | float | bool):
        f.fail("a text, number, list or map")
    return f.value


def _entry(f: Field) -> EntryPoint:
    r = f.record(_names(EntryPoint))
    return EntryPoint(
        name=r["name"].text(pattern=r"[^\x00-\x1f]+"),
        symbol=r["symbol"].text(),
        inputs=tuple(_io(i) for i in r["inputs"].items()),
        outputs=tuple(_io(o) for o in r["outputs"].items()),
        calls=tuple(_call(c) for c in r["calls"].items()),
        arena_bytes=r["arena_bytes"].integer(high=verify.MAX_BYTES),
        updates=tuple((key.text(), buffer.integer()) for key, buffer in (u.row(2) for u in r["updates"].items())),
    )


def _io(f: Field) -> IOSpec:
    r = f.record(_names(IOSpec))
    shape, dtype = _tensor(r["dtype"], r["shape"])
    return IOSpec(r["name"].text(), shape, dtype, r["buffer"].integer())


def _buffer(f: Field) -> BufferSpec:
    r = f.record(_names(BufferSpec))
    shape, dtype = _tensor(r["dtype"], r["shape"])
    offset = r["offset"].integer(high=verify.MAX_BYTES)
    format = r["format"].text()
    return BufferSpec(r["id"].integer(), r["kind"].text(), dtype, shape, r["name"].text(), offset, format)


def _weight(f: Field) -> WeightSpec:
    r = f.record(_names(WeightSpec))
    return WeightSpec(r["key"].text(), *_tensor(r["dtype"], r["shape"]))


def _call(f: Field) -> KernelCall:
    r = f.record(_names(KernelCall))
    return KernelCall(
        name=r["name"].text(),
        kind=r["kind"].text(),
        inputs=tuple(i.integer() for i in r["inputs"].items()),
        outputs=tuple(o.integer() for o in r["outputs"].items()),
        text=r["text"].text(2**24),
        sources=r["sources"].texts(),
        flops=r["flops"].integer(),
        bytes_read=r["bytes_read"].integer(),
        bytes_written=r["bytes_written"].integer(),
        locations=r["locations"].integers(0),
    )


def _location(f: Field) -> Location:
    names = _names(Location)
    r = f.record(names)
    return Location(*(r[name].text() for name in names))


def graph_from_plain(f: Field) -> Graph:
    """Return the graph that :func:`graph_to_plain` made ``f`` of. It passes ``verify.check_graph``.

    Raises ``ArtifactError`` with the path of the field that is wrong.
    """
    r = f.record(["name", "nodes", "outputs", "updates"])
    g = Graph(r["name"].text())
    for row in r["nodes"].items():
        n = row.record(["op", "inputs", "outputs", "attrs", "sources"])
        op = n["op"].text()
        if op not in verify.ATTRS:
            n["op"].fail(f"one of {', '.join(verify.ATTRS)}")
        attrs = n["attrs"].record(list(verify.ATTRS[op]))
        inputs = [_value(g, *i.row(2)) for i in n["inputs"].items()]
        outputs = [_tensor(dtype, shape) for shape, dtype in (o.row(2) for o in n["outputs"].items())]
        g.sources = n["sources"].texts()
        decoded = {k: _ATTR_KINDS[kind][1](attrs[k]) for k, kind in verify.ATTRS[op].items()}
        node = g.add(op, inputs, outputs)
        node.attrs.update(decoded)
        try:
            verify.check_node(node)
        except ValueError as error:
            raise ArtifactError(f"{row.path}: {op}: {error}") from None
    g.sources = ()
    g.outputs = [(name.text(), _value(g, *at)) for name, *at in (o.row(3) for o in r["outputs"].items())]
    g.updates = [(key.text(), _value(g, *at)) for key, *at in (u.row(3) for u in r["updates"].items())]
    return g


def _value(g: Graph, node: Field, index: Field) -> Value:
    made = g.nodes[node.integer()] if node.integer() < len(g.nodes) else node.fail("an earlier node")
    return made.outputs[index.integer()] if index.integer() < len(made.outputs) else index.fail("one of its outputs")


def _expr_from_plain(f: Field) -> expr.Expr:
    try:
        return expr.from_list(f.value)
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{f.path}: {error}") from None


def _array_from_plain(f: Field) -> np.ndarray:
    r = f.record(["dtype", "shape", "data"])
    shape, dtype = _tensor(r["dtype"], r["shape"])
    data = r["data"].blob()
    size = math.prod(shape) * dtypes.DTYPES[dtype].size
    if len(data) != size:
        r["data"].fail(f"{size} bytes for {dtype}{list(shape)} (has {len(data)})")
    if dtype == "bool" and data.strip(b"\0\1"):
        r["data"].fail("bytes 0 and 1")
    return np.frombuffer(data, dtypes.numpy_dtype(dtype)).reshape(shape)


# kind of an attribute (verify.ATTRS) -> to plain, from plain
_ATTR_KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Field], Any]]] = {
    "text": (str, Field.text),
    "int": (int, lambda f: f.integer(-MAX_INT)),
    "ints": (lambda v: [int(n) for n in v], lambda f: f.integers()),
    "float": (float, Field.number),
    "bool": (bool, Field.boolean),
    "expr": (expr.to_list, _expr_from_plain),
    "exprs": (lambda v: [expr.to_list(e) for e in v], lambda f: tuple(_expr_from_plain(e) for e in f.items())),
    "array": (_array_to_plain, _array_from_plain),
}
