"""Loop nests: indices from data, strides, the order of loops and the text."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.graph.expr import const, fn, load, maximum, stage, where
from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import FusedLoops, Kernel
from npu_compiler.support import dtypes
from npu_compiler.targets.cpu import loops as emitter
from npu_compiler.targets.cpu.devices import MEASURED
from npu_compiler.targets.cpu.loops import emit_loops, scratch_bytes
from npu_compiler.targets.cpu.target import _Units

from ...support.cpu_harness import compile_kernels, fenced, operand, source
from .loop_kernels import ZERO, arrays, fold, i, j, k, loops, run, softmax, store


# -- indices ------------------------------------------------------------------------------------------------------
def gather(positions: int) -> Kernel:
    row = load(1, "int64", (i,))
    return loops(
        [operand((10, 33)), operand((positions,), "int64")],
        [operand((positions, 33))],
        (positions, 33),
        (),
        store(load(0, "float32", (row, j)), i, j),
    )


@pytest.mark.parametrize("bad", [-1, 10, 1 << 62])
def test_an_index_out_of_range_is_reported_and_reads_nothing(bad: int) -> None:
    kernel = gather(50)
    rows = np.arange(50) % 10
    (got,), (want,), status = run(kernel, x1=rows)
    assert status == 0
    np.testing.assert_array_equal(got, want)
    buffers = arrays(kernel, x1=rows)
    view(kernel.inputs[1], buffers)[49] = bad
    buffers = {n: fenced(a, True) for n, a in buffers.items()}
    assert compile_kernels([kernel]).run(0, buffers, 2) == 1


def test_a_guarded_index_is_checked_only_where_it_is_used() -> None:
    row = load(1, "int64", (i,))
    lane = load(1, "int64", (j,))
    by_row = where((row >= 0) & (row < 10), load(0, "float32", (row, j)), 7.0)
    by_lane = where((lane >= 0) & (lane < 10), load(0, "float32", (lane, i)), 7.0)
    for e in (by_row, by_lane):
        kernel = loops([operand((10, 40)), operand((40,), "int64")], [operand((40, 40))], (40, 40), (), store(e, i, j))
        rows = np.arange(40) - 15
        (got,), (want,), status = run(kernel, x1=rows)
        assert status == 0
        np.testing.assert_array_equal(got, want)


def test_serial_stores_keep_their_order() -> None:
    where_to = load(0, "int64", (i,))
    last = loops(
        [operand((60,), "int64"), operand((60,))],
        [operand((5,))],
        (60,),
        (),
        store(load(1, "float32", (i,)), where_to),
        serial=True,
    )
    rows = loops(
        [operand((60,), "int64"), operand((60, 20))],
        [operand((5, 20))],
        (60, 20),
        (),
        store(load(1, "float32", (i, j)), where_to, j),
        serial=True,
    )
    for kernel in (last, rows):
        (got,), (want,), status = run(kernel, x0=np.random.default_rng(3).integers(0, 5, 60))
        assert status == 0
        np.testing.assert_array_equal(got, want)


def test_scatter_add_sees_what_it_wrote() -> None:
    target = operand((5, 20), "int32")
    at = (load(0, "int64", (i,)), j)
    added = load(2, "int32", at) + load(1, "int32", (i, j))
    kernel = loops(
        [operand((60,), "int64"), operand((60, 20), "int32"), target],
        [target],
        (60, 20),
        (),
        store(added, *at),
        serial=True,
    )
    index_values = np.random.default_rng(4).integers(0, 5, 60)
    got = arrays(kernel, x0=index_values)
    want = view(target, got).copy()
    np.add.at(want, index_values, view(kernel.inputs[1], got))
    assert compile_kernels([kernel]).run(0, got, 2) == 0
    np.testing.assert_array_equal(view(target, got), want)


def test_results_may_replace_an_input() -> None:
    x = operand((37, 50))
    e = load(0, "float32", (i, j))
    kernel = loops(
        [x],
        [x, operand((37, 50))],
        (37, 50),
        (1,),
        fold("max", e),
        store(e - stage(0, "float32"), i, j),
        store(e * 2.0, i, j, output=1),
    )
    got, want, _ = run(kernel)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "dtypes_", [("float32", "float16"), ("uint8", "uint8"), ("bool", "float32"), ("float64", "float64")]
)
def test_transposing_copies(dtypes_: tuple[str, str]) -> None:
    source_, target = dtypes_
    e = load(0, source_, (i, k, j)).cast(target)
    kernel = loops([operand((3, 70, 45), source_)], [operand((3, 45, 70), target)], (3, 45, 70), (), store(e, i, j, k))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float16"), ("float64", "float64"), ("int64", "int64")])
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_short_channels_are_interleaved(channels: int, dtype: str, stored: str) -> None:
    shape = (2, 75, channels)
    e = (load(0, dtype, (i, k, j)) - load(1, dtype, (k,))).cast(stored)
    inputs = [operand((2, channels, 75), dtype), operand((channels,), dtype)]
    kernel = loops(inputs, [operand(shape, stored)], shape, (), store(e, i, j, k))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_array_equal(got, want)
    assert "st_interleaved" in source(kernel, "woven")


def test_a_residual_sum_is_made_once_per_row() -> None:
    x = load(0, "float32", (i, j)) + load(1, "float32", (i, j))
    d = x - stage(1, "float32") * (1 / 200)
    normal = d * fn("rsqrt")(stage(2, "float32") * (1 / 200) + 1e-5)
    kernel = loops(
        [operand((30, 200)), operand((30, 200))], [operand((30, 200)), operand((30, 200))], (30, 200), (1,),
        store(x, i, j), fold("sum", x), fold("sum", d * d), store(normal, i, j, output=1),
    )  # fmt: skip
    got, want, _ = run(kernel)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert source(kernel, "norm").count("ld(a") == 2


def test_concatenation_along_the_lanes_has_no_branch_inside() -> None:
    e = where(
        j < 20,
        load(0, "float32", (i, j)),
        where(j < 33, load(1, "float32", (i, j - 20)), load(2, "float32", (i, j - 33))),
    )
    kernel = loops([operand((30, n)) for n in (20, 13, 31)], [operand((30, 64))], (30, 64), (), store(e, i, j))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_array_equal(got, want)
    assert source(kernel, "concat").count("lanes<") == 3 and "select" not in source(kernel, "concat")


def test_reshapes_written_as_divisions_need_none() -> None:
    e = load(0, "float32", (i // 4, j // 2, i % 4, j % 2))
    kernel = loops([operand((3, 8, 4, 2))], [operand((12, 16))], (12, 16), (), store(e, i, j))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_array_equal(got, want)
    text = source(kernel, "shuffle")
    assert "gather" not in text and "%" not in text


def test_special_values_pass_through() -> None:
    x = load(0, "float32", (i,))
    kernel = loops(
        [operand((64,)), operand((64,))], [operand((64,), t) for t in ("float32",) * 3 + ("bool",) * 2], (64,), (),
        store(maximum(x, load(1, "float32", (i,))), i), store(fn("minimum")(x, 0.0), i, output=1),
        store(-x, i, output=2), store(fn("isnan")(x), i, output=3),
        store(fn("isinf")(x) | (x.cast("bool")), i, output=4),
    )  # fmt: skip
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e-45, 3.4e38], np.float32)
    a, b = np.repeat(special, 8), np.tile(special, 8)
    got, want, _ = run(kernel, x0=a, x1=b)
    for x_, y_ in zip(got, want, strict=True):
        np.testing.assert_array_equal(x_, y_)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_extremes_of_halves(dtype: str) -> None:
    """They are compared as integers: all pairs of values, with NaN of both signs, in whole and partial vectors."""
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -6e-5, 3e38, -3e4], np.float32)
    with np.errstate(over="ignore"):
        x = np.stack([np.repeat(special, 12), np.tile(special, 12)]).astype(dtypes.numpy_dtype(dtype))
    kernel = loops(
        [operand(x.shape, dtype)], [operand((1, 144), dtype) for _ in range(2)], x.shape, (0,),
        fold("max", load(0, dtype, (i, j))), fold("min", load(0, dtype, (i, j))),
        *(store(stage(n, dtype), ZERO, j, output=n, per_row=True) for n in range(2)),
    )  # fmt: skip
    assert "StoredReduction<Max" in source(kernel, "extremes")
    got, _, _ = run(kernel, x0=x)
    values = x.astype(np.float32)
    for ours, want in zip(got, (np.maximum(*values), np.minimum(*values)), strict=True):
        np.testing.assert_array_equal(ours.astype(np.float32)[0], want)


# -- the text -----------------------------------------------------------------------------------------------------
def test_equal_kernels_have_equal_text_and_it_is_short() -> None:
    texts = {emit_loops(softmax((8, 1000), 1), "name", lambda o: "p") for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().count("\n") < 45


def test_an_empty_domain_does_nothing() -> None:
    kernel = loops([operand((0, 5))], [operand((0, 5))], (0, 5), (), store(load(0, "float32", (i, j)), i, j))
    assert run(kernel)[2] == 0
    assert scratch_bytes(kernel) == 0


# -- index arithmetic ---------------------------------------------------------------------------------------------
def test_padding_is_copied_piece_by_piece() -> None:
    """Mirrored, then clamped, then wrapped around: every piece has a constant stride, and none is looked up."""
    n = const(9, "int64")
    mirrored = 8 - fn("abs")(8 - fn("abs")(j - 3))
    clamped = fn("minimum")(fn("maximum")(j - 3, const(0, "int64")), const(8, "int64"))
    for idx in (mirrored, clamped, fn("remainder")(j + 6, n)):
        x, y = operand((4, 9)), operand((4, 15))
        kernel = loops([x], [y], (4, 15), (), store(load(0, "float32", (i, idx)), i, j))
        got, want, _ = run(kernel)
        np.testing.assert_array_equal(got[0], want[0])
        text = emit_loops(kernel, "name", lambda o: "p")
        assert "gather" not in text and text.count("lanes<") == 3


# -- loop order ---------------------------------------------------------------------------------------------------
def test_what_a_row_does_not_change_is_outside_its_loop() -> None:
    weight = fn("exp")(load(1, "float32", (j,)))
    e = load(0, "float32", (i, j)) * weight
    kernel = loops([operand((7, 50)), operand((50,))], [operand((7, 50))], (7, 50), (), store(e, i, j))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    text = emit_loops(kernel, "name", lambda o: "p")
    assert text.index("lanes<") < text.index("exp(") < text.index("for (long i0")


def test_functions_of_reductions_are_computed_once_a_row() -> None:
    """Also where lanes are rows: the logarithm of log_softmax is computed in front of the loop over its row."""
    x, shape = load(0, "float32", (i, j)), (40, 70)
    kernel = loops(
        [operand(shape)], [operand(shape)], shape, (0,),
        fold("max", x), fold("sum", fn("exp")(x - stage(0, "float32"))),
        store(x - stage(0, "float32") - fn("log")(stage(1, "float32")), i, j),
    )  # fmt: skip
    text = emit_loops(kernel, "name", lambda o: "p")
    assert text.count("log(") == 1 and "for (long i0" in text[text.index("log(") :]
    (got,), (want,), _ = run(kernel)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_loops_over_rows_follow_the_results() -> None:
    x, y = operand((6, 5, 40)), operand((5, 6, 40))
    kernel = loops([x], [y], (6, 5, 40), (), store(load(0, "float32", (i, 4 - j, k)), j, i, k))
    (got,), (want,), _ = run(kernel)
    np.testing.assert_array_equal(got, want)
    text = emit_loops(kernel, "name", lambda o: "p")
    assert text.index("i1 ") < text.index("i0 ")


def test_guarded_strides_read_nothing_outside() -> None:
    """Lanes 1, 2 and 5 elements apart whose first and last positions are outside the operand."""
    kernels = []
    every = "float32 float64 float16 bfloat16 int64 int8 uint8 bool".split()
    pairs = [(dtype, 2, 60) for dtype in every]
    for dtype, step, n in (*pairs, ("float32", 1, 60), ("float32", 5, 151), ("bfloat16", 1, 60)):
        at = j * step - 2
        e = where((at >= 0) & (at < n) & (load(1, "int64", (j,)) > 0), load(0, dtype, (i, at)), const(3, dtype))
        inputs, outputs = [operand((2, n), dtype), operand((33,), "int64")], [operand((2, 33), dtype)]
        kernels.append(loops(inputs, outputs, (2, 33), (), store(e, i, j)))
    compiled = compile_kernels(kernels, len(kernels))
    for number, kernel in enumerate(kernels):
        buffers = arrays(kernel, x1=np.arange(33) % 3)
        want = {b: a.copy() for b, a in buffers.items()}
        execute(kernel, want)
        for at_end in (True, False):
            got = {b: fenced(a, at_end) for b, a in buffers.items()}
            assert compiled.run(number, got, 1) == 0
            np.testing.assert_array_equal(view(kernel.outputs[0], got), view(kernel.outputs[0], want))


def test_the_parts_of_a_fused_kernel_are_emitted_once() -> None:
    """Their scratch memory is known from their text."""
    made = [loops([operand((n,))], [operand((n,))], (n,), (), store(load(0, "float32", (i,)), i)) for n in (5, 600)]
    emitter._emit.cache_clear()
    _Units(MEASURED).add(FusedLoops.of(made))
    assert emitter._emit.cache_info().misses == len(made)
