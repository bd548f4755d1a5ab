"""What the command line knows by name: built-in classifiers, the images that they take, the names of their classes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from PIL import Image

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npusim import builtin, cli
from npusim.models import images, weights

from ..models.test_definitions import fetched


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
    assert "its classes are meaningless" in capsys.readouterr().out


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


# ------------------------------------------------------------------------------------------------- models of one's own


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Any]:
    """A saved ExportedProgram, and its module."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    path = tmp_path / "mine.pt2"
    torch.export.save(torch.export.export(module, (torch.zeros(2, 8),)), path)
    return path, module


def test_an_exported_program_compiles_and_runs(exported: tuple[Path, Any], tmp_path: Path) -> None:
    path, module = exported
    if sys.platform == "linux":
        path = path.rename(tmp_path / os.fsdecode(b"not UTF-8: \xff.pt2"))
    program = tmp_path / "mine.npubin"
    assert cli.main(["compile", str(path), "-o", str(program)]) == 0
    x = torch.randn(2, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    given = ["--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npz")]
    assert cli.main(["run", str(program), *given]) == 0
    (y,) = np.load(tmp_path / "y.npz").values()
    np.testing.assert_allclose(y, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_images_that_do_not_fit_into_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "resnet18", "--batch", str(10**8)]) == 1
    assert "100000000 images of float32[3, 224, 224] do not fit into memory" in capsys.readouterr().err


def test_an_exported_program_is_explained(exported: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "explain", str(exported[0]))
    assert data["model"] == "mine" and data["npu_percent"] == 100


def test_files_that_are_no_exported_programs(
    exported: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = exported[0].read_bytes()
    other = tmp_path / "other.pt2"
    torch.save({"w": torch.zeros(2)}, other)
    text, cut = tmp_path / "text.pt2", tmp_path / "cut.pt2"
    text.write_text("not a zip")
    cut.write_bytes(whole[: len(whole) // 2])
    for path in (other, text, cut, tmp_path):
        assert cli.main(["explain", str(path) if path.is_file() else str(tmp_path / "none.pt2")]) == 1
        out, err = capfd.readouterr()
        assert not out and err.startswith("npusim: ") and err.count("\n") == 1, err


def test_save_ir_writes_what_the_command_line_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    npu_compiler.save_ir(npu_compiler.capture(torch.nn.Linear(4, 2), (torch.zeros(1, 4),)), path)
    assert run_json(capsys, "explain", str(path))["npu_percent"] == 100


# ------------------------------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compile", "m.json", "--dtipe", "float16"], "unrecognized arguments: --dtipe float16; did you mean --dtype?"),
        (["run", "p.npubin", "--inputs=x.npy"], "unrecognized arguments: --inputs=x.npy; did you mean --input?"),
        (["describe", "p.npubin", "another"], "unrecognized arguments: another"),
        (["explain", "m.json", "--emit-source", "d"], "unrecognized arguments: --emit-source d"),
    ],
)
def test_a_wrong_option_shows_the_usage_of_its_verb(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 1 and err.startswith(f"usage: npusim {argv[0]} ")
    assert f"npusim {argv[0]}: {message}" in err
