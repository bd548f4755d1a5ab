"""``npusim quantize``: the program that it writes, its figures, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from npusim import cli
from npusim.quantization import METHODS
from npusim.quantization.ranges import Affine, Observed

from ..support.quantised import small_network

MODEL = "tests.support.quantised:small_network"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    for i in range(4):
        np.save(folder / f"{i}.npy", rng.standard_normal((1, 3, 16, 16)).astype(np.float32))
    return folder


def test_network_is_written_and_compared(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "small.npubin", tmp_path / "y.npz"
    assert cli.main(["quantize", MODEL, "--calibrate", str(inputs), "-o", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in found["layers"]] == ["stem", "left", "right", "head"]
    assert all(0 < row["weight_error"] < 0.02 and 0 < row["output_error"] < 0.05 for row in found["layers"])
    assert found["float32_layers"] == ["spatial"]
    assert found["top1"] == {"same": 4, "of": 4, "inputs": "calibration inputs"}
    sample = inputs / "1.npy"
    assert cli.main(["run", str(path), "--input", str(sample), "--output", str(results)]) == 0
    network, _ = small_network()
    with torch.no_grad():
        want = network(torch.from_numpy(np.load(sample))).numpy()
    (got,) = np.load(results).values()
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    capsys.readouterr()
    assert cli.main(["describe", str(path)]) == 0
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "files", "message"),
    [
        (MODEL, None, "is not a folder"),
        (MODEL, {}, "no file of a known type"),
        (MODEL, {"a.npy": np.zeros((3, 16, 16), np.float32)}, r"float32\[3, 16, 16\], but the network's input"),
        (MODEL, {"a.npy": np.full((1, 3, 16, 16), np.nan, np.float32)}, "not finite"),
        (MODEL, {"a.png": np.zeros(1)}, "preprocessing for Small is unknown"),
        ("tinystories-15m", {}, "is a language model"),
    ],
)
def test_wrong_input_is_one_error(
    model: str, files: dict[str, np.ndarray] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "inputs"
    if files is not None:
        folder.mkdir()
    for name, values in (files or {}).items():
        with open(folder / name, "wb") as stream:
            np.save(stream, values)
    output = tmp_path / "x.npubin"
    assert cli.main(["quantize", model, "--calibrate", str(folder), "-o", str(output)]) == 1
    text = capsys.readouterr().err
    assert text.count("npusim:") == 1
    import re

    assert re.search(message, text), text
    assert not output.exists()


def test_ranges_include_zero_and_the_best_is_no_worse() -> None:
    assert Affine.of(0.5, 2.0) == Affine(2.0 / 255, 0)
    assert Affine.of(-1.0, -0.25).zero_point == 255
    assert Affine.of(0.0, 0.0).scale > 0
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x[17] = 40.0
    seen = Observed()
    seen.add(x)
    errors = {m: float(np.square(seen.affine(m).rounded(x) - x).mean()) for m in METHODS}
    assert errors["mse"] <= min(errors.values())
    assert seen.affine("minmax").scale == pytest.approx((40.0 - float(x.min())) / 255)
