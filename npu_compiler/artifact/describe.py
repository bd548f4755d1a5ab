"""Descriptions of a compiled program: :func:`describe` returns text, :func:`to_json` data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Value
from ..graph.scalar_ops import SCALAR_OPS
from ..support import buffer_kinds, dtypes
from ..support.text import json_safe, printable, si, table, tensor_text
from .serialize import program_to_plain
from .spec import ABI_VERSION, BufferSpec, EntryPoint, ProgramSpec
from .validate import nbytes

_CHART_COLUMNS = 64
_CHART_ROWS = 48
_WORDS = 240  # characters of one recipe; the middle of a longer one is cut


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2]} … {text[-(width // 2) + 3 :]}"


# -- recipes in words -----------------------------------------------------------------------------------------------
Words = tuple[str, int]  # a formula and the precedence of its outermost operator
_PRECEDENCE = {"add": 1, "sub": 1, "mul": 2, "div": 2}
_ATOM = 3


def recipe_words(recipes: Graph) -> dict[str, str]:
    """Return by buffer name the formula over state_dict keys that fills each weight buffer.

    Reshapes and expands are not shown: they move no element relative to the others.
    """
    words: dict[Value, Words] = {}
    for node in recipes.nodes:
        args = [words[v] for v in node.inputs]
        for v in node.outputs:
            text, level = _node_words(v, args)
            words[v] = _clip(text, _WORDS), level
    return {name: words[v][0] for name, v in recipes.outputs}


def _node_words(v: Value, args: list[Words]) -> Words:
    op, attrs = v.node.op, v.node.attrs
    if op == "weight":
        return str(attrs["key"]), _ATOM
    if op == "const":
        return (repr(attrs["data"].item()) if v.numel == 1 else f"const {tensor_text(v.shape, v.dtype)}"), _ATOM
    if op in ("reshape", "expand"):
        return args[0]
    if op == "pointwise":
        return _expr_words(attrs["expr"], args)
    if op == "reduce":
        return f"{attrs['kind']}({_expr_words(attrs['expr'], args)[0]}, axes={list(attrs['axes'])})", _ATOM
    details: list[str] = []
    if op == "permute":
        details = [str(list(attrs["perm"]))]
    elif op == "slice":
        bounds = zip(attrs["starts"], attrs["steps"], attrs["shape"], strict=True)
        details = [f"[{', '.join(_range(*b) for b in bounds)}]"]
    elif op == "concat":
        details = [f"axis={attrs['axis']}"]
    elif op in ("quantize", "dequantize"):
        details = [str(attrs["format"])]
    elif op == "pack":
        details = [f"{attrs['layout']} of {attrs['panel']}" if attrs["panel"] > 1 else str(attrs["layout"])]
    return f"{op}{f'.{v.index}' if v.index else ''}({', '.join([*(text for text, _ in args), *details])})", _ATOM


def _range(start: int, step: int, count: int) -> str:
    return f"{start}:{start + count * step}" + (f":{step}" if step != 1 else "")


def _expr_words(e: Expr, args: list[Words]) -> Words:
    words: dict[Expr, Words] = {}
    for x in expr.walk(e):
        text, level = _scalar_words(x, [words[a] for a in x.args], args)
        words[x] = _clip(text, _WORDS), level
    return words[e]


def _scalar_words(x: Expr, operands: list[Words], args: list[Words]) -> Words:
    if x.op == "const":
        return repr(x.value), _ATOM
    if x.op == "index":
        return f"i{x.value}", _ATOM
    if x.op == "load" and all(i.op in ("index", "const") for i in x.args):
        return args[int(x.value)]
    texts = [text for text, _ in operands]
    if x.op == "load":
        text, level = args[int(x.value)]
        return f"{text if level == _ATOM else f'({text})'}[{', '.join(texts)}]", _ATOM
    if x.op == "cast":
        return f"{x.dtype}({texts[0]})", _ATOM
    infix = SCALAR_OPS[x.op].infix
    if not infix:
        return f"{x.op}({', '.join(texts)})", _ATOM
    level = _PRECEDENCE.get(x.op, 0)
    left = texts[0] if operands[0][1] >= max(level, 1) else f"({texts[0]})"
    right = texts[1] if operands[1][1] > level else f"({texts[1]})"
    return f"{left} {infix} {right}", level


# -- memory ---------------------------------------------------------------------------------------------------------
Buffers = Mapping[int, BufferSpec]  # by id


def lifetimes(buffers: Buffers, entry: EntryPoint) -> list[tuple[BufferSpec, int, int]]:
    """Return (arena buffer, first call, last call) of an entry, by offset.

    Outputs and updates live until after the last call.
    """
    span: dict[int, list[int]] = {}
    for at, call in enumerate(entry.calls):
        for id in (*call.inputs, *call.outputs):
            if buffers[id].kind == "arena":
                span.setdefault(id, [at, at])[1] = at
    for id in [o.buffer for o in entry.outputs] + [id for _, id in entry.updates]:
        if id in span:
            span[id][1] = len(entry.calls)
    return sorted(((buffers[id], a, b) for id, (a, b) in span.items()), key=lambda row: (row[0].offset, row[1]))


def _memory_chart(buffers: Buffers, entry: EntryPoint) -> list[str]:
    rows = lifetimes(buffers, entry)
    if not rows:
        return ["  no buffer needs the arena"]
    shown = sorted(rows, key=lambda r: -nbytes(r[0].shape, r[0].dtype))[:_CHART_ROWS]
    scale = max(1, math.ceil((len(entry.calls) + 1) / _CHART_COLUMNS))
    columns = math.ceil((len(entry.calls) + 1) / scale)
    lines = []
    for b, first, last in (r for r in rows if r in shown):
        bar = "".join("█" if first // scale <= c <= last // scale else "·" for c in range(columns))
        lines.append((b.offset, nbytes(b.shape, b.dtype), b.id, bar, _clip(b.name, 40)))
    note = f"one column is {scale} kernels" if scale > 1 else "one column is one kernel"
    left_out = f"; the {len(rows) - len(shown)} smallest are left out" if len(rows) > len(shown) else ""
    return [f"  ({note}{left_out})", *table(("offset", "bytes", "buffer", "alive", "name"), lines)]


# -- the text -------------------------------------------------------------------------------------------------------
def totals(*programs: ProgramSpec) -> dict[str, int]:
    """Return totals by name: FLOPs and bytes of the kernels of all entries, weights, state and binary, and the bytes of
    the largest arena of each program."""
    calls = [c for p in programs for e in p.entries.values() for c in e.calls]
    return {
        "kernels": len(calls),
        "flops": sum(c.flops for c in calls),
        "bytes_read": sum(c.bytes_read for c in calls),
        "bytes_written": sum(c.bytes_written for c in calls),
        "arena_bytes": sum(max((e.arena_bytes for e in p.entries.values()), default=0) for p in programs),
        "weight_bytes": sum(_bytes_of(p, buffer_kinds.CONSTANT) for p in programs),
        "state_bytes": sum(_bytes_of(p, ("state",)) for p in programs),
        "binary_bytes": sum(len(p.binary) for p in programs),
    }


def _bytes_of(program: ProgramSpec, kinds: tuple[str, ...]) -> int:
    return sum(nbytes(b.shape, b.dtype) for b in program.buffers if b.kind in kinds)


def bytes_by_format(program: ProgramSpec) -> dict[str, int]:
    """Return the bytes of the weights in each weight format, and in each dtype of those in no format; largest first."""
    found: Counter[str] = Counter()
    for b in program.buffers:
        if b.constant:
            found[b.format.partition(".")[0] or b.dtype] += nbytes(b.shape, b.dtype)
    return dict(found.most_common())


def describe(program: ProgramSpec) -> str:
    """Return the whole program as text."""
    t = totals(program)
    lines = [
        f"program {program.name}: compiled for {program.device or program.target}, compute dtype {program.dtype}, "
        f"ABI {ABI_VERSION}",
        f"  requires: {' '.join(program.requires) or 'nothing special'}",
        *(f"  {key}: {_clip(str(value), 160)}" for key, value in program.build.items()),
        f"  binary: {si(t['binary_bytes'], 'B')}; sources: "
        + (", ".join(f"{name} ({len(text)} characters)" for name, text in program.sources.items()) or "none"),
    ]
    buffers = {b.id: b for b in program.buffers}
    for entry in program.entries.values():
        lines += ["", *_describe_entry(buffers, entry)]
    lines += ["", "buffers shared by all entry points", *_buffer_table(program, buffer_kinds.SHARED)]
    words = recipe_words(program.recipes)
    lines += ["", f"weight map ({len(program.weights)} tensors of the state_dict -> {len(words)} buffers)"]
    lines += [f"  {name} <- {text}" for name, text in words.items()]
    lines += [
        "",
        f"totals: {t['kernels']} kernels, {si(t['flops'], 'FLOP')}, reads {si(t['bytes_read'], 'B')}, "
        f"writes {si(t['bytes_written'], 'B')}; arena {si(t['arena_bytes'], 'B')}, "
        f"weights {si(t['weight_bytes'], 'B')}, state {si(t['state_bytes'], 'B')}",
    ]
    if any(b.format for b in program.buffers):
        listed = ", ".join(f"{name} {si(size, 'B')}" for name, size in bytes_by_format(program).items())
        lines.append(f"weights by format: {listed}")
    return "\n".join(map(printable, lines)) + "\n"


def _describe_entry(buffers: Buffers, entry: EntryPoint) -> list[str]:
    lines = [f"entry {entry.name} (symbol {entry.symbol})"]
    io = [("input", i.name, tensor_text(i.shape, i.dtype), i.buffer) for i in entry.inputs]
    io += [("output", o.name, tensor_text(o.shape, o.dtype), o.buffer) for o in entry.outputs]
    io += [("state", key, "after the run", id) for key, id in entry.updates]
    lines += [" I/O", *table(("kind", "name", "tensor", "buffer"), io)]
    calls = [
        (n, c.name, c.kind, " ".join(map(str, c.inputs)) or "-", " ".join(map(str, c.outputs)) or "-",
         si(c.flops), si(c.bytes_read, "B"), si(c.bytes_written, "B"),
         _clip(", ".join(c.sources), 60), _clip(c.text, 100))
        for n, c in enumerate(entry.calls)
    ]  # fmt: skip
    header = ("#", "kernel", "kind", "in", "out", "FLOP", "reads", "writes", "IR nodes", "computes")
    lines += [f" {len(calls)} kernels", *table(header, calls)]
    arena = [b for b, _, _ in lifetimes(buffers, entry)]
    sizes = sum(nbytes(b.shape, b.dtype) for b in arena)
    lines.append(f" memory plan: {len(arena)} buffers of {si(sizes, 'B')} in an arena of {si(entry.arena_bytes, 'B')}")
    return [*lines, *_memory_chart(buffers, entry)]


def _buffer_table(program: ProgramSpec, kinds: tuple[str, ...]) -> list[str]:
    rows = [
        (b.id, b.kind, tensor_text(b.shape, b.dtype), nbytes(b.shape, b.dtype), b.format or "-", _clip(b.name, 80))
        for b in program.buffers
        if b.kind in kinds
    ]
    return table(("buffer", "kind", "tensor", "bytes", "format", "name"), rows) if rows else ["  none"]


def to_json(program: ProgramSpec) -> dict[str, Any]:
    """Return what :func:`describe` shows as JSON-safe data, without the text of sources and the binary."""
    plain = program_to_plain(program)
    words, buffers = recipe_words(program.recipes), {b.id: b for b in program.buffers}
    for plain_entry, entry in zip(plain["entries"], program.entries.values(), strict=True):
        rows = lifetimes(buffers, entry)
        plain_entry["lifetimes"] = [{"buffer": b.id, "first": first, "last": last} for b, first, last in rows]
    for b in plain["buffers"]:
        b["bytes"] = math.prod(b["shape"]) * dtypes.DTYPES[b["dtype"]].size
    plain["recipes"] = words
    plain["sources"] = {name: len(text) for name, text in program.sources.items()}
    plain["binary"] = len(program.binary)
    plain["totals"] = totals(program)
    plain["bytes_by_format"] = bytes_by_format(program)
    plain["abi"] = ABI_VERSION
    return json_safe(plain)
