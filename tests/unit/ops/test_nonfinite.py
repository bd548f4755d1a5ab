"""A non-finite or huge input element changes only outputs that see it, and those as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npusim
from npu_compiler import capture, compile
from npu_compiler.frontend import state_dict_numpy
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_runtime import Executor

from ...support.amx_model import HAS_AMX

SIZE, CHANNELS, AT = 32, 64, (13, 18)  # the pixel that is not like the others
HUGE = {"float16": (1e2, 1e4, 6e4), "bfloat16": (1e2, 1e4, 1e6, 1e30), "float32": (1e2, 1e4, 1e6, 1e30)}
TARGET = "cpu:cooperlake" if HAS_AMX else "cpu"  # on AMX, convolutions of half types are direct


@cache
def convolution(dtype: str, stride: int = 1) -> tuple[nn.Conv2d, Executor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(CHANNELS, CHANNELS * stride, 3, stride, padding=1, bias=False).to(getattr(torch, dtype)).eval()
    program = compile(capture(conv, (noise(dtype),)), TARGET)
    assert any(c.kind == "winograd" for c in program.entries["main"].calls)
    return conv, Executor(program, state_dict_numpy(conv))


def noise(dtype: str) -> torch.Tensor:
    x = 0.01 * torch.randn(1, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return x.to(getattr(torch, dtype))


def run(executor: Executor, x: torch.Tensor) -> np.ndarray:
    return next(iter(executor.run([tensor_to_numpy(x)]).values())).astype(np.float64)


def bright(dtype: str, value: float) -> torch.Tensor:
    x = noise(dtype)
    x[0, 5, AT[0], AT[1]] = value
    return x


def seen(stride: int = 1) -> np.ndarray:
    """Outputs that see the pixel."""
    down, right = (abs(np.arange(0, SIZE, stride) - at) <= 1 for at in AT)
    return down[:, None] & right


@pytest.mark.parametrize(
    ("dtype", "value", "stride"), [*((d, v, 1) for d in HUGE for v in HUGE[d]), ("float32", 1e6, 2)]
)
def test_a_bright_pixel_leaves_its_neighbours_alone(dtype: str, value: float, stride: int) -> None:
    conv, executor = convolution(dtype, stride)
    x, near = bright(dtype, value), seen(stride)
    with torch.no_grad():
        exact = nn.functional.conv2d(x.double(), conv.weight.double(), stride=stride, padding=1).numpy()
        eager = conv(x).double().numpy()
    ours = run(executor, x)
    error, allowed = (np.abs(y - exact)[..., ~near] for y in (ours, eager))
    assert np.sqrt(np.mean(error**2)) <= 1.1 * np.sqrt(np.mean(allowed**2))
    assert error.max() <= 2 * allowed.max(), f"errors {error.max()}, PyTorch's {allowed.max()}"
    error = np.abs(ours - exact)[..., near]
    assert error.max() <= 8 * torch.finfo(conv.weight.dtype).eps * np.abs(exact).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(("dtype", "stride"), [*((d, 1) for d in HUGE), ("float32", 2)])
def test_convolution_of_what_is_not_finite(dtype: str, stride: int, value: float) -> None:
    conv, executor = convolution(dtype, stride)
    x, near = bright(dtype, value), seen(stride)
    with torch.no_grad():
        eager = conv(x).double().numpy()
    ours, clean = run(executor, x), run(executor, noise(dtype))
    np.testing.assert_array_equal(ours[..., near], eager[..., near])
    assert not np.isfinite(ours[..., near]).any()
    error = np.abs(ours - clean)[..., ~near].max()
    assert error <= 2 * torch.finfo(getattr(torch, dtype)).eps * np.abs(clean).max()


def test_a_weight_of_zero_times_infinity() -> None:
    """The transforms hold no zeros, the filters do: 0 * inf is NaN."""
    for dtype, stride in (*((d, 1) for d in HUGE), ("float32", 2)):
        conv, _ = convolution(dtype, stride)
        sparse = nn.Conv2d(CHANNELS, conv.out_channels, 3, stride, padding=1, bias=False).to(conv.weight.dtype)
        with torch.no_grad():
            sparse.weight.copy_(conv.weight)
            sparse.weight[:, :, 1, 1] = 0
            sparse.weight[::2, :, 0, :] = 0
            x = bright(dtype, np.inf)
            eager = sparse(x).double().numpy()
        executor = Executor(compile(capture(sparse, (x,)), TARGET), state_dict_numpy(sparse))
        ours, near = run(executor, x), seen(stride)
        assert np.isnan(eager[..., near]).any()
        np.testing.assert_array_equal(ours[..., near], eager[..., near])


@pytest.mark.parametrize("dtype", list(HUGE))
def test_a_dark_half(dtype: str) -> None:
    """Many tiles that are partly dark: values of 1e-6 beside values of 1."""
    conv, executor = convolution(dtype)
    x = noise(dtype) * 100
    x[..., SIZE // 2 + 1 :] *= 1e-6
    with torch.no_grad():
        exact = nn.functional.conv2d(x.double(), conv.weight.double(), padding=1).numpy()
        eager = conv(x).double().numpy()
    dark = np.s_[..., SIZE // 2 + 2 : -1]
    error, allowed = (np.sqrt(np.mean((y - exact)[dark] ** 2)) for y in (run(executor, x), eager))
    assert error <= 1.1 * allowed


@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
def test_the_mean_beside_a_spread_is_that_of_mean(name: str) -> None:
    """In PyTorch, it depends on the place of an infinity: NaN unless that is the last element."""

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spread, mean = getattr(torch, name)(x, 1)
            return spread, mean

    x = torch.tensor(
        [[1.0, 2, 6], [torch.inf, 1, 2], [1, -torch.inf, 2], [1, torch.nan, 2], [torch.inf, 1, -torch.inf]]
    )
    built = Executor(compile(capture(Spread(), (x,)), "cpu"), {})
    spread, mean = built.run([x.numpy()]).values()
    np.testing.assert_array_equal(mean, x.mean(1).numpy())
    np.testing.assert_array_equal(np.isnan(spread), [False, True, True, True, True])


def called(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    class Model(nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return function(*args)

    return npusim.build(Model().eval(), inputs, "cpu", fallback=False)(*inputs)


@pytest.mark.parametrize("op", [torch.var, torch.std])
def test_spread_beside_a_mean_a_hundred_thousand_times_as_large(op: Callable[..., torch.Tensor]) -> None:
    """The rounding of the mean would change the variance by 5e-5."""
    x = torch.randn(16, 1089, generator=torch.Generator().manual_seed(0)) * 0.01 + 1e3
    exact = op(x.double(), 1)
    assert ((called(lambda x: op(x, 1), x) - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_an_infinite_position_reads_a_pixel_if_positions_are_reflected(mode: str) -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode=mode, padding_mode="reflection", align_corners=True)

    image, grid = torch.arange(35.0).view(1, 1, 5, 7), torch.tensor([[[[float("inf"), 0.0], [0.5, -float("inf")]]]])
    assert torch.equal(called(sample, image, grid), sample(image, grid))
