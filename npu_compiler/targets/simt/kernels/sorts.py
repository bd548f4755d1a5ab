"""Sorts: sizes for ``kernels/sort.h``. Short rows are sorted by a workgroup or a part of one, long ones in sections,
which are then merged, one kernel per round. A top-k of small k is selected in k rounds instead."""

from __future__ import annotations

import math

from ....schedule.kernel import MergeRuns, Sort
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype, kind_of

THREADS = 128
EACH = 8  # the most elements that a thread keeps in registers
TEAMS = 256  # threads of a workgroup that sorts several rows
MAX_SECTION = 4096  # the longest section, whose items take up to 32 KiB
ITEM_BYTES = {"int": 4, "int64_t": 8, "WideItem": 16}
LARGEST = {"int": 2**31 - 1, "int64_t": 2**63 - 1}
# Selection is chosen for at most FEW_SELECTED elements, which takes little time, or for MANY_ROWS rows, which occupy
# all compute units.
FEW_SELECTED, MANY_ROWS = 4, 64


def row_length(k: Sort) -> int:
    """Return the number of elements of a row."""
    return k.inputs[0].shape[k.axis] if k.inputs[0].shape else 1


def selects_topk(k: Sort) -> bool:
    """Whether selecting the first ``k.k`` elements one after another is faster than sorting."""
    n, first, x = row_length(k), k.k, k.inputs[0]
    soon = n <= WORKGROUP_ROW or first <= FEW_SELECTED or math.prod(x.shape) >= MANY_ROWS * n
    return first * SUBGROUP <= n and x.dtype != "float64" and soon


def emit_sort(kernel: Sort, dialect: Dialect) -> Emission:
    """Return the function of a ``sort`` kernel: of whole rows, or of sections of ``section`` elements, of which the
    first ``run`` are kept."""
    x, n, section = kernel.inputs[0], row_length(kernel), kernel.section
    count, kept = math.prod(x.shape), kernel.run or kernel.k
    f = Function(kernel, dialect)
    if not count or not kernel.k:
        return f.finish(0, THREADS)
    if not section and selects_topk(kernel):
        return _emit_topk(f, kernel)
    item = _item(x.dtype)
    key = "int64_t" if item == "WideItem" else "int"
    section = section or 1 << (n - 1).bit_length()
    each = min(max(1, section // SUBGROUP), EACH)
    team = section // each  # threads that sort a section
    threads = max(team, TEAMS)
    sections = count // n * blocks(n, section)
    items = f.array(item, "items", threads * each, ITEM_BYTES[item]) if team > SUBGROUP else "nullptr"
    shifted = item == "int" and not dtypes.is_float(x.dtype)
    sizes = dict(
        ROWS=count // n, N=n, SECTION=section, KEPT=kept, EACH=each, THREADS=threads, LAST=LARGEST[key], SHIFTED=shifted
    )  # fmt: skip
    axis = 1 if kernel.section else kernel.axis
    _sort(f, kernel, "sort_sections", axis, sizes, items, Key=key, Item=item)
    return f.finish(blocks(sections * team, threads), threads)


def _item(dtype: str) -> str:
    """Return the C++ type of an element's key and place."""
    return {8: "WideItem", 4: "int64_t"}.get(dtypes.DTYPES[dtype].size, "int")


def section_of(dtype: str) -> int:
    """Return the number of elements that a workgroup sorts at once: their items are in shared memory."""
    return MAX_SECTION // 2 if _item(dtype) == "WideItem" else MAX_SECTION


def emit_sort_merge(kernel: MergeRuns, dialect: Dialect) -> Emission:
    """Return the function of a ``sort_merge`` kernel: rows of sorted runs [rows, total] to rows of half as many
    runs."""
    f, (rows, n) = Function(kernel, dialect), kernel.inputs[0].shape
    _sort(f, kernel, "sort_merge", kernel.axis, dict(ROWS=rows, N=n, RUN=kernel.run, KEPT=kernel.kept, THREADS=THREADS))
    return f.finish(blocks(rows * n, THREADS), THREADS)


WORKGROUP_ROW = 4096  # a workgroup, instead of a subgroup, selects from longer rows
_IN_REGISTERS = 16  # the most elements of a lane that are kept in registers


def _emit_topk(f: Function, kernel: Sort) -> Emission:
    x, n = kernel.inputs[0], row_length(kernel)
    rows, by_workgroup = math.prod(x.shape) // n, n > WORKGROUP_ROW
    threads, step = (1024, 1024) if by_workgroup else (256, SUBGROUP)
    each = blocks(n, step)
    sizes = dict(
        ROWS=rows, N=n, K=kernel.k, THREADS=threads, STEP=step, EACH=each, BY_WORKGROUP=by_workgroup,
        IN_REGISTERS=not by_workgroup and each <= _IN_REGISTERS,
    )  # fmt: skip
    arrays = ["nullptr", "nullptr"]
    if by_workgroup:
        arrays = [f.array(kind_of(x.dtype), "firsts", 2 * SUBGROUP), f.array("int", "places", 2 * SUBGROUP)]
    _sort(f, kernel, "sort_topk", kernel.axis, sizes, *arrays)
    return f.finish(rows if by_workgroup else blocks(rows, threads // SUBGROUP), threads)


def _sort(
    f: Function, kernel: Sort | MergeRuns, template: str, axis: int, sizes: dict[str, int], *arrays: str, **types: str
) -> None:
    """Instantiate a template of ``sort.h``. Results are stored along ``axis`` of the outputs."""
    x, (y, places) = kernel.inputs[0], kernel.outputs
    along = kernel.axis if isinstance(kernel, Sort) else 1
    rows = {"X": f.rows("x", x, along), "Y": f.rows("y", y, axis), "P": f.rows("p", places, axis)}
    ctypes = {"T": ctype(x.dtype), "R": kind_of(x.dtype), "Place": ctype(places.dtype), **types}
    values = {**sizes, "DESCENDING": kernel.descending}
    operands = [f.pointer(n) for n in (*range(len(kernel.inputs)), ~0, ~1)]
    f.template(template, "sort.h", {**ctypes, **rows}, values, *operands, *arrays)
