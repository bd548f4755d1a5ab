"""Epilogues of micro-kernels as C++; ``test_kernels.py`` and the conformance tests run them."""

from __future__ import annotations

import re

from npu_compiler.graph.expr import acc, index, load
from npu_compiler.schedule.anchors import Gemm
from npu_compiler.targets.cpu.epilogue import emit_epilogue

from ...support.cpu_harness import operand

M, N, K = 20, 48, 8


def test_epilogues_prefetch_the_rows_that_they_read_and_write() -> None:
    """A bias is the same in all rows, and the place of a row in a table is data: neither is prefetched."""
    row, col = index(0), index(1)
    left, weight, bias, residual = operand((M, K)), operand((2, K, 32)), operand((N,)), operand((M, N), strides=(64, 1))
    ids, table = operand((M,), "int64"), operand((9, N))
    looked_up = load(5, "float32", (load(4, "int64", (row,)), col))
    value = acc() + load(2, "float32", (col,)) + load(3, "float32", (row, col)) + looked_up
    kernel = Gemm(
        label="gemm", inputs=(left, weight, bias, residual, ids, table), outputs=(operand((M, N)),), epilogue=value,
        batch=1, m=M, n=N, k=K, lda=K, batch_stride=0, shared=True,
    )  # fmt: skip
    text, _ = emit_epilogue(kernel, 2, "epi", lambda op: "pointer")
    method = text[text.index("void prefetch(") :]
    steps = dict(re.findall(r"const long (o\d+) = i0 \* (\d+);", method))
    places = {(base, int(steps[o])) for base, o in re.findall(r"prefetch_panel\((\w+) \+ (o\d+) \+ i1\);", method)}
    assert places == {("a3", 64), ("b0", N)} and method.count("prefetch_panel") == 2
