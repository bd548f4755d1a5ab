"""Stored IR JSON, and IR that pytorch-ir extracts here: compiled and compared with PyTorch running the same nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler import load_ir
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend import state_dict_numpy
from npusim import models

from ..support.ir_files import FILES, random_weights
from ..support.sweeps import IN_FULL
from ..support.torch_oracle import run_ir
from .gate import Expected, compile_whole, join, run
from .random_models import image_model, images, randomise


def oracle(graph: IRGraph, weights: dict[str, np.ndarray], runs: list[tuple[torch.Tensor, ...]]) -> Expected:
    """The nodes run one by one in PyTorch, in float32 and in float64."""

    def outputs(double: bool) -> list[np.ndarray]:
        return join([[t.numpy() for t in run_ir(graph, weights, args, double)[0]] for args in runs])

    return Expected("float32", outputs(True), outputs(False))


def check(graph: IRGraph, weights: dict[str, np.ndarray], count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    runs = [tuple(torch.randn(t.shape, generator=generator) for t in graph.graph_inputs) for _ in range(count)]
    oracle(graph, weights, runs).check(run(compile_whole(graph), weights, runs))


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("mlp", 20),
        ("convnet", 20),
        ("simple_convnet_ir", 20),
        ("resnet18", 4),
        pytest.param("resnet50", 2, marks=IN_FULL),
    ],
)
def test_stored_ir(name: str, runs: int) -> None:
    graph = load_ir(FILES / f"{name}.json")
    check(graph, random_weights(graph, 0), runs)


def extracted(model: nn.Module, *args: torch.Tensor) -> IRGraph:
    torch_ir = pytest.importorskip("torch_ir", reason="pytorch-ir is not installed")
    return load_ir(torch_ir.extract_ir(model.eval(), args, strict=False))


def test_resnet_extracted_by_pytorch_ir() -> None:
    model, x = image_model("two_stages", 64), images(8, 64)
    check(extracted(model, x), state_dict_numpy(model), 4)


def test_vit_extracted_by_pytorch_ir() -> None:
    torch.manual_seed(0)
    model = randomise(models.vit())
    check(extracted(model, images(2, 32)), state_dict_numpy(model), 8)
