"""The table of ``npusim compile --weight-errors``: what a lossy format does to each matrix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from npu_runtime.llm.loader import Loader  # noqa: E402
from npusim import cli  # noqa: E402
from npusim.weight_errors import error_blocks, weight_errors  # noqa: E402

from . import small_model, tiny  # noqa: E402
from .gguf_writer import write_gguf  # noqa: E402

BITS = {"q8_0": 8.5, "q4_0": 4.5, "q5_1": 6.0}
MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval(), (torch.randn(2, 64),)
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from small_model.own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "two_products.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "two_products:make"


def expected_error(matrix: np.ndarray, kind: str) -> float:
    """The relative RMS error of a matrix in a GGUF type, as the package gguf rounds it."""
    quants = getattr(gguf.GGMLQuantizationType, kind.upper())
    decoded = gguf.dequantize(gguf.quantize(matrix, quants), quants).reshape(matrix.shape).astype(np.float64)
    return float(np.linalg.norm(decoded - matrix) / np.linalg.norm(matrix))


def test_each_matrix_of_a_language_model_is_compared(tmp_path: Path) -> None:
    folder = small_model.write_model(tmp_path / "small", num_hidden_layers=1)
    program, weights, _ = Loader("cpu", None, 48, None, False, "q4_0", scoring=True).compile(folder)
    found = {e.weight: e for e in weight_errors(program, weights)}
    matrices = {n: np.asarray(weights[n]) for n in weights if weights[n].ndim == 2}
    assert set(found) == set(matrices)
    for name, e in found.items():
        assert (e.format, e.shape, e.in_file) == ("q4_0", matrices[name].shape, False)
        assert e.bytes == matrices[name].size // 32 * 18 and e.bits_per_weight == BITS["q4_0"]
        assert e.relative_rms_error == pytest.approx(expected_error(matrices[name], "q4_0"), rel=0.05)


def test_blocks_of_a_file_are_not_rounded_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = tiny.hf_model("llama3", hidden_act="silu", head_dim=16, **sizes)
    path = write_gguf(tmp_path / "llama.gguf", model, "llama", blocks={"attn_v": "Q5_1", "": "Q8_0"})
    program, weights, _ = Loader("cpu", "float32", 48, None, False, scoring=True).compile(path)
    found = weight_errors(program, weights)
    assert {e.format for e in found if "v_proj" in e.weight} == {"q5_1"}
    assert {e.format for e in found} == {"q5_1", "q8_0"} and len(found) >= 7
    for e in found:
        assert e.in_file and e.relative_rms_error == 0 and e.bits_per_weight == BITS[e.format]


def test_command(network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.numpy import load_file

    argv = ["compile", network, "--weights", "q8_0", "--weight-errors", "-o", str(tmp_path / "net.npubin")]
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    tensors = load_file(tmp_path / "net.safetensors")
    rows = {e["weight"]: e for e in data["weight_errors"]}
    assert set(rows) == {"0.weight", "2.weight"}
    for name, row in rows.items():
        error = row.pop("relative_rms_error")
        assert error == pytest.approx(expected_error(tensors[name], "q8_0"), rel=0.05)
        shape, size = list(tensors[name].shape), tensors[name].size // 32 * 34
        assert row == {
            "weight": name, "format": "q8_0", "shape": shape, "bytes": size, "in_file": False, "bits_per_weight": 8.5,
        }  # fmt: skip
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "relative RMS error" in out and "2 matrices in lossy formats: 2.72 kB, 8.500 bits a weight" in out


def test_lossless_formats_have_no_rows() -> None:
    assert error_blocks([]) == ["no matrix is stored in a lossy format"]


def test_wrong_input(network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from npu_compiler.aten.json_writer import save_ir

    from ..support.toy_ir import HEAVY, Builder

    save_ir(Builder(weights=("w",)).node("y", HEAVY, "x", "p_w").out("y"), tmp_path / "toy.json")
    for argv, message in (
        (["toy.json"], "--weight-errors compares with the weights, which toy.json does not have"),
        ([network, "--until", "fuse"], "--weight-errors needs the whole program; leave out --until"),
    ):
        assert cli.main(["compile", *argv, "--weight-errors"]) == 1
        out, err = capsys.readouterr()
        assert not out and err == f"npusim: {message}\n"
