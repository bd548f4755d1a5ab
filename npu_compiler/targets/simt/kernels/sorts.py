"""Sorts: short rows by counting what comes before an element, long ones by merging sorted runs, a kernel for each
round. The first few of a row can be looked for one after another instead."""

from __future__ import annotations

import math
from dataclasses import replace

from ....schedule.kernel import Kernel, MergeRuns, Operand, Schedule, Sort, recast
from ..lang.dialect import SIMD, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import kind_of, read, storage
from .scans import row_offset

THREADS = 128
MOST_COUNTED = 2048  # elements of a row that are all compared with each other
SECTION = 256  # of a longer one, at first
FEW, MANY_ROWS = 4, 64  # looking for them one after another keeps all cores busy, or is soon over


def split_sort(schedule: Schedule, k: Sort) -> list[Kernel]:
    """A long row as sections, then merges of neighbouring runs until one is left; no run keeps more than it must."""
    (x,), first, n = k.inputs, k.k, _length(k)
    if n <= MOST_COUNTED or not math.prod(x.shape) or not first or _are_few(k):
        return [k]
    rows, runs, run = math.prod(x.shape) // n, blocks(n, SECTION), min(SECTION, first)
    total = (runs - 1) * run + min(n - (runs - 1) * SECTION, run)
    label, outputs = f"{k.label}_sections", _parts(schedule, k, rows, total)
    kernels: list[Kernel] = [replace(k, label=label, outputs=outputs, section=SECTION, run=run)]
    while runs > 1:
        before, kept, inputs = run, min(2 * run, first), outputs
        last = total - (runs - 1 - (runs - 1) % 2) * run  # elements of the last pair, or of a run alone
        runs, run = blocks(runs, 2), kept
        total = (runs - 1) * run + min(last, run)
        outputs = _parts(schedule, k, rows, total) if runs > 1 else k.outputs
        axis = 1 if runs > 1 else k.axis
        merge = recast(k, MergeRuns, inputs=inputs, outputs=outputs, axis=axis, run=before, kept=kept, flops=0)
        kernels.append(merge)
    return kernels


def _parts(schedule: Schedule, k: Sort, rows: int, total: int) -> tuple[Operand, ...]:
    """Values and positions in memory between two kernels."""
    shape = (rows, total)
    return schedule.memory(k.inputs[0].dtype, shape, "values"), schedule.memory("int32", shape, "places")


def _length(k: Sort) -> int:
    return k.inputs[0].shape[k.axis] if k.inputs[0].shape else 1


def _are_few(k: Sort) -> bool:
    """Whether the first of a row are best looked for one after another."""
    n, first, x = _length(k), k.k, k.inputs[0]
    soon = n <= GROUP_ROW or first <= FEW or math.prod(x.shape) >= MANY_ROWS * n
    return first * SIMD <= n and x.dtype != "float64" and soon


def emit_sort(kernel: Sort, dialect: Dialect) -> Emission:
    """The function of ``sort``: a thread counts how many elements of its row, or of its ``section``, come before its
    own: that is its place."""
    f = Function(kernel, dialect)
    out, x, axis, n = f.lines, kernel.inputs[0], kernel.axis, _length(kernel)
    count, section = math.prod(x.shape), kernel.section or n
    if not count or not kernel.k:
        return f.finish(0, THREADS)
    if section == n and _are_few(kernel):
        return _emit_few(f, kernel)
    out.add(
        f"const int at = gid * {THREADS} + tid;  if (at >= {count}) return;", f"const int i = at % {n}, row = at / {n};"
    )
    out.add(f"const int begin = i / {section} * {section}, end = begin + {section} < {n} ? begin + {section} : {n};")
    out.add(f"const int64_t from = {row_offset(x, axis, 'row')};")
    step = x.strides[axis] if x.shape else 0
    mine, other = (read(f.pointer(0), f"from + (int64_t){name} * {step}", x.dtype).text for name in "ij")
    register = kind_of(x.dtype)
    out.add(f"const {register} mine = {mine};", "int place = 0;")
    with out.block("for (int j = begin; j < end; j++) {"):
        out.add(f"const {register} other = {other};")
        out.add(f"place += (int)({_before(kernel)}(other, mine) || (!{_before(kernel)}(mine, other) && j < i));")
    run = kernel.run or kernel.k
    with out.block(f"if (place < {run}) {{"):
        _put(f, f"begin / {section} * {run} + place", "mine", "i", 1 if kernel.run else axis)
    return f.finish(blocks(count, THREADS), THREADS)


def emit_sort_merge(kernel: MergeRuns, dialect: Dialect) -> Emission:
    """The function of ``merge_runs``: rows of sorted runs [rows, total] to rows of half as many; a thread finds by
    bisection how many elements of the other run come before its own. Of equals, those of the left run are first."""
    f = Function(kernel, dialect)
    out, values, before = f.lines, kernel.inputs[0], _before(kernel)
    (rows, total), run, register = values.shape, kernel.run, kind_of(values.dtype)
    out.add(f"const int at = gid * {THREADS} + tid;  if (at >= {rows * total}) return;")
    out.add(f"const int i = at % {total}, row = at / {total}, mine_run = i / {run}, begin = (mine_run ^ 1) * {run};")
    mine, other = (
        read(f.pointer(0), f"(int64_t)row * {total} + {place}", values.dtype).text for place in ("i", "begin + middle")
    )
    out.add(f"const {register} mine = {mine};")
    out.add(f"int low = 0, high = {total} - begin < {run} ? {total} - begin : {run};")
    with out.block("while (low < high) {"):
        out.add("const int middle = (low + high) / 2;", f"const {register} other = {other};")
        out.add(f"const bool first = mine_run & 1 ? !{before}(mine, other) : {before}(other, mine);")
        out.add("low = first ? middle + 1 : low;", "high = first ? high : middle;")
    out.add(f"const int place = i % {run} + low;")
    with out.block(f"if (place < {kernel.kept}) {{"):
        source = read(f.pointer(1), f"(int64_t)row * {total} + i", "int32").text
        _put(f, f"mine_run / 2 * {kernel.kept} + place", "mine", source, kernel.axis)
    return f.finish(blocks(rows * total, THREADS), THREADS)


def _before(kernel: Sort | MergeRuns) -> str:
    return "sorts_after" if kernel.descending else "sorts_before"


def _put(f: Function, place: str, value: str, position: str, axis: int) -> None:
    """Statements that store a value and its position at ``place`` of row ``row``."""
    for number, text, op in zip((0, 1), (value, position), f.kernel.outputs, strict=True):
        step = op.strides[axis] if op.strides else 0
        at = f"{row_offset(op, axis, 'row')} + (int64_t)({place}) * {step}"
        f.lines.add(f"{f.pointer(~number)}[{at}] = {storage(text, op.dtype)};")


GROUP_ROW = 4096  # elements of a row that a whole group works on
_IN_REGISTERS = 16  # elements a lane


def _emit_few(f: Function, kernel: Sort) -> Emission:
    """The first few of many: round by round, the first of those behind the last one. Every thread remembers the first
    of its own elements, every ``step``-th of the row; when that was taken, the thread, or its simd if the elements are
    many, looks for the next. A simd or a group works on a row."""
    out = f.lines
    x, axis, k = kernel.inputs[0], kernel.axis, kernel.k
    n, rows = x.shape[axis], math.prod(x.shape) // x.shape[axis]
    whole = n > GROUP_ROW
    threads, step, me = (1024, 1024, "tid") if whole else (256, SIMD, "lane")
    T, order = kind_of(x.dtype), f"comes_first<{str(kernel.descending).lower()}>"
    first = order.replace("comes", "simd")
    if whole:
        f.array(T, "firsts", 2 * SIMD)
        f.array("int", "places", 2 * SIMD)
        out.add("const int row = gid;")
    else:
        out.add(f"const int row = gid * {threads // SIMD} + sid;  if (row >= {rows}) return;")
    out.add(f"const int64_t from = {row_offset(x, axis, 'row')};")
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
            _put(f, "r", "last", "place", axis)
    return f.finish(rows if whole else blocks(rows, threads // SIMD), threads)
