"""Linking: schedules of one or more entry points become one program that shares weights, constants and state.

Entry points that need the same tensor in the same layout (the packed matrix of a prefill and of a decode step) share
one weight buffer. State is shared by its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .artifact.program import BufferSpec, CompiledProgram, EntryPoint, IOSpec, KernelCall, WeightSpec
from .artifact.serialize import stamp_layout
from .aten.ir import Location
from .graph.graph import Graph, Value
from .graph.structure import structural_key
from .schedule.kernel import Buffer, Kernel
from .schedule.schedule import Schedule
from .support.errors import CompileError
from .targets import CodegenTarget

# a scheduled entry point, and the load-time value of each weight buffer by name
Entry = tuple[Schedule, list[tuple[str, Value]]]
Locations = Mapping[str, Location]  # by IR node


def link(
    name: str,
    dtype: str,
    entries: Mapping[str, Entry],
    target: CodegenTarget,
    device: str = "",
    locations: Mapping[str, Locations] | None = None,
    initial: Mapping[str, np.ndarray] | None = None,
) -> CompiledProgram:
    """Number the buffers of all entries together, generate code for ``device``, and assemble the artifact.

    ``locations``: by entry point, where its IR nodes come from. ``initial``: by key, the contents before the first run
    of those states that no weight file has."""
    merged = _Merged(name, initial or {})
    schedules = {entry: merged.add(entry, *scheduled) for entry, scheduled in entries.items()}
    emitted = target.emit(list(schedules.values()))
    recipes, places = merged.recipes, _Places(locations or {})
    program = CompiledProgram(
        name=name,
        target=target.name,
        dtype=dtype,
        entries={entry: _entry_point(entry, s, emitted.symbols[entry], places) for entry, s in schedules.items()},
        buffers=[BufferSpec(b.id, b.kind, b.dtype, b.shape, b.name, b.offset, b.format) for b in merged.buffers],
        weights=[WeightSpec(n.attrs["key"], n.out.shape, n.out.dtype) for n in recipes.nodes if n.op == "weight"],
        recipes=recipes,
        sources=emitted.sources,
        binary=emitted.binary,
        requires=emitted.requires,
        build=emitted.build,
        device=device or target.name,
        locations=[*places.numbers],
    )
    stamp_layout(program)
    return program


class _Places:
    """Numbers the locations that kernels refer to."""

    def __init__(self, known: Mapping[str, Locations]):
        self.known, self.numbers = known, dict[Location, int]()

    def of(self, entry: str, kernel: Kernel) -> tuple[int, ...]:
        """The numbers of the places in the model's code that a kernel computes."""
        known = self.known.get(entry, {})
        found = dict.fromkeys(known[source] for source in kernel.sources if source in known)
        return tuple(self.numbers.setdefault(place, len(self.numbers)) for place in found)


def _entry_point(name: str, s: Schedule, symbol: str, places: _Places) -> EntryPoint:
    return EntryPoint(
        name=name,
        symbol=symbol,
        inputs=tuple(IOSpec(n, b.shape, b.dtype, b.id) for n, b in s.inputs),
        outputs=tuple(IOSpec(n, b.shape, b.dtype, b.id) for n, b in s.outputs),
        calls=tuple(_call(k, places.of(name, k)) for k in s.kernels),
        arena_bytes=s.arena_bytes,
        updates=tuple((b.name, b.id) for b in s.buffers if b.kind == "state"),
    )


def _call(k: Kernel, locations: tuple[int, ...]) -> KernelCall:
    inputs, outputs = (tuple(o.buffer.id for o in operands) for operands in (k.inputs, k.outputs))
    cost = k.flops, k.bytes_read, k.bytes_written
    return KernelCall(k.name, k.kind, inputs, outputs, k.text(), k.sources, *cost, locations)


class _Merged:
    """Buffers and recipes of all entries; equal load-time values are one node, by structural hashing."""

    def __init__(self, name: str, initial: Mapping[str, np.ndarray]) -> None:
        self.initial = initial
        self.buffers: list[Buffer] = []
        self.recipes = Graph(name)
        self.known: dict[Any, Buffer] = {}  # weight buffers by recipe value, state by key
        self.values: dict[Any, list[Value]] = {}
        self.names: set[str] = set()

    def add(self, entry: str, schedule: Schedule, recipes: list[tuple[str, Value]]) -> Schedule:
        """Return the schedule with its buffers numbered program-wide."""
        fill = dict(recipes)
        memo: dict[Value, Value] = {}
        new = {b.id: self._buffer(b, fill, memo) for b in schedule.buffers}

        return Schedule(
            entry,
            [k.on_buffers(lambda b: new[b.id]) for k in schedule.kernels],
            list(new.values()),
            [(n, new[b.id]) for n, b in schedule.inputs],
            [(n, new[b.id]) for n, b in schedule.outputs],
            schedule.arena_bytes,
        )

    def _buffer(self, b: Buffer, fill: dict[str, Value], memo: dict[Value, Value]) -> Buffer:
        key: Any = None
        value: Value | None = None
        if b.kind == "weight":
            key = value = self._value(fill[b.name], memo)
        elif b.kind == "state":
            key = ("state", b.name)
        found = self.known.get(key) if key is not None else None
        if found is not None:
            if (found.shape, found.dtype) != (b.shape, b.dtype):
                raise CompileError(
                    f"state {b.name!r} is {b.dtype}{list(b.shape)} in one entry point and "
                    f"{found.dtype}{list(found.shape)} in another"
                )
            return found
        made = replace(b, id=len(self.buffers), name=self._unique(b.name) if value is not None else b.name)
        self.buffers.append(made)
        if key is not None:
            self.known[key] = made
        if value is not None:
            self.recipes.outputs.append((made.name, value))
        if b.kind == "state":
            self.names.add(b.name)
            contents = self.initial.get(b.name)
            if contents is not None and np.any(contents):  # zeros need no recipe
                self.recipes.outputs.append((b.name, self.recipes.const(contents, b.dtype)))
        return made

    def _unique(self, name: str) -> str:
        base, n = name.split("#")[0], 1
        name = base
        while name in self.names:
            n += 1
            name = f"{base}#{n}"
        self.names.add(name)
        return name

    def _value(self, v: Value, memo: dict[Value, Value]) -> Value:
        """Return the equal value in the merged recipes."""

        stack = [v]
        while stack:
            x = stack[-1]
            if x in memo:
                stack.pop()
                continue
            missing = [i for i in x.node.inputs if i not in memo]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            inputs = [memo[i] for i in x.node.inputs]
            key = structural_key(x.node, inputs)
            outs = self.values.get(key)
            if outs is None:
                self.recipes.sources = x.node.sources
                node = self.recipes.add(x.op, inputs, [(o.shape, o.dtype) for o in x.node.outputs], **x.node.attrs)
                outs = self.values[key] = node.outputs
            for mine, theirs in zip(x.node.outputs, outs, strict=True):
                memo[mine] = theirs
        return memo[v]
