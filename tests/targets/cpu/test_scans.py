"""Running extremes with their positions, and rows that threads share in blocks."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import Scan
from npu_compiler.support import dtypes

from ...support.cpu_harness import compile_kernels, operand, source
from .loop_kernels import arrays

DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8", "bool")
SHAPES = [((70, 33), 1), ((33, 70), 0), ((3, 40), 1), ((2, 9, 17), 1), ((1,), 0)]


def scan(op: str, dtype: str, shape: tuple[int, ...], axis: int) -> Scan:
    outputs = [operand(shape, dtype)] + [operand(shape, "int64")] * op.startswith("arg")
    return Scan(label="t", inputs=(operand(shape, dtype),), outputs=tuple(outputs), op=op, axis=axis)


@pytest.mark.parametrize("march", ["native", "haswell"])
def test_running_extremes_and_their_positions(march: str) -> None:
    """Of equal elements the last counts, and of NaN also; a NaN stays until the end of the row."""
    kernels = [
        scan(op, dtype, *at)
        for dtype in DTYPES
        for op in (("argmax", "argmin") if dtype == "bool" or march != "native" else ("argmax", "argmin", "max", "sum"))
        for at in SHAPES
    ]
    compiled = compile_kernels(kernels, 20, march)
    for number, kernel in enumerate(kernels):
        got = arrays(kernel, number)
        x = view(kernel.inputs[0], got)
        if dtypes.is_float(kernel.inputs[0].dtype):
            x[...] = np.round(x.astype(np.float32) * 2) / 2
            if kernel.op != "sum":
                x.reshape(-1)[::31], x.reshape(-1)[1::9], x.reshape(-1)[2::43] = np.nan, -0.0, -np.inf
        want = {b: a.copy() for b, a in got.items()}
        execute(kernel, want)
        assert compiled.run(number, got, 2) == 0
        for o in kernel.outputs:
            name = f"{kernel.op} {kernel.inputs[0].dtype} {kernel.inputs[0].shape}"
            ours, theirs = (view(o, a).astype(np.float64) for a in (got, want))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_threads_share_rows_that_are_side_by_side() -> None:
    for (rows, length), axis in (((3072, 2560), 1), ((2560, 3072), 0)):
        text = source(scan("sum", "float32", (rows, length), axis), "scan")
        assert "next_chunk(th, counter)) < 48;" in text and "first + 64, 3072L" in text
