"""Sorts: short rows by counting what comes before an element, long ones by merging sorted runs, a kernel for each
round. The first few of a row can be looked for one after another instead."""

from __future__ import annotations

import math

from ....schedule.kernel import MergeRuns, Sort
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype, kind_of

THREADS = 128
FEW, MANY_ROWS = 4, 64  # looking for them one after another keeps all SMs busy, or is soon over


def row_length(k: Sort) -> int:
    return k.inputs[0].shape[k.axis] if k.inputs[0].shape else 1


def selects_few(k: Sort) -> bool:
    """Whether the first of a row are best looked for one after another."""
    n, first, x = row_length(k), k.k, k.inputs[0]
    soon = n <= GROUP_ROW or first <= FEW or math.prod(x.shape) >= MANY_ROWS * n
    return first * SUBGROUP <= n and x.dtype != "float64" and soon


def emit_sort(kernel: Sort, dialect: Dialect) -> Emission:
    """The function of ``sort``: rows whole or cut into sections of ``section`` elements, of which the first ``run``
    are kept; the first few of a row are looked for one after another."""
    x, n, section = kernel.inputs[0], row_length(kernel), kernel.section
    count, kept = math.prod(x.shape), kernel.run or kernel.k
    f = Function(kernel, dialect)
    if not count or not kernel.k:
        return f.finish(0, THREADS)
    if not section and selects_few(kernel):
        return _emit_few(f, kernel)
    sizes = dict(ROWS=count // n, N=n, SECTION=section or n, KEPT=kept, THREADS=THREADS)
    _sort(f, kernel, "sort_sections", 1 if section else kernel.axis, sizes)
    return f.finish(blocks(count, THREADS), THREADS)


def emit_sort_merge(kernel: MergeRuns, dialect: Dialect) -> Emission:
    """The function of ``sort_merge``: rows of sorted runs [rows, total] to rows of half as many."""
    f, (rows, n) = Function(kernel, dialect), kernel.inputs[0].shape
    _sort(f, kernel, "sort_merge", kernel.axis, dict(ROWS=rows, N=n, RUN=kernel.run, KEPT=kernel.kept, THREADS=THREADS))
    return f.finish(blocks(rows * n, THREADS), THREADS)


GROUP_ROW = 4096  # elements of a row that a whole workgroup works on
_IN_REGISTERS = 16  # elements a lane


def _emit_few(f: Function, kernel: Sort) -> Emission:
    x, n = kernel.inputs[0], row_length(kernel)
    rows, whole = math.prod(x.shape) // n, n > GROUP_ROW
    threads, step = (1024, 1024) if whole else (256, SUBGROUP)
    each = blocks(n, step)
    sizes = dict(
        ROWS=rows, N=n, K=kernel.k, THREADS=threads, STEP=step, EACH=each, WHOLE=whole,
        HELD=not whole and each <= _IN_REGISTERS,
    )  # fmt: skip
    arrays = ["nullptr", "nullptr"]
    if whole:
        arrays = [f.array(kind_of(x.dtype), "firsts", 2 * SUBGROUP), f.array("int", "places", 2 * SUBGROUP)]
    _sort(f, kernel, "sort_few", kernel.axis, sizes, *arrays)
    return f.finish(rows if whole else blocks(rows, threads // SUBGROUP), threads)


def _sort(f: Function, kernel: Sort | MergeRuns, template: str, axis: int, sizes: dict[str, int], *arrays: str) -> None:
    """Instantiates a kernel of ``sort.h``; results go along ``axis`` of the outputs."""
    x, (y, places) = kernel.inputs[0], kernel.outputs
    along = kernel.axis if isinstance(kernel, Sort) else 1
    rows = {"X": f.rows("x", x, along), "Y": f.rows("y", y, axis), "P": f.rows("p", places, axis)}
    ctypes = {"T": ctype(x.dtype), "R": kind_of(x.dtype), "Place": ctype(places.dtype)}
    values = {**sizes, "DESCENDING": kernel.descending}
    operands = [f.pointer(n) for n in (*range(len(kernel.inputs)), ~0, ~1)]
    f.template(template, "sort.h", {**ctypes, **rows}, values, *operands, *arrays)
