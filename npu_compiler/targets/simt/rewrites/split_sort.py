"""A long row is sorted in sections, which are then merged, one kernel per round."""

from __future__ import annotations

import math
from dataclasses import replace

from ....schedule.kernel import Kernel, MergeRuns, Operand, Sort, recast
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from ..kernels.sorts import row_length, section_of, selects_topk
from ..lang.function import blocks


def split_sort(schedule: Schedule) -> None:
    """Replace sorts of long rows by a sort of their sections and merges of neighbouring runs, until one run is left. A
    run keeps only as many elements as the result has."""
    schedule.rewrite({k: _split(schedule, k) for k in schedule.kernels if isinstance(k, Sort)})


REWRITE = ScheduleRewrite("split_sort", "long rows are sorted in sections, which are merged", split_sort)


def _split(schedule: Schedule, k: Sort) -> list[Kernel]:
    (x,), first, n = k.inputs, k.k, row_length(k)
    section = section_of(x.dtype)
    if n <= section or not math.prod(x.shape) or not first or selects_topk(k):
        return [k]
    rows, runs, run = math.prod(x.shape) // n, blocks(n, section), min(section, first)
    total = (runs - 1) * run + min(n - (runs - 1) * section, run)
    label, outputs = f"{k.label}_sections", _parts(schedule, k, rows, total)
    kernels: list[Kernel] = [replace(k, label=label, outputs=outputs, section=section, run=run)]
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
    """Return buffers for values and positions between two kernels."""
    shape = (rows, total)
    return schedule.memory(k.inputs[0].dtype, shape, "values"), schedule.memory("int32", shape, "places")
