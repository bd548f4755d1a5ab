"""Branches on values in PyTorch's own modules, and scripted parts, do not keep models from being captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import distributions, nn  # noqa: E402 - imports torch
from torch.nn.modules import transformer  # noqa: E402

import npusim  # noqa: E402


class Fn(nn.Module):
    def __init__(self, function: Callable[..., Any], part: nn.Module):
        super().__init__()
        self.function, self.part = function, part

    def forward(self, *args: Any) -> Any:
        return self.function(self.part, *args)


def log_prob(part: nn.Module, x: Any) -> Any:
    mean, scale = part(x).chunk(2, -1)
    return distributions.Independent(distributions.Normal(mean, scale.exp()), 1).log_prob(x[:, :4])


def causal(part: nn.Module, x: Any) -> Any:
    return part(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)


# A mask of the causal one's shape that is another one: the hint must not replace it.
BAND = torch.ones(5, 5, dtype=torch.bool).triu(1) | torch.ones(5, 5, dtype=torch.bool).tril(-3)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            x = x * 2
        for _ in range(2):
            x = self.linear(x).relu()
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Any, ...]]] = {
    "a causal mask": (encoder, causal, (torch.randn(2, 5, 8),)),
    "another mask": (encoder, lambda m, x, mask: m(x, mask), (torch.randn(2, 5, 8), BAND)),
    "a decoder's mask": (decoder, lambda m, x, mask: m(x, x, mask), (torch.randn(2, 5, 8), BAND)),
    "parameters of a distribution": (lambda: nn.Linear(8, 8), log_prob, (torch.randn(3, 8),)),
    "Module.to": (lambda: nn.Linear(8, 8), lambda m, x: m.to(x.device)(x), (torch.randn(3, 8),)),
    "a scripted part": (lambda: torch.jit.script(Loop()), lambda m, x: m(x) + m.linear(x), (torch.randn(3, 8),)),
    "Module.float of a tree": (encoder, lambda m, x: m.float()(x), (torch.randn(2, 5, 8),)),
}


@pytest.mark.parametrize("case", CASES)
def test_branches_on_values_in_pytorch_itself(case: str) -> None:
    make, function, args = CASES[case]
    torch.manual_seed(0)
    model = Fn(function, make()).eval()
    built = npusim.build(model, args)
    with torch.no_grad():
        torch.testing.assert_close(built(*args), model(*args))
    assert [p.device for p in built.plan.partitions] == ["npu"]


def test_the_branches_are_there_again_after_capture() -> None:
    before = transformer._detect_is_causal_mask, nn.Module._apply, distributions.Distribution._validate_args
    npusim.build(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert before == (transformer._detect_is_causal_mask, nn.Module._apply, distributions.Distribution._validate_args)
    with pytest.raises(ValueError, match="constraint"):
        distributions.Normal(torch.zeros(1), -torch.ones(1))
