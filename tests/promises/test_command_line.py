"""The command line, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from npu_compiler import get_supported_ops, save_ir
from npu_runtime import execute_cpu_partition
from npusim import cli

from ..support.toy_ir import HEAVY, ODD, SHAPE, Builder
from .compiled import Compiled


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_compile_describe_and_run(convnet: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, output = str(tmp_path / "m.npubin"), tmp_path / "y.npz"
    np.save(tmp_path / "x.npy", convnet.x)
    safetensors.numpy.save_file(convnet.weights, tmp_path / "m.safetensors")
    assert cli.main(["compile", convnet.path, "-o", program, "-q"]) == 0
    assert cli.main(["describe", program]) == 0 and "weight map" in capsys.readouterr().out
    assert cli.main(["run", program, "--input", f"x={tmp_path / 'x.npy'}", "--output", str(output)]) == 0
    convnet.check(dict(np.load(output)))


def test_explain_says_what_runs_where_and_why(convnet: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "explain", convnet.path, "--plan", "--force-cpu", "aten.max_pool2d.default")
    on_host = {n["name"]: n["reason"] for n in data["nodes"] if n["device"] == "host"}
    assert "max_pool2d" in on_host and all(on_host.values()) and data["plan"]["transfers"] > 0


def test_row_077_a_mixed_model_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One op runs on the host: one file is written and runs; --no-fallback refuses the model with status 3."""
    model, program, output = str(tmp_path / "m.json"), str(tmp_path / "m.npubin"), tmp_path / "y.npz"
    ir = Builder().node("o", ODD, "x").node("y", HEAVY, "o", "x").out("y")
    save_ir(ir, model)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(SHAPE)
    np.save(tmp_path / "x.npy", x)
    assert cli.main(["compile", model, "--no-fallback", "-o", program]) == 3 and not Path(program).exists()
    assert "special_bessel_j1" in capsys.readouterr().err
    assert cli.main(["compile", model, "-o", program, "-q"]) == 0
    assert cli.main(["run", program, "--input", str(tmp_path / "x.npy"), "--output", str(output)]) == 0
    np.testing.assert_allclose(np.load(output)["y"], execute_cpu_partition(ir, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    named = as_json(capsys, "explain", model, "--force-cpu", HEAVY)
    assert {n["device"] for n in named["nodes"]} == {"host"}


def test_row_106_profile_measures_a_program(
    convnet: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convnet.program.save(tmp_path / "m.npubin")
    report = tmp_path / "report.html"
    data = as_json(capsys, "profile", str(tmp_path / "m.npubin"), "--runs", "2", "--warmup", "1", "-o", str(report))
    assert data["files"] == [str(report)] and "conv2d" in report.read_text(encoding="utf-8")


def test_ops_lists_the_op_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "conv2d"]) == 0
    assert "aten.conv2d.default" in capsys.readouterr().out
    assert cli.main(["ops", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert not [op for op in get_supported_ops() if f"`{op}`" not in page]


def test_errors_are_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(tmp_path / "missing.json")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("npusim: ") and message.count("\n") == 1 and "missing.json" in message
