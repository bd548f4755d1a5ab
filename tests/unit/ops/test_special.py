"""Special functions: their coefficients, and their errors on dense samples of their whole range."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_runtime import Executor, load_weights

from ...support.captured import Fn

ROOT = Path(__file__).parents[3]
POINTS = 20_000
TINY, HUGE = 1.2e-38, 3.4e38


def test_coefficients_are_those_of_the_fit() -> None:
    pytest.importorskip("mpmath")
    command = [sys.executable, "tools/fit_special.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": ok") == 14


def spread(low: float, high: float, *ends: float) -> torch.Tensor:
    """Return evenly spaced numbers, and numbers that approach each of ``ends`` from inside."""
    even = np.linspace(low, high, POINTS)
    near = [end + (0.5 * (low + high) - end) * np.geomspace(1e-7, 1e-2, 1000) for end in ends]
    return torch.from_numpy(np.concatenate([even, *near, np.geomspace(1e-30, 1, 1000) * min(high, 1)])).float()


@pytest.mark.parametrize(
    ("function", "x", "units"),
    [
        (torch.special.erfinv, spread(-1, 1, -1, 1), 2.5),
        (torch.special.ndtri, spread(0, 1, 1), 4),
        (torch.special.erfc, spread(-6, 9), 4),
        (torch.special.erfcx, spread(-9, 30), 4),
        (torch.special.log_ndtr, spread(-30, 12), 7),
        (torch.special.i0, spread(-91, 91), 5),
        (torch.special.i0e, spread(-200, 200), 4),
        (torch.special.i1, spread(-91, 91), 5),
        (torch.special.i1e, spread(-200, 200), 4),
        (torch.special.gammaln, spread(0.01, 60), 1),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_errors_are_a_few_units_in_the_last_place(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, units: float
) -> None:
    program = npu_compiler.compile(capture(Fn(lambda _, x: function(x)), (x,)), "cpu")
    (found,) = Executor(program, load_weights(program, {})).run([x.numpy()]).values()
    exact = function(x.double()).numpy()
    usual = (np.abs(exact) > TINY) & (np.abs(exact) < HUGE)
    unit = np.spacing(np.abs(exact[usual]).astype(np.float32)).astype(np.float64)
    errors = np.abs(found[usual].astype(np.float64) - exact[usual]) / unit
    worst = int(errors.argmax())
    assert errors[worst] <= units, f"{errors[worst]:.2f} units at {x.numpy()[usual][worst]}"
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.special.erfc, torch.special.erfinv])
def test_results_of_16_bits_are_rounded_once(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Their polynomials have fewer terms. Every argument is tried."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    program = npu_compiler.compile(capture(Fn(lambda _, x: function(x)), (x,)), "cpu")
    (found,) = Executor(program, load_weights(program, {})).run([tensor_to_numpy(x)]).values()
    exact = function(x.double()).numpy()
    limits = torch.finfo(dtype)
    usual = (np.abs(exact) > limits.tiny) & (np.abs(exact) < limits.max)
    unit = np.exp2(np.floor(np.log2(np.abs(exact[usual])))) * limits.eps
    assert (np.abs(found.astype(np.float64)[usual] - exact[usual]) / unit).max() < 0.53
    np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), np.isnan(exact))


def test_a_hypotenuse_neither_overflows_nor_vanishes() -> None:
    x = torch.tensor([3e38, 1e-30, 0.0, torch.inf, torch.nan, 3.0, -5.0])
    y = torch.tensor([1e38, 1e-30, 0.0, torch.nan, 1.0, 4.0, 12.0])

    program = npu_compiler.compile(capture(Fn(lambda _, x, y: torch.hypot(x, y)), (x, y)), "cpu")
    (found,) = Executor(program, load_weights(program, {})).run([x.numpy(), y.numpy()]).values()
    np.testing.assert_allclose(found, torch.hypot(x.double(), y.double()).numpy(), rtol=3e-7)
