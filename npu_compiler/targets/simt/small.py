"""Depthwise convolutions, running reductions and sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ... import dtypes
from ...kernel import Kernel, Operand
from .dialect import SIMD, Dialect
from .epilogue import Epilogue
from .function import Emission, Function, blocks
from .scalar import Lines, accumulator, combine, kind_of, read, storage, wrap

THREADS = 128


def emit_depthwise(kernel: Kernel, dialect: Dialect) -> Emission:
    """A thread makes one result: neighbouring threads take neighbouring channels."""
    f = Function(kernel, dialect)
    out, a = f.lines, kernel.attrs
    x, w = kernel.inputs[:2]
    n, oh, ow, c = kernel.outputs[0].shape
    (r, s), (sh, sw), (dh, dw), (top, left) = a["kernel"], a["stride"], a["dilation"], a["padding"][:2]
    h, wide = x.shape[1:3]
    count = n * oh * ow * c
    out.add(f"const uint at = (uint)gid * {THREADS}u + (uint)tid;", f"if (at >= {count}u) return;")
    out.add(f"const int c = (int)(at % {c}u), pixel = (int)(at / {c}u);")
    out.add(f"const int y0 = pixel / {ow} % {oh} * {sh} - {top}, x0 = pixel % {ow} * {sw} - {left};")
    out.add(f"const int64_t image = (int64_t)(pixel / {oh * ow}) * {h * wide * c};", "float acc = 0.0f;")
    out.add("#pragma unroll")
    with out.block(f"for (int r = 0; r < {r}; r++) {{"):
        out.add(f"const int y = y0 + r * {dh};", f"if (y < 0 || y >= {h}) continue;", "#pragma unroll")
        with out.block(f"for (int s = 0; s < {s}; s++) {{"):
            out.add(f"const int x = x0 + s * {dw};", f"if (x < 0 || x >= {wide}) continue;")
            value = read(f.pointer(0), f"image + (y * {wide} + x) * {c} + c", x.dtype).text
            weight = read(f.pointer(1), f"r * {w.strides[0]} + s * {w.strides[1]} + c * {w.strides[2]}", w.dtype).text
            out.add(f"acc += {value} * {weight};")
    Epilogue(kernel, f).store("pixel", "c", 1, lambda _, at: "acc")
    return f.finish(blocks(count, THREADS), THREADS)


def _rows(out: Lines, shape: Sequence[int], axis: int, flat: str) -> list[str]:
    """Index texts of every dim but ``axis``, from a flat number over them."""
    unit, texts = 1, {}
    for d in reversed(range(len(shape))):
        if d != axis:
            texts[d] = f"({flat} / {unit} % {shape[d]})"
            unit *= shape[d]
    return [texts.get(d, "") for d in range(len(shape))]


def _offset(op: Operand, texts: list[str], axis: int) -> str:
    return (
        " + ".join(f"(int64_t){t} * {op.strides[d]}" for d, t in enumerate(texts) if d != axis and op.strides[d]) or "0"
    )


def emit_scan(kernel: Kernel, dialect: Dialect) -> Emission:
    """A thread runs along one row, in order."""
    f = Function(kernel, dialect)
    out, x, y = f.lines, kernel.inputs[0], kernel.outputs[0]
    axis, kind = kernel.attrs["axis"], kernel.attrs["kind"]
    shape = x.shape or (1,)
    rows = math.prod(shape) // max(shape[axis], 1)
    if not math.prod(shape):
        return f.finish(0, THREADS)
    texts = _rows(out, shape, axis, "row") if x.shape else [""]
    register = kind_of(x.dtype)
    out.add(f"const int row = gid * {THREADS} + tid;  if (row >= {rows}) return;")
    steps = [op.strides[axis] if op.strides else 0 for op in (x, y)]
    places = [_offset(op, texts, axis) if x.shape else "0" for op in (x, y)]
    out.add(f"const int64_t from = {places[0]}, to = {places[1]};")
    out.add(f"{register} total = {accumulator(kind, x.dtype)};")
    with out.block(f"for (int i = 0; i < {shape[axis]}; i++) {{"):
        value = read(f.pointer(0), f"from + (int64_t)i * {steps[0]}", x.dtype).text
        made = combine(kind, register, "total", value)
        out.add(f"total = {wrap(made, x.dtype) if not dtypes.is_float(x.dtype) else made};")
        out.add(f"{f.pointer(~0)}[to + (int64_t)i * {steps[1]}] = {storage('total', y.dtype)};")
    return f.finish(blocks(rows, THREADS), THREADS)


def emit_sort(kernel: Kernel, dialect: Dialect) -> Emission:
    """A thread counts how many elements of its row come before its own: that is its place."""
    f = Function(kernel, dialect)
    out, x = f.lines, kernel.inputs[0]
    axis, k = kernel.attrs["axis"], kernel.attrs["k"]
    shape = x.shape or (1,)
    n = shape[axis]
    count = math.prod(shape)
    if not count or not k:
        return f.finish(0, THREADS)
    if k * SIMD <= n and x.dtype != "float64":
        return _emit_few(f)
    texts = _rows(out, shape, axis, "row") if x.shape else [""]
    out.add(
        f"const int at = gid * {THREADS} + tid;  if (at >= {count}) return;", f"const int i = at % {n}, row = at / {n};"
    )
    operands = (x, *kernel.outputs)
    steps = [op.strides[axis] if op.strides else 0 for op in operands]
    places = [_offset(op, texts, axis) if x.shape else "0" for op in operands]
    register = kind_of(x.dtype)
    out.add(f"const int64_t from = {places[0]};")
    mine, other = (read(f.pointer(0), f"from + (int64_t){name} * {steps[0]}", x.dtype).text for name in "ij")
    out.add(f"const {register} mine = {mine};", "int place = 0;")
    before = "sorts_before" if not kernel.attrs["descending"] else "sorts_after"
    with out.block(f"for (int j = 0; j < {n}; j++) {{"):
        out.add(f"const {register} other = {other};")
        out.add(f"place += (int)({before}(other, mine) || (!{before}(mine, other) && j < i));")
    with out.block(f"if (place < {k}) {{"):
        for number, text, dtype in ((0, "mine", x.dtype), (1, "(int64_t)i", "int64")):
            at = f"{places[1 + number]} + (int64_t)place * {steps[1 + number]}"
            out.add(f"{f.pointer(~number)}[{at}] = {storage(text, dtype)};")
    return f.finish(blocks(count, THREADS), THREADS)


GROUP_ROW = 4096  # elements of a row that a whole group works on
_IN_REGISTERS = 16  # elements a lane


def _emit_few(f: Function) -> Emission:
    """The first few of many: round by round, the first of those behind the last one. Every thread remembers the first
    of its own elements, every ``step``-th of the row; when that was taken, the thread, or its simd if the elements are
    many, looks for the next. A simd or a group works on a row."""
    out, kernel = f.lines, f.kernel
    x, axis, k = kernel.inputs[0], kernel.attrs["axis"], kernel.attrs["k"]
    n, rows = x.shape[axis], math.prod(x.shape) // x.shape[axis]
    whole = n > GROUP_ROW
    threads, step, me = (1024, 1024, "tid") if whole else (256, SIMD, "lane")
    T, order = kind_of(x.dtype), f"comes_first<{str(kernel.attrs['descending']).lower()}>"
    first = order.replace("comes", "simd")
    texts = _rows(out, x.shape, axis, "row")
    if whole:
        f.array(T, "firsts", 2 * SIMD)
        f.array("int", "places", 2 * SIMD)
        out.add("const int row = gid;")
    else:
        out.add(f"const int row = gid * {threads // SIMD} + sid;  if (row >= {rows}) return;")
    out.add(f"const int64_t from = {_offset(x, texts, axis)};")
    value = read(f.pointer(0), f"from + (int64_t)i * {x.strides[axis]}", x.dtype).text
    count = blocks(n, step)
    held = not whole and count <= _IN_REGISTERS
    if held:
        out.add(f"{T} held[{count}];", "#pragma unroll")
        with out.block(f"for (int e = 0; e < {count}; e++) {{"):
            out.add(f"const int i = lane + e * {step};", f"held[e] = i < {n} ? {value} : ({T})0;")
    out.add(f"{T} mine = 0, last = 0;", "int at = -1, place = -1;")

    def look(owner: str, begin: str, by: int) -> None:
        """The first behind the last one of every ``by``-th of a thread's elements."""
        out.add("at = -1;", "#pragma unroll" + ("" if held else " 8"))
        with out.block(f"for (int e = {begin}; e < {count}; e += {by}) {{"):
            out.add(f"const int i = {owner} + e * {step};")
            out.add(f"const {T} other = {'held[e]' if held else f'i < {n} ? {value} : ({T})0'};")
            behind = f"(place < 0 || {order}(last, place, other, i))"
            out.add(f"if (i < {n} && {behind} && {order}(other, i, mine, at)) {{ mine = other; at = i; }}")

    if whole:
        look("tid", "0", 1)
    with out.block(f"for (int r = 0; r < {k}; r++) {{"):
        if whole:
            with out.block(f"if (place >= 0 && place % {step} / {SIMD} == sid) {{"):
                out.add(f"const {T} kept = mine;", "const int kept_at = at;")
                look(f"place % {step}", "lane", SIMD)
                out.add(f"{first}(mine, at);", f"if (place % {SIMD} != lane) {{ mine = kept; at = kept_at; }}")
        else:
            with out.block("if (at == place) {"):
                look("lane", "0", 1)
        out.add("last = mine;", "place = at;", f"{first}(last, place);")
        if whole:
            side = f"(r & 1) * {SIMD}"
            out.add(f"if (lane == 0) {{ firsts[{side} + sid] = last; places[{side} + sid] = place; }}", "barrier();")
            out.add(f"last = firsts[{side} + lane];", f"place = places[{side} + lane];", f"{first}(last, place);")
        with out.block(f"if ({me} == 0) {{"):
            for number, text, op in zip((0, 1), ("last", "(int64_t)place"), kernel.outputs, strict=True):
                to = f"{_offset(op, texts, axis)} + (int64_t)r * {op.strides[axis]}"
                out.add(f"{f.pointer(~number)}[{to}] = {storage(text, op.dtype)};")
    return f.finish(rows if whole else blocks(rows, threads // SIMD), threads)
