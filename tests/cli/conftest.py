"""Small models and programs for the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_compiler.aten.json_writer import save_ir
from npusim import cli

from ..support.toy_ir import HEAVY, ODD, RELU, Builder

torch = pytest.importorskip("torch")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """relu(x) @ w as IR JSON."""
    path = tmp_path / "toy.json"
    save_ir(Builder(weights=("w",)).node("r", RELU, "x").node("y", HEAVY, "r", "p_w").out("y"), path)
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.json"
    save_ir(Builder().node("o", ODD, "x").node("y", HEAVY, "o", "x").out("y"), path)
    return path


@pytest.fixture
def program(model: Path, tmp_path: Path) -> Path:
    """The compiled model with its weights (twice the unit matrix) beside it and an input."""
    import safetensors.numpy

    path = tmp_path / "toy.npubin"
    assert cli.main(["compile", str(model), "-o", str(path), "-q"]) == 0
    safetensors.numpy.save_file({"w": 2 * np.eye(4, dtype=np.float32)}, tmp_path / "toy.safetensors")
    np.save(tmp_path / "x.npy", np.arange(-8, 8, dtype=np.float32).reshape(4, 4))
    return path
