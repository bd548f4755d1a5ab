"""What the command line knows by name: built-in classifiers, the images that they take, the names of their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from PIL import Image

from npu_compiler.compiled_program import CompiledProgram
from npusim import builtin, cli
from npusim.models import images, weights

from .test_models import fetched


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A PNG of smooth noise, wider than high."""
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    path = tmp_path / "cat.png"
    Image.fromarray(small).resize((400, 300)).save(path)
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_imagenet_input_is_torchvisions() -> None:
    image = np.random.default_rng(1).integers(0, 256, (256, 256, 3), np.uint8)
    x = torch.from_numpy(image[16:240, 16:240].copy()).permute(2, 0, 1).float() / 255
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    wanted = (x - mean[:, None, None]) / deviation[:, None, None]
    np.testing.assert_allclose(images.imagenet_input(image)[0], wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_a_resnet_takes_an_image_and_says_that_its_weights_are_random(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "resnet18.npubin")
    assert cli.main(["compile", "resnet18", "-o", path]) == 0
    assert "the weights are random" in capsys.readouterr().out
    assert cli.main(["describe", path]) == 0
    assert "weights: random" in capsys.readouterr().out
    top = run_json(capsys, "run", path, "--input", str(picture))["top5"][0]
    module = builtin.module("resnet18")
    with torch.no_grad():
        x = torch.from_numpy(images.imagenet_input(np.asarray(Image.open(picture))))
        wanted = module(x)[0].softmax(-1).topk(5)
    assert [t["class"] for t in top] == wanted.indices.tolist()
    np.testing.assert_allclose([t["probability"] for t in top], wanted.values.numpy(), rtol=1e-3)
    assert cli.main(["run", path, "--input", str(picture)]) == 0
    assert "its classes mean nothing" in capsys.readouterr().out


def test_trained_weights_name_the_cat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetched(weights.resnet50_weights), fetched(weights.imagenet_labels)
    photo, label = fetched(images.photos, ["chelsea"])["chelsea"]
    Image.fromarray(photo).save(tmp_path / "cat.png")
    path = tmp_path / "resnet50.npubin"
    assert cli.main(["compile", "resnet50-imagenet", "-o", str(path)]) == 0
    assert "random" not in capsys.readouterr().out and "weights" not in CompiledProgram.load(path).build
    first = run_json(capsys, "run", str(path), "--input", str(tmp_path / "cat.png"))["top5"][0][0]
    assert (first["class"], first["name"]) == (label, "Egyptian cat")
    assert first["probability"] == pytest.approx(0.753898, abs=1e-4)
