"""Products and convolutions whose results are not in rows in memory: they store rows, which another kernel transposes.

The results of neighbouring threads are neighbours in a row, for example the channels of a pixel. Stored to an image
[N, C, H, W], each would need a memory transaction of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ....schedule.anchors import Contraction, Conv2d, DepthwiseConv2d, Gemm
from ....schedule.kernel import Kernel, Loops
from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from ..kernels import transposed


def transpose_results(schedule: Schedule) -> None:
    """Replace large contractions that store columns of results by two kernels each."""
    found = [k for k in schedule.kernels if isinstance(k, Gemm | Conv2d | DepthwiseConv2d) and _stores_columns(k)]
    schedule.rewrite({k: _two(schedule, k) for k in found})


REWRITE = ScheduleRewrite(
    "transpose_results",
    "results of products and convolutions that are not rows in memory are stored as rows and then transposed",
    transpose_results,
)


def _stores_columns(k: Contraction) -> bool:
    """Whether neighbouring results along another dim than the last are neighbours in memory."""
    if len(k.outputs) != 1 or len(k.outputs[0].shape) < 2:
        return False
    (out,) = k.outputs
    *others, last = zip(out.shape, out.strides, strict=True)
    columns = math.prod(n for n, _ in _neighbours(others))
    return last[1] > 1 and last[0] >= transposed.MIN_SIDE <= columns and math.prod(out.shape) >= transposed.MIN_RESULTS


def _neighbours(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the dims (size, stride) that together are contiguous. Dims of one element have any stride."""
    found, stride = [], 1
    for n, s in sorted(((n, s) for n, s in dims if n > 1), key=lambda d: d[1]):
        if s != stride:
            break
        found.append((n, s))
        stride *= n
    return found


def _two(schedule: Schedule, k: Contraction) -> tuple[Kernel, Kernel]:
    (out,) = k.outputs
    rows = schedule.memory(out.dtype, out.shape, "rows")
    return replace(k, outputs=(rows,)), Loops.copy(rows, out, k.sources, f"{k.label}_transposed", k.number)
