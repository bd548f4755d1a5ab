"""The loop plan of a nest: which dim has the lanes, and which loops are inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npu_compiler.graph.expr import Expr, const, fn, index, load, stage, where
from npu_compiler.schedule.kernel import Loops
from npu_compiler.support import dtypes
from npu_compiler.targets.codegen.nest import build_nest
from npu_compiler.targets.cpu.devices import MEASURED
from npu_compiler.targets.cpu.plan import Plan, make_plan

from ...support.cpu_harness import operand, source
from .loop_kernels import fold, loops, run, store

i, j, k, m = (index(d) for d in range(4))


def plan(kernel: Loops) -> Plan:
    return make_plan(build_nest(kernel), MEASURED)


def circular(step: int) -> Loops:
    """Images [40, 30, 50] that wrap around in both dims, whose columns are ``step`` apart."""
    rows, columns = fn("remainder")(j - 1, const(30, "int64")), fn("remainder")((k - 3) * step, const(50, "int64"))
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
    kernel = circular(7)
    made = plan(kernel)
    assert (made.lane, made.inner) == (2, 1)
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])


def test_lanes_whose_positions_follow_a_stride_in_parts_share_nothing() -> None:
    """The loop over rows is outside, so that rows are read and written one after the other."""
    kernel = circular(1)
    made = plan(kernel)
    assert (made.lane, made.inner) == (2, None)
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


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("step", "apart"), [(2, 1), (1, 3), (2, 4)])
def test_tiles_are_of_every_second_element_and_fill_every_few(dtype: str, step: int, apart: int) -> None:
    x = load(0, dtype, (k, i, j * step))
    kernel = loops(
        [operand((37, 3, 43 * step), dtype)], [operand((3, 43, 37 * apart), dtype)], (3, 43, 37), (),
        store(x, i, j, k * apart),
    )  # fmt: skip
    made = plan(kernel)
    assert (made.lane, made.tile) == (2, 1) and made.tiled
    assert f"ld_tile<{step}>" in source(kernel, "tiled")
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_copies_beside_one_another_are_interleaved_if_they_fill_a_vector(copies: int) -> None:
    for rows in (75, 9):
        shape = rows, copies
        kernel = loops([operand((rows,))], [operand(shape)], shape, (), store(load(0, "float32", (i,)), i, j))
        made = plan(kernel)
        assert (made.lane, made.interleaved) == ((0, 1) if rows == 75 else (1, None))
        got, want, _ = run(kernel)
        np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bit_floats_are_moved_bit_for_bit(dtype: str) -> None:
    """NaNs keep their payload."""
    row = load(1, "int64", (i,))
    inputs, output = [operand((5, 75), dtype), operand((7,), "int64")], operand((7, 75), dtype)
    kernel = loops(inputs, [output], (7, 75), (), store(load(0, dtype, (row, j)), i, j))
    assert "move(" in source(kernel, "moved") and "st(" not in source(kernel, "moved")
    bits = np.random.default_rng(0).integers(0, 1 << 16, (5, 75)).astype(np.uint16)
    rows = np.array([4, 0, 0, 3, 1, 2, 4])
    (got,), _, status = run(kernel, x0=bits.view(dtypes.numpy_dtype(dtype)), x1=rows)
    assert status == 0
    np.testing.assert_array_equal(got.view(np.uint16), bits[rows])
    cast = load(0, dtype, (row, j)).cast("float32")
    assert "move(" not in source(loops(inputs, [operand((7, 75))], (7, 75), (), store(cast, i, j)), "cast")


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


def columns(rows: int, size: int, dtype: str) -> Loops:
    """The sum of the products of a vector with each column, the largest such product and the product of all signs."""
    wide = "float64" if dtype == "float64" else "float32"
    x = load(1, dtype, (i, j, k)).cast(wide) * load(0, dtype, (j,)).cast(wide)
    signs = where(load(1, dtype, (i, j, k)) < 0, const(-1, "int64"), const(1, "int64"))
    kinds = {"sum": x, "max": x, "prod": signs}
    results = [store(stage(n, e.dtype), i, k, output=n, per_row=True) for n, e in enumerate(kinds.values())]
    inputs = [operand((rows,), dtype), operand((2, rows, size), dtype)]
    outputs = [operand((2, size), wide), operand((2, size), wide), operand((2, size), "int64")]
    return loops(inputs, outputs, (2, rows, size), (1,), *(fold(*each) for each in kinds.items()), *results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rows", [296, 299])
def test_a_few_rows_of_a_large_matrix_pass_all_lanes(dtype: str, rows: int) -> None:
    kernel = columns(rows, 2111, dtype)
    made = plan(kernel)
    assert made.across_rows and made.rows_at_once == 8 and made.scratch_bytes >= 3 * 8 * made.block_size
    got, want, status = run(kernel)
    assert status == 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_columns_in_the_cache_and_narrow_ones_stay_in_registers() -> None:
    """A thread would read less than 1 KB of each row."""
    assert not plan(columns(20, 1111, "float32")).rows_at_once
    assert not plan(columns(40000, 70, "float32")).rows_at_once


@pytest.mark.parametrize(
    ("shape", "dtype", "along"),
    [
        ((700, 903), "float32", True),
        ((768, 903), "float32", False),
        ((9003, 70), "float64", False),
        ((700, 903), "bfloat16", False),
    ],
)
def test_tiles_follow_one_another_along_the_loads_if_stores_are_whole_lines(
    shape: tuple[int, int], dtype: str, along: bool
) -> None:
    """They follow the stores if these are many times as long, or rows of results are a multiple of 1 KB apart. Threads
    divide the other dim."""
    rows, columns = shape
    x = load(0, dtype, (j, i))
    kernel = loops([operand(shape, dtype)], [operand((columns, rows), dtype)], (columns, rows), (), store(x, i, j))
    made = plan(kernel)
    assert (made.lane, made.tile, made.tiles_along) == (1, 0, along)
    assert (made.tile_blocks == 1) == along and made.iterations > 1
    assert not make_plan(build_nest(kernel), replace(MEASURED, lanes=8)).tiles_along
    got, want, _ = run(kernel)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lanes_of_an_enlarged_image_are_neighbours(dtype: str) -> None:
    """They lie along its rows, not along its many channels, although 20 columns fill two vectors."""

    def corner(a: int, b: int) -> Expr:
        row, column = load(1, "int32", (const(a, "int64"), j)), load(2, "int32", (const(b, "int64"), k))
        return load(0, dtype, (i, row.cast("int64"), column.cast("int64"))).cast("float32")

    mean = (corner(0, 0) + corner(0, 1) + corner(1, 0) + corner(1, 1)) * 0.25
    inputs = [operand((96, 8, 10), dtype), operand((2, 16), "int32"), operand((2, 20), "int32")]
    kernel = loops(inputs, [operand((96, 16, 20))], (96, 16, 20), (), store(mean, i, j, k))
    assert plan(kernel).lane == 2
    rows, columns = (np.minimum(np.add.outer([0, 1], np.arange(n)) // 2, n // 2 - 1) for n in (16, 20))
    got, want, status = run(kernel, x1=rows, x2=columns)
    assert status == 0
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
