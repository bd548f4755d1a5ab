"""Products of 8-bit integers that are both computed at run time: the right operand is transposed if necessary.

Matrix units multiply 8-bit elements only if the terms of a sum are neighbours in memory, in both operands.
"""

from __future__ import annotations

from dataclasses import replace

from ....schedule.anchors import Gemm
from ....schedule.kernel import Kernel, Loops
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule


def transpose_operands(schedule: Schedule) -> None:
    """Put a copy with contiguous columns between a product of 8-bit integers and a right operand without."""
    found = [k for k in schedule.kernels if isinstance(k, Gemm) and k.inputs[0].dtype == "uint8" and k.n_major]
    schedule.rewrite({k: _two(schedule, k) for k in found})


REWRITE = ScheduleRewrite(
    "transpose_operands",
    "right operands of 8 bits that are computed at run time are transposed, so that the terms of a sum are neighbours",
    transpose_operands,
)


def _two(schedule: Schedule, k: Gemm) -> tuple[Kernel, Gemm]:
    w = k.weight
    columns = schedule.memory(w.dtype, w.shape, "columns")
    copy = Loops.copy(w, columns, k.sources)
    return copy, replace(k, inputs=(*k.inputs[: k.rhs], columns, *k.inputs[k.rhs + 1 :]))
