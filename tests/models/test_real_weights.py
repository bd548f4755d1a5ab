"""Real weights from package registries, compiled, on photographs. Skipped, with the reason, without those
registries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler.frontend import capture, state_dict_numpy
from npu_runtime import Backend
from npusim import models
from npusim.models import images, weights

from ..support.sweeps import FULL, IN_FULL
from .gate import compile_and_run, compile_whole, expect, run
from .test_definitions import fetched

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}  # of a probability
SIZES = (224, 288) if FULL else (224,)  # of an image
GOLDEN = {  # of a correct class, ResNet-50: digits known, so the last is uncertain by half
    "chelsea": (0.753898, 5e-7),
    "coffee": (0.992581, 5e-7),
    "china": (0.7221, 5e-5),
}


def load(make: Callable[[], nn.Module], source: Callable[[], dict[str, np.ndarray]]) -> nn.Module:
    model = make()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in fetched(source).items()})
    return model.eval()


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits.astype(np.float64)).softmax(-1).numpy()


def probabilities(
    model: nn.Module, inputs: list[np.ndarray], dtype: str, backend: Backend | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """PyTorch's in float32 and ours in ``dtype``, [photo, class]; on the CPU if no ``backend`` is given."""
    runs = [(torch.from_numpy(x),) for x in inputs]
    program = compile_whole(capture(model, runs[0]), dtype, backend.name if backend else "cpu")
    ours = run(program, state_dict_numpy(model), runs, backend)[0]
    with torch.no_grad():
        wanted = np.concatenate([model(x).numpy() for (x,) in runs])
    return softmax(wanted), softmax(ours)


def check_top5(wanted: np.ndarray, ours: np.ndarray, tolerance: float) -> None:
    """The five first in order, except that neighbours closer than twice the tolerance may change places."""
    order = np.argsort(-wanted)[:5]
    for k in range(1, 6):
        if wanted[order[k - 1]] - wanted[np.argsort(-wanted)[k]] > 2 * tolerance:
            assert set(np.argsort(-ours)[:k]) == set(order[:k])


def check_resnet50(dtype: str, backend: Backend | None = None) -> None:
    model = load(partial(models.resnet50, v1_strides=True), weights.resnet50_weights)
    photos = fetched(images.photos)
    wanted, ours = probabilities(model, [images.resnet50_input(image) for image, _ in photos.values()], dtype, backend)
    assert np.abs(ours - wanted).max() <= TOLERANCE[dtype]
    for row, (name, (_, label)) in enumerate(photos.items()):
        golden, digits = GOLDEN[name]
        assert abs(ours[row, label] - golden) <= TOLERANCE[dtype] + digits, name
        check_top5(wanted[row], ours[row], TOLERANCE[dtype])
        assert np.argsort(-ours[row])[0] == label


@pytest.mark.parametrize("dtype", TOLERANCE if FULL else ("bfloat16",))  # cli/test_cli_models.py has float32
def test_resnet50_gives_the_golden_probabilities(dtype: str) -> None:
    check_resnet50(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE if FULL else ("float16",))  # bfloat16 passes the gate below
def test_efficientnet_lite0_equals_pytorch(dtype: str) -> None:
    model = load(models.efficientnet_lite0, weights.efficientnet_lite0_weights)
    photos = fetched(images.photos)
    inputs = [images.efficientnet_lite0_input(image, resize=224) for image, _ in photos.values()]
    wanted, ours = probabilities(model, inputs, dtype)
    assert np.abs(ours - wanted).max() <= 2 * TOLERANCE[dtype]  # eager's own error is as large
    for row, (_, label) in enumerate(photos.values()):
        check_top5(wanted[row], ours[row], 2 * TOLERANCE[dtype])
        assert np.argsort(-ours[row])[0] == label


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=IN_FULL), "bfloat16"])
def test_efficientnet_lite0_passes_the_gate(dtype: str) -> None:
    """Trained batch norms have scales of very different sizes, which random ones do not have."""
    model = load(models.efficientnet_lite0, weights.efficientnet_lite0_weights)
    photos = [image for image, _ in fetched(images.photos).values()]
    views = [np.ascontiguousarray(v) for p in photos for v in (p, p[:, ::-1])]
    runs = [(torch.from_numpy(images.efficientnet_lite0_input(v, resize=size)),) for v in views for size in SIZES]
    expect(model, runs, dtype).check(compile_and_run(model, runs, dtype))


def test_top5_comparison_sees_a_swap() -> None:
    wanted: Any = np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    check_top5(wanted, wanted, 1e-3)
    with pytest.raises(AssertionError):
        check_top5(wanted, wanted[[1, 0, 2, 3, 4, 5]], 1e-3)
