"""Few long rows are scanned in sections by many workgroups: reduce-then-scan."""

from __future__ import annotations

from dataclasses import replace

from ....schedule.kernel import Kernel, Scan, ScanTotals, recast
from ....schedule.schedule import Schedule
from ..kernels.scans import scan_sizes, section_of, total_dtype
from ..lang.dialect import Dialect
from .dialect_rewrite import DialectRewrite


def split_scan(schedule: Schedule, dialect: Dialect) -> None:
    """Split scans of few long rows into two kernels: one reduces each section of a row, the other one scans each
    section from the reduction of those before it."""
    schedule.rewrite({k: _split(schedule, k, dialect) for k in schedule.kernels if isinstance(k, Scan)})


REWRITE = DialectRewrite("split_scan", "workgroups scan sections of few long rows (reduce-then-scan)", split_scan)


def _split(schedule: Schedule, k: Scan, dialect: Dialect) -> list[Kernel]:
    section = section_of(k, dialect)
    if not section:
        return [k]
    s = scan_sizes(k.inputs[0], k.axis, section)
    totals = schedule.memory(total_dtype(k.inputs[0].dtype, k.op, dialect), (s.rows, s.sections), "totals")
    first = recast(k, ScanTotals, label=f"{k.label}_totals", outputs=(totals,), section=section)
    return [first, replace(k, inputs=(*k.inputs, totals), section=section)]
