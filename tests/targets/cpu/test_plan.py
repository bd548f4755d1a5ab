"""The loop plan of a nest: which dim has the lanes, and which loops are inside."""

from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int64", "float64"])
def test_transpositions_of_all_sizes_of_elements_are_tiled(dtype: str) -> None:
    """Neither dim is a multiple of a vector; the other side of a tile is contiguous in the source."""
    x = load(0, dtype, (k, i, j))
    kernel = loops([operand((37, 3, 43), dtype)], [operand((3, 43, 37), dtype)], (3, 43, 37), (), store(x, i, j, k))
    made = plan(kernel)
    assert (made.lane, made.tile) == (2, 1) and made.tiled
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_lanes_take_every_second_element_rather_than_rows(dtype: str) -> None:
    """Windows of 3 x 3 with stride 2: there are more rows than columns, but their elements are far apart."""
    x = load(0, dtype, (i, j * 2 + m, k * 2 + index(4)))
    kernel = loops(
        [operand((3, 73, 37), dtype)], [operand((3, 36, 18), dtype)], (3, 36, 18, 3, 3), (3, 4),
        fold("max", x), store(stage(0, dtype), i, j, k, per_row=True),
    )  # fmt: skip
    assert plan(kernel).lane == 2
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])
