"""Generated loop kernels against numpy: random ones in bulk, and by hand what must hold exactly."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from npu_compiler.graph.expr import index, load, stage, where
from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import Kernel, Scan, Sort
from npu_compiler.support import dtypes
from npu_compiler.targets.cpu import compilers, host
from npu_compiler.targets.cpu.loops import scratch_bytes

from ...support.cpu_harness import compile_kernels, fenced, operand, source
from ...support.random_kernels import Maker
from ...support.sweeps import FULL
from .loop_kernels import ZERO, arrays, fold, i, j, loops, run, softmax, store

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5, "float64": 1e-5}


# -- in bulk ------------------------------------------------------------------------------------------------------
COUNTS = {"native": 80, "haswell": 20, "x86-64": 20} if FULL else {"native": 48, "haswell": 12, "x86-64": 12}


@pytest.mark.parametrize(("march", "count"), COUNTS.items())
def test_random_kernels_match_numpy(march: str, count: int) -> None:
    if march != "native" and compilers.required_features(march) - host.host_cpu().features:
        pytest.skip(f"this machine cannot run {march} code")
    first = {"native": 0, "haswell": 1000, "x86-64": 2000}[march]
    kernels = [Maker(first + n).kernel() for n in range(count)]
    compiled = compile_kernels(kernels, max(10, count // 2), march)
    for n, kernel in enumerate(kernels):
        got = arrays(kernel, n)
        want = {b: a.copy() for b, a in got.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            execute(kernel, want)
        got = {b: fenced(a, at_end=n % 2 == 0) for b, a in got.items()}
        assert compiled.run(n, got, threads=1 + n % 2) == 0
        for o in kernel.outputs:
            eps = TOLERANCE.get(o.dtype, 0)
            a, b = (view(o, x).astype(np.float64) for x in (got, want))
            np.testing.assert_allclose(a, b, rtol=eps, atol=3 * eps, err_msg=f"seed {first + n}: {kernel.text()}")


def test_scan_and_sort_match_numpy() -> None:
    """Every dtype with every kind; by default the kinds take turns for all shapes but one."""
    kernels: list[Kernel] = []
    shapes = ((3, 70), (7,), (2, 33, 17), (4, 0))
    for turn, dtype in enumerate(("float32", "float64", "bfloat16", "int64", "uint8", "bool")):
        for nth, shape in enumerate(shapes):
            axis, every = len(shape) // 2, FULL or not nth
            kinds = ("max", "min") if dtype == "bool" else ("sum", "prod", "max", "min")
            kinds = kinds if every else (kinds[(turn + nth) % len(kinds)],)
            kinds += ("logaddexp",) if dtype == "float64" else ()  # it has kernels of its own for each kind of row
            kernels += [
                Scan(label="t", inputs=(operand(shape, dtype),), outputs=(operand(shape, dtype),), op=s, axis=axis)
                for s in kinds
            ]
            for take in {shape[axis], min(3, shape[axis])}:
                out = (*shape[:axis], take, *shape[axis + 1 :])
                for down in (False, True) if every else (bool((turn + nth + take) % 2),):
                    inputs, outputs = (operand(shape, dtype),), (operand(out, dtype), operand(out, "int64"))
                    kernels.append(Sort(label="t", inputs=inputs, outputs=outputs, axis=axis, descending=down, k=take))
    compiled = compile_kernels(kernels, 100)
    for n, kernel in enumerate(kernels):
        got = arrays(kernel, n)
        x = view(kernel.inputs[0], got)
        if dtypes.is_float(kernel.inputs[0].dtype):  # halves make sums exact and ties frequent
            x[...] = np.round(x.astype(np.float32) * 2) / 2
            if isinstance(kernel, Sort):
                x.reshape(-1)[::7], x.reshape(-1)[1::9] = np.nan, -0.0
            elif kernel.op == "logaddexp":  # rows of the three shapes begin with -inf, or meet inf and NaN
                x.reshape(-1)[::35], x.reshape(-1)[31::111], x.reshape(-1)[77::140] = -np.inf, np.inf, np.nan
        want = {b: a.copy() for b, a in got.items()}
        execute(kernel, want)
        assert compiled.run(n, got, 2) == 0
        for o in kernel.outputs:
            exact = isinstance(kernel, Sort) or kernel.op != "logaddexp"
            np.testing.assert_allclose(
                view(o, got).astype(np.float64),
                view(o, want).astype(np.float64),
                *((0, 0) if exact else (1e-14, 1e-15)),
                err_msg=f"{kernel.kind} {kernel.parameters()} {kernel.inputs[0].dtype}",
            )


# -- accuracy -----------------------------------------------------------------------------------------------------
def no_worse_than_torch(got: np.ndarray, torch_result, exact: np.ndarray) -> None:
    ours = np.abs(got.astype(np.float64) - exact).max()
    theirs = np.abs(torch_result.double().numpy() - exact).max()
    assert ours <= 1.1 * theirs + 1e-7 * np.abs(exact).max(), (ours, theirs)


@pytest.mark.parametrize("shape, axis", [((3, 40000), 1), ((1, 1 << 20), 1), ((5000, 33), 0)])
def test_long_sums_are_as_accurate_as_torch(shape: tuple[int, int], axis: int) -> None:
    torch = pytest.importorskip("torch")
    idx = (i, ZERO) if axis == 1 else (ZERO, j)
    out = tuple(1 if d == axis else n for d, n in enumerate(shape))
    kernel = loops(
        [operand(shape)],
        [operand(out)],
        shape,
        (axis,),
        fold("sum", load(0, "float32", (i, j))),
        store(stage(0, "float32"), *idx, per_row=True),
    )
    x = np.random.default_rng(1).random(shape, np.float32)
    (got,), _, _ = run(kernel, x0=x)
    no_worse_than_torch(got, torch.from_numpy(x).sum(axis, keepdim=True), x.astype(np.float64).sum(axis, keepdims=True))


@pytest.mark.parametrize("shape, axis", [((6, 1000), 1), ((300, 37), 0)])
def test_softmax_is_as_accurate_as_torch(shape: tuple[int, int], axis: int) -> None:
    torch = pytest.importorskip("torch")
    kernel = softmax(shape, axis)
    assert scratch_bytes(kernel) > 0  # the exponentials are kept for the last pass
    (got,), _, _ = run(kernel)
    x = view(kernel.inputs[0], arrays(kernel))
    exact = np.exp(x.astype(np.float64))
    no_worse_than_torch(got, torch.from_numpy(x.copy()).softmax(axis), exact / exact.sum(axis, keepdims=True))


# -- reductions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1])
def test_argmax_takes_the_first_and_nan_wins(axis: int) -> None:
    shape = (40, 50)
    idx = (i, ZERO) if axis == 1 else (ZERO, j)
    out = tuple(1 if d == axis else n for d, n in enumerate(shape))
    x = load(0, "float32", (i, j))
    kernel = loops(
        [operand(shape)], [operand(out, "int64"), operand(out, "int64"), operand(out)], shape, (axis,),
        fold("argmax", x), fold("argmin", x), fold("max", x),
        *(store(stage(n, t), *idx, output=n, per_row=True) for n, t in enumerate(("int64", "int64", "float32"))),
    )  # fmt: skip
    values = np.random.default_rng(2).integers(0, 4, shape).astype(np.float32)
    values[3, 7] = values[3, 40] = values[30, 7] = np.nan
    values[5] = -np.inf
    got, want, _ = run(kernel, x0=values)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_reductions_over_nothing_give_their_identity() -> None:
    kernel = loops(
        [operand((3, 0))], [operand((3, 1)), operand((3, 1))], (3, 0), (1,),
        fold("sum", load(0, "float32", (i, j))), fold("prod", load(0, "float32", (i, j))),
        store(stage(0, "float32") + 2.0, i, ZERO, per_row=True),
        store(stage(1, "float32"), i, ZERO, output=1, per_row=True),
    )  # fmt: skip
    got, _, _ = run(kernel)
    assert got[0].tolist() == [[2.0]] * 3 and got[1].tolist() == [[1.0]] * 3


def pool(dtype: str, reduce: str, channels_last: bool) -> Kernel:
    n, h, w, c, r, s = (index(d) for d in range(6))
    at = (n, h * 2 + r - 1, w * 2 + s - 1, c)
    inside = (at[1] >= 0) & (at[1] < 9) & (at[2] >= 0) & (at[2] < 11)
    order = (0, 1, 2, 3) if channels_last else (0, 3, 1, 2)
    x = load(0, dtype, [at[d] for d in order]).cast("float32")
    e = where(inside, x, -math.inf if reduce == "max" else 0.0)
    sizes, out = (2, 9, 11, 70), (2, 5, 6, 70)
    return loops(
        [operand([sizes[d] for d in order], dtype)], [operand([out[d] for d in order], dtype)], (*out, 3, 3), (4, 5),
        fold(reduce, e), store(stage(0, "float32").cast(dtype), *((n, h, w, c)[d] for d in order), per_row=True),
    )  # fmt: skip


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_padded_pooling_never_reads_outside(reduce: str, channels_last: bool) -> None:
    kernel = pool("float16", reduce, channels_last)
    got = arrays(kernel)
    want = {b: a.copy() for b, a in got.items()}
    execute(kernel, want)
    compiled = compile_kernels([kernel])
    for at_end in (True, False):
        inside = {b: fenced(a, at_end) for b, a in got.items()}
        compiled.run(0, inside, 2)
        np.testing.assert_allclose(
            view(kernel.outputs[0], inside).astype(np.float32),
            view(kernel.outputs[0], want).astype(np.float32),
            rtol=2e-3,
            atol=2e-3,
        )


def test_pooling_guards_become_loop_bounds() -> None:
    text = source(pool("float32", "max", True), "pool")
    assert "?" not in text and "if (next_chunk" not in text.replace("if (next_chunk(th, counter) == 0)", "")
    assert text.count("scalar_max<long>(0, ") == 2
