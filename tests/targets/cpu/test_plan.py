"""The loop plan of a nest: which dim has the lanes, and which loops are inside."""

from __future__ import annotations

import numpy as np

from npu_compiler.graph.expr import const, fn, index, load, stage
from npu_compiler.schedule.kernel import Loops
from npu_compiler.targets.codegen.nest import build_nest
from npu_compiler.targets.cpu.devices import MEASURED
from npu_compiler.targets.cpu.plan import Plan, make_plan

from ...support.cpu_harness import operand
from .test_loops import fold, loops, run, store

i, j, k, m = (index(d) for d in range(4))


def plan(kernel: Loops) -> Plan:
    return make_plan(build_nest(kernel), MEASURED)


def circular() -> Loops:
    """Images [40, 30, 50] that wrap around in both dims."""
    rows, columns = fn("remainder")(j - 1, const(30, "int64")), fn("remainder")(k - 3, const(50, "int64"))
    x = load(0, "float32", (i, rows, columns))
    return loops([operand((40, 30, 50))], [operand((40, 33, 54))], (40, 33, 54), (), store(x, i, j, k))


def windows() -> Loops:
    """The position of the largest element in windows of 32 x 8, from which a long expression makes another number."""
    x = load(0, "float32", (i, j * 32 + k, m))
    at = stage(0, "int64")
    place = (at // 8 % 32 * 96 + at % 8) * 3 + (at + j) // 5 % 7
    target = store(place, i, j, per_row=True)
    return loops([operand((40, 96, 8))], [operand((40, 3), "int64")], (40, 3, 32, 8), (2, 3), fold("argmax", x), target)


def test_of_equal_inner_loops_the_one_with_near_elements_is_inside() -> None:
    kernel = circular()
    made = plan(kernel)
    assert (made.lane, made.inner) == (2, 1)
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])


def test_what_is_done_once_a_row_does_not_decide_the_lanes() -> None:
    """Lanes along the rows would read with a stride, for every element."""
    kernel = windows()
    made = plan(kernel)
    assert made.lane in made.nest.reduced and not made.across_rows
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])
