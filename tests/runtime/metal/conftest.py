"""A Mac's GPU for every test of this folder, and small programs for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend import capture, state_dict_numpy
from npu_runtime.backends.metal import MetalBackend

from ...models.random_models import images, randomise
from ...support import metal_api

HERE = Path(__file__).parent
FLOAT = np.dtype(np.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.metal)


class Model(NamedTuple):
    program: CompiledProgram
    weights: dict[str, np.ndarray]
    x: np.ndarray
    expected: np.ndarray

    def check(self, result: np.ndarray) -> None:
        np.testing.assert_allclose(result, self.expected, rtol=1e-4, atol=1e-4)


class Small(nn.Module):
    """Two branches that may run at the same time, then a norm and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(3, 8, 5, stride=2, padding=1)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.left(x)).mean((2, 3)), torch.tanh(self.right(x)).mean((2, 3))
        return self.out(self.norm(left) * right)


@pytest.fixture(scope="session")
def convnet() -> Model:
    torch.manual_seed(0)
    model, x = randomise(Small()), images(2, 16)
    program = npu_compiler.compile(capture(model, (x,)), target="metal")
    with torch.no_grad():
        return Model(program, state_dict_numpy(model), x.numpy(), model(x).numpy())


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[metal_api.Device]:
    """The GPU, with an empty cache of binary archives."""
    device = metal_api.Device()
    monkeypatch.setattr("npu_runtime.backends.metal.library.private_folder", lambda name: tmp_path)
    with metal_api.installed(device):
        yield device


@pytest.fixture
def backend(device: metal_api.Device) -> MetalBackend:
    return MetalBackend()
