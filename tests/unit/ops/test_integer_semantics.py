"""Integers as PyTorch has them: no division by zero, positions that count from the end, checked indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import state_dict_numpy
from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call
from npu_compiler.support.errors import InputError
from npu_runtime import Executor
from npu_runtime.device import status_of

from ...support.metal_backend import EmulatedMetal

LOWEST = torch.iinfo(torch.int64).min


class Apply(nn.Module):
    def __init__(self, f: Callable[..., torch.Tensor]):
        super().__init__()
        self.f = f

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.f(*args)


def executor(f: Callable[..., torch.Tensor] | nn.Module, *args: torch.Tensor, target: str = "cpu") -> Executor:
    module = f if isinstance(f, nn.Module) else Apply(f)
    plan = npu_compiler.partition(npu_compiler.capture(module, args), target=target)
    assert [p.device for p in plan.partitions] == ["npu"], str(plan)
    program = npu_compiler.compile(plan.partitions[0].ir, target)
    weights: Any = state_dict_numpy(module)
    return Executor(program, weights, EmulatedMetal("ascending", seed=0) if target == "metal" else None)


def result(run: Executor, *args: torch.Tensor) -> np.ndarray:
    return next(iter(run.run([a.numpy() for a in args]).values()))


DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "div-floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div-trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}


@pytest.mark.parametrize(("target", "dtype"), [("cpu", torch.int64), ("cpu", torch.int32), ("metal", torch.int32)])
@pytest.mark.parametrize("name", DIVISIONS)
def test_division_by_zero_is_an_error(name: str, target: str, dtype: torch.dtype) -> None:
    f = DIVISIONS[name]
    a, b = torch.arange(-50, 51, dtype=dtype), torch.tensor([3, -7, 1, 50] * 25 + [2], dtype=dtype)
    run = executor(f, a, b, target=target)
    np.testing.assert_array_equal(result(run, a, b), f(a, b).numpy())
    for at in (0, 37, 100):
        zero = b.clone()
        zero[at] = 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            f(a, zero)
        with pytest.raises(InputError, match="an integer is divided by zero"):
            result(run, a, zero)
    np.testing.assert_array_equal(result(run, a, b), f(a, b).numpy())  # nothing stays behind


@pytest.mark.parametrize("target", ["cpu", "metal"])
def test_an_index_and_a_divisor_are_told_apart(target: str) -> None:
    """Both are read in one kernel, and by lanes and one by one."""

    def f(table: torch.Tensor, at: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return table[at] // b + at // c

    table, at = torch.arange(1, 9, dtype=torch.int32), torch.arange(40) % 8
    b, c = torch.arange(1, 41, dtype=torch.int32), torch.tensor(3)
    run = executor(f, table, at, b, c, target=target)
    assert len(run.entry.calls) == 1
    np.testing.assert_array_equal(result(run, table, at, b, c), f(table, at, b, c).numpy())
    behind, zero = at.clone(), b.clone()
    behind[17], zero[31] = 8, 0
    for arguments, message in (
        ((behind, b, c), "an index is out of range in kernel"),
        ((at, zero, c), "an integer is divided by zero in kernel"),
        ((at, b, torch.tensor(0)), "an integer is divided by zero in kernel"),
        ((behind, zero, c), "an index is out of range in kernel"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            result(run, table, *arguments)


def test_flags_name_the_first_kernel_and_are_cleared() -> None:
    flags = np.zeros((3, 2), np.int32)
    assert status_of(flags) == 0
    for set_flags, status in (([(1, 0)], 2), ([(1, 1)], 5), ([(2, 0), (1, 1)], 5), ([(0, 0), (0, 1)], 1)):
        for place in set_flags:
            flags[place] = 1
        assert status_of(flags) == status and not flags.any()


def all_divisions(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([f(a, b) for f in DIVISIONS.values()])


def test_the_lowest_integer_over_minus_one() -> None:
    """PyTorch dies of it, or wraps around; we wrap around."""
    a, b = torch.full((20,), LOWEST), torch.full((20,), -1)
    for name, found in zip(DIVISIONS, result(executor(all_divisions, a, b), a, b), strict=True):
        assert (found == (0 if name in ("remainder", "fmod") else LOWEST)).all(), name


def test_a_quotient_that_is_not_wanted_is_no_error() -> None:
    def safe(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(b == 0, 0, a // torch.where(b == 0, 1, b))

    a, b = torch.arange(40), torch.arange(40) % 3
    np.testing.assert_array_equal(result(executor(safe, a, b), a, b), safe(a, b).numpy())


def test_floats_divide_by_zero() -> None:
    a, b = torch.tensor([1.0, -2.0, 0.0, 5.0]), torch.tensor([0.0, 0.0, 0.0, 2.0])
    np.testing.assert_array_equal(result(executor(all_divisions, a, b), a, b), all_divisions(a, b).numpy())


def test_a_constant_divisor_of_zero_is_refused() -> None:
    plan = npu_compiler.partition(npu_compiler.capture(Apply(lambda a: a + 1), (torch.arange(4),)))
    assert [p.device for p in plan.partitions] == ["npu"]
    graph = Graph()
    with pytest.raises(npu_compiler.support.errors.Unsupported, match="integers divided by zero"):
        lower_call(graph, "aten.remainder.Scalar", [graph.input("a", (4,), "int64")], {"other": 0})


def test_numpy_reports_a_divisor_of_zero_too() -> None:
    graph = Graph()
    a, b = (graph.input(n, (4,), "int64") for n in "ab")
    (out,) = lower_call(graph, "aten.remainder.Tensor", [a, b], {})
    assert out is not None
    graph.outputs = [("out", out)]
    found = interp.run(graph, {"a": np.arange(4), "b": np.array([1, 2, 3, 4])})["out"]
    np.testing.assert_array_equal(found, np.arange(4) % [1, 2, 3, 4])
    with pytest.raises(IndexError):
        interp.run(graph, {"a": np.arange(4), "b": np.array([1, 2, 0, 4])})


def test_index_fill_counts_from_the_end() -> None:
    x, at = torch.arange(20.0).reshape(4, 5), torch.tensor([-1, 1, -4])

    def fill(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x.index_fill(1, at, 7.0)

    run = executor(fill, x, at)
    np.testing.assert_array_equal(result(run, x, at), fill(x, at).numpy())
    for bad in (5, -6):
        with pytest.raises(InputError, match="an index is out of range"):
            result(run, x, torch.tensor([0, bad, 0]))


@pytest.mark.parametrize("table", [torch.ones(6, 8), torch.arange(6.0)[:, None].expand(6, 8).contiguous()], ids=str)
@pytest.mark.parametrize("integers", [False, True])
def test_indices_of_any_constant_table_are_checked(table: torch.Tensor, integers: bool) -> None:
    """Tables that fold into a number, or into arithmetic on the index."""
    table = table.long() if integers else table

    def lookup(at: torch.Tensor) -> torch.Tensor:
        return table[at] * 2

    at = torch.tensor([0, 5, 3])
    run = executor(lookup, at)
    np.testing.assert_array_equal(result(run, at), lookup(at).numpy())
    with pytest.raises(InputError, match="an index is out of range"):
        result(run, torch.tensor([0, 6, 3]))
