"""The error gate itself: rounding noise of many kinds raises no alarm, defects do, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from .gate import Expected

Draw = Callable[[np.random.Generator], np.ndarray]

# Shapes of outputs that tests gate: prompts x tokens x vocabulary, images x classes, and small ones.
SHAPES = [(8, 8, 128), (48, 100), (2, 1000), (20, 10), (4, 16, 8, 8)]
NOISE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}  # rms of eager's errors over that of the result


def noises(shape: tuple[int, ...], spread: float) -> dict[str, Draw]:
    """Kinds of rounding noise. Those with a scale for each row or element keep it from draw to draw: it is the
    condition of the model at that place, the same for eager and for us. ``spread`` is that of its logarithm."""
    fixed = np.random.default_rng(1)
    rows = np.exp(fixed.normal(0, spread, (*shape[:-1], 1)))
    elements = np.exp(fixed.normal(0, spread / 2, shape))
    basis = fixed.normal(size=(32, shape[-1]))  # the errors of a row come from 32 numbers

    def common(rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=(*shape[:-1], 32)) @ basis

    return {
        "gaussian": lambda rng: rng.normal(size=shape),
        "uniform": lambda rng: rng.uniform(-1, 1, shape),
        "ill-conditioned rows": lambda rng: rows * rng.normal(size=shape),
        "ill-conditioned elements": lambda rng: elements * rng.normal(size=shape),
        "common causes": common,
    }


def gated(exact: np.ndarray, eager: np.ndarray, ours: np.ndarray, dtype: str = "float32") -> bool:
    try:
        Expected(dtype, [exact], [exact + eager]).check([exact + ours])
    except AssertionError as error:
        assert "of the errors exceed" in str(error)
        return True
    return False


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_raises_no_alarm(shape: tuple[int, ...]) -> None:
    """1,000 pairs of draws of each kind: two implementations, neither better than the other."""
    rng = np.random.default_rng(0)
    exact = rng.normal(size=shape)
    for kind, draw in noises(shape, spread=1).items():
        alarms = sum(gated(exact, 1e-5 * draw(rng), 1e-5 * draw(rng)) for _ in range(1000))
        assert alarms <= 1, f"{kind}: {alarms} false alarms of 1,000"


def test_orders_of_a_sum_raise_no_alarm() -> None:
    """Real rounding: a network's hidden units in another order give the same function by other sums."""
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]

    def run(order: torch.Tensor | None, dtype: torch.dtype) -> np.ndarray:
        y = x.to(dtype)
        for layer in layers:
            w, b = layer.weight.to(dtype), layer.bias.to(dtype)
            if order is not None:
                w, y = w[:, order], y[:, order]
            y = torch.nn.functional.gelu(torch.nn.functional.linear(y, w, b)) * 2
        return y.double().numpy()

    with torch.no_grad():
        expected = Expected("float32", [run(None, torch.float64)], [run(None, torch.float32)])
        for _ in range(200):
            expected.check([run(torch.randperm(64), torch.float32)])


def neighbour(x: np.ndarray, axis: int) -> np.ndarray:
    return np.roll(x, 1, axis)


def one_element(exact: np.ndarray) -> np.ndarray:
    """The element beside it in place of one. The pair is one of usual distance: equal neighbours are not a defect."""
    flat, wrong = exact.reshape(-1), exact.reshape(-1).copy()
    distance = np.abs(flat[1:] - flat[:-1])
    at = int(np.argsort(distance)[len(distance) // 2])
    wrong[at] = flat[at + 1]
    return wrong.reshape(exact.shape)


def one_row(exact: np.ndarray) -> np.ndarray:
    rows = exact.reshape(-1, exact.shape[-1]).copy()
    rows[1] = rows[0]
    return rows.reshape(exact.shape)


def last_element_missing(exact: np.ndarray) -> np.ndarray:
    wrong = exact.copy()
    wrong[np.unravel_index(np.abs(exact).argmax(), exact.shape)] = 0
    return wrong


DEFECTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": one_element,
    "one row": one_row,
    "an element left out": last_element_missing,
    "rows exchanged": lambda exact: neighbour(exact, 0),
    "elements shifted": lambda exact: neighbour(exact, -1),
    "a factor": lambda exact: exact * 1.05,
}


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_defects_raise_an_alarm(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    exact = rng.normal(size=shape)
    for kind, draw in noises(shape, spread=0.5).items():
        scale = NOISE[dtype] / np.sqrt(np.mean(draw(rng) ** 2))
        eager, ours = scale * draw(rng), scale * draw(rng)
        for name, defect in DEFECTS.items():
            assert gated(exact, eager, defect(exact) - exact + ours, dtype), f"{name} passes under noise: {kind}"


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_larger_noise_raises_an_alarm(shape: tuple[int, ...]) -> None:
    """Errors of 1.3 times eager's, a row of 3 times as much: neither sticks out by any one element."""
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=shape), 1e-5 * rng.normal(size=(2, *shape))
    assert gated(exact, noise[0], 1.3 * noise[1])
    one = np.ones((*shape[:-1], 1))
    one.reshape(-1)[3] = 3
    assert gated(exact, noise[0], one * noise[1])


def test_a_lost_bit_raises_an_alarm() -> None:
    """Results stored with a bit less than the dtype has."""
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(64, 256))
    eager = exact.astype(np.float32).astype(np.float64)
    coarse = exact.astype(np.float32).view(np.int32)
    ours = ((coarse + 1) & ~1).view(np.float32).astype(np.float64)
    assert gated(exact, eager - exact, ours - exact)


def test_what_is_not_finite_or_has_another_shape_raises_an_alarm() -> None:
    exact = np.random.default_rng(0).normal(size=(4, 8))
    expected = Expected("float32", [exact], [exact])
    for ours in (np.where(np.arange(8) == 3, np.nan, exact), np.where(np.arange(8) == 3, np.inf, exact), exact[:, :7]):
        with pytest.raises(AssertionError, match="a wrong shape, or not finite"):
            expected.check([ours])
