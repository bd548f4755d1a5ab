"""Vectors of elements at data-dependent indices: neighbours, as in an image that is enlarged, and any others."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.graph.expr import const, index, load
from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import Loops

from ...support.cpu_harness import Compiled, compile_kernels, fenced, operand
from .loop_kernels import arrays, loops, store

SIZE, POINTS = 38, 75
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool")
at = np.arange(POINTS)
PLACES = {
    "enlarged": at // 2,
    "enlarged from the end": SIZE - 1 - (POINTS - 1 - at) // 2,
    "shrunk": np.minimum(at * 2, SIZE - 1),
    "one": np.full(POINTS, SIZE - 1),
    "reversed": SIZE - 1 - at // 3,
    "near, in any order": np.clip(at // 3 + np.array([0, 2, 1])[at % 3], 0, SIZE - 1),
    "a pair far apart": np.where(at % 16 == 15, SIZE - 1, at // 8),
    "any": np.random.default_rng(0).integers(0, SIZE, POINTS),
}


def gathered(dtype: str) -> Loops:
    """Rows of ``POINTS`` elements from rows of ``SIZE``, at places of 32 bits."""
    row, point = index(0), index(1)
    place = load(1, "int32", (point,)).cast("int64")
    inputs = [operand((3, SIZE), dtype), operand((POINTS,), "int32")]
    stored = store(load(0, dtype, (row, place)), row, point)
    return loops(inputs, [operand((3, POINTS), dtype)], (3, POINTS), (), stored)


def check(compiled: Compiled, number: int, kernel: Loops, buffers: dict[int, np.ndarray], what: str) -> None:
    """Run kernel ``number`` on arrays that end or begin at pages that must not be touched."""
    want = {b: a.copy() for b, a in buffers.items()}
    execute(kernel, want)
    for at_end in (True, False):
        got = {b: fenced(a, at_end) for b, a in buffers.items()}
        assert compiled.run(number, got, 1) == 0
        results = view(kernel.outputs[0], got), view(kernel.outputs[0], want)
        np.testing.assert_array_equal(*results, err_msg=what)


@pytest.mark.parametrize("march", ["native", "haswell"])
def test_elements_at_places_and_none_outside(march: str) -> None:
    """The arrays end at pages that must not be touched, on either side."""
    kernels = [gathered(dtype) for dtype in DTYPES]
    compiled = compile_kernels(kernels, 4, march)
    for number, kernel in enumerate(kernels):
        for name, places in PLACES.items():
            check(compiled, number, kernel, arrays(kernel, x1=places), f"{DTYPES[number]}, {name}")


@pytest.mark.parametrize("march", ["native", "haswell"])
def test_rows_reversed_and_every_second_element_and_none_outside(march: str) -> None:
    """Rows begin and end where the operand does: nothing before or behind it may be touched."""
    row, point = index(0), index(1)
    kernels = []
    for dtype in (*DTYPES, "int8", "int16"):
        for size, points, place in ((75, 38, point * 2), (63, 32, point * 2), (43, 43, const(42, "int64") - point)):
            stored = store(load(0, dtype, (row, place)), row, point)
            kernels.append(loops([operand((3, size), dtype)], [operand((3, points), dtype)], (3, points), (), stored))
    compiled = compile_kernels(kernels, 4, march)
    for number, kernel in enumerate(kernels):
        check(compiled, number, kernel, arrays(kernel), kernel.text())
