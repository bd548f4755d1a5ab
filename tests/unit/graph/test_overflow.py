"""int64 arithmetic on data wraps around: what holds for indices does not hold for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import npusim
from npu_compiler.graph import affine
from npu_compiler.graph.expr import const, index, load

VALUES = torch.tensor([2**63 - 1, 2**62, 7, 0, -5, -(2**63)])
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quotient of a product": lambda x: (x * 2) // 2,
    "quotient with a rest": lambda x: (x * 2 + 1) // 2,
    "remainder of a product": lambda x: (x * 3) % 3,
    "comparison with a successor": lambda x: torch.stack([x + 1 > x, x - 1 < x, x + 1 <= x]),
    "hash": lambda x: (x.clamp(0, 50256) * 6364136223846793005) % 1009,
    "bounded factor": lambda x: (x % 1000) * 2**60 // 7,
    "bool": lambda x: ((x > 0).long() * (2**63 - 1)) + 1 > 0,
    "extremes": lambda x: torch.minimum(x + 1, x) + torch.maximum(x * 2, x),
    "factors beyond 64 bits": lambda x: x * 2**62 * 4 + 3,
    "narrow": lambda x: x.int().long() * 2 // 2,
}


class Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", CASES)
def test_data_wraps_around(name: str) -> None:
    model = Called(CASES[name]).eval()
    assert torch.equal(npusim.build(model, (VALUES,), "cpu", fallback=False)(VALUES), model(VALUES))


def test_proofs_hold_only_without_overflow() -> None:
    x, i, ranges = load(0, "int64", [index(0)]), index(0), {0: (0, 9)}
    two = const(2, "int64")
    assert affine.interval(i * 2**62, ranges) is None and affine.interval(i * 2, ranges) == (0, 18)
    assert affine.exact(x, ranges) and affine.exact(i * 2, ranges) and not affine.exact(x * 2, ranges)
    assert affine.simplify((i * 2) // two, ranges) is i
    assert affine.simplify((x * 2) // two, ranges).op == "floordiv"
    assert affine.affine(x * 2**62 * 4).terms == {}


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_too_large_for_their_type_are_infinite() -> None:
    model = Called(lambda x: torch.stack([x + 1e300, x * 1e39, x - 1e300])).eval()
    x = torch.ones(3)
    assert torch.equal(npusim.build(model, (x,), "cpu", fallback=False)(x), model(x))
