"""The command line: results, exit statuses, JSON, silence when piped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import env
from npu_compiler.target_config import target_config
from npusim import cli

from ..support.toy_ir import ODD

torch = pytest.importorskip("torch")
import npusim  # noqa: E402

from .json_output import as_json  # noqa: E402

# ---------------------------------------------------------------------------------------------------------- programs


def test_emitted_source_is_the_program(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = tmp_path / "new" / "source", tmp_path / "small.npubin"
    assert cli.main(["compile", str(model), "-o", str(path), "--emit-source", str(folder)]) == 0
    assert f"source files into {folder}" in capsys.readouterr().out
    assert {f.name: f.read_text() for f in folder.iterdir()} == CompiledProgram.load(path).sources


def test_compile_and_run(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.npz"
    assert cli.main(["run", str(program), "--input", str(tmp_path / "x.npy"), "--output", str(out)]) == 0
    text, err = capsys.readouterr()
    assert "float32  [4, 4]" in text and f"wrote {out}" in text and not err
    x = np.load(tmp_path / "x.npy")
    np.testing.assert_array_equal(np.load(out)["y"], 2 * np.maximum(x, 0))


def test_run_inputs_by_name_and_from_npz(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.load(tmp_path / "x.npy"))
    for given in (f"x={tmp_path / 'x.npy'}", str(tmp_path / "x.npz")):
        data = as_json(capsys, "run", str(program), "--input", given)
        assert data["outputs"]["y"] == {"dtype": "float32", "shape": [4, 4], "min": 0.0, "max": 14.0, "mean": 3.5}


def test_run_names_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Classifier(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    path, _ = npusim.build(Classifier(), (torch.zeros(1, 1000),)).save(tmp_path / "c.npubin")
    path.with_suffix(".labels.txt").write_text("".join(f"name {i}\n" for i in range(1000)))
    x = np.zeros((1, 1000), np.float32)
    x[0, 7], x[0, 3] = 5, 4
    np.save(tmp_path / "x.npy", x)
    top = as_json(capsys, "run", str(path), "--input", str(tmp_path / "x.npy"))["top5"][0]
    assert [t["name"] for t in top[:2]] == ["name 7", "name 3"]
    assert top[0]["probability"] == pytest.approx(np.exp(10) / (np.exp(10) + np.exp(8) + 998), rel=1e-6)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "needs input: x float32[4, 4]"),
        (["--input", "missing.npy"], "missing.npy: cannot be read"),
        (["--input", "x.npy", "--input", "x.npy"], "2 inputs given; expected x float32[4, 4]"),
        (["--input", "cat.png"], "cat.png: the preprocessing for toy is unknown"),
        (["--input", "x.npy", "--weights", "none.safetensors"], "none.safetensors"),
        (["--input", "z=x.npy"], "missing x and unknown z"),
        (["--input", "x.npy", "--output", "no/such/dir/out.npz"], "cannot be written"),
        (["--input", "x.npy", "--labels", "names.txt"], "--labels names.txt: the results of"),
    ],
)
def test_run_errors(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    monkeypatch.chdir(program.parent)
    assert cli.main(["run", str(program), *extra]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("npusim: ") and message in err and "Traceback" not in err


def test_run_without_weights_says_which(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.with_suffix(".safetensors").unlink()
    assert cli.main(["run", str(program)]) == 1
    assert "needs 1 weights: pass --weights" in capsys.readouterr().err


def test_describe(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", str(program)]) == 0
    assert "program toy: compiled for cpu:" in capsys.readouterr().out
    assert as_json(capsys, "describe", str(program))["program"]["name"] == "toy"


def test_bench(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "bench", str(program), "--seconds", "0.05", "--threads", "1")
    times = data["results"]["npusim"]
    assert times["runs"] >= 10 and 0 < times["p10_ms"] <= times["p50_ms"] <= times["p90_ms"] <= times["p99_ms"]
    assert times["per_second"] == pytest.approx(4 / times["p50_ms"] * 1e3) and data["threads"] == 1
    assert cli.main(["bench", str(program), "--vs", "torch"]) == 1
    assert "built-in model" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- compiling


def test_until_shows_the_graph_and_writes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert cli.main(["compile", str(model), "--until", "lower", "--dump", str(tmp_path / "dump")]) == 0
    assert "matmul(" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["0_lower.txt"] and os.environ == before
    assert not list(tmp_path.glob("*.npubin"))
    (tmp_path / "file").touch()
    assert cli.main(["compile", str(model), "--until", "lower", "--dump", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_steps_are_listed_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--until", "--disable"):
        assert cli.main(["compile", str(model), option, "help", "--target", "cuda", "--json"]) == 0
        steps = {(s["kind"], s["name"]): s for s in json.loads(capsys.readouterr().out)["steps"]}
        assert steps["phase", "fuse"]["optional"] is False and steps["pass", "layout"]["optional"] is True
        assert steps["rewrite", "split_k"]["optional"] is True and steps["rewrite", "legalize"]["optional"] is False
    assert cli.main(["compile", str(model), "--until", "horizontal_fusion"]) == 0
    assert "_gemm: gemm" in capsys.readouterr().out


def test_mixed_model_is_refused_without_fallback(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["-o", str(tmp_path / "m.npubin")]
    assert cli.main(["compile", str(mixed), *output, "--no-fallback"]) == 3
    assert ODD in capsys.readouterr().err
    data = as_json(capsys, "compile", str(mixed), *output, "--no-fallback", status=3)
    (reason,) = data["error"]["reasons"]
    assert (reason["node"], reason["op"], reason["rule"]) == ("o", ODD, "no_kernel")
    assert not (tmp_path / "m.npubin").exists()


def test_explain(mixed: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(mixed), "--plan"]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 nodes on the NPU (50 %)" in text and "transfer o host -> npu" in text
    data = as_json(capsys, "explain", str(mixed))
    assert data["npu_percent"] == 50 and data["host_ops"][0]["op"] == ODD
    assert cli.main(["explain", str(mixed), "--no-fallback"]) == 3
    assert cli.main(["explain", str(model), "--no-fallback"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compile", "nothing.json"], "no built-in model has that name: resnet18, resnet50, resnet50-imagenet"),
        (["compile", "MODEL", "--until", "no-such-phase"], "unknown phase 'no-such-phase'; phases are: lower"),
        (["compile", "MODEL", "--disable", "no-such-pass"], "cannot disable no-such-pass"),
        (["compile", "MODEL", "--until", "fuse", "--activations", "fp8"], "needs weights in an fp8 format"),
        (["profile", "MODEL", "--activations", "fp8"], "needs weights in an fp8 format"),
        (["compile", "MODEL", "--max-len", "64"], "--max-len is an option of language models"),
        (["bench", "resnet18", "--kv-cache", "int8"], "--kv-cache is an option of language models, and resnet18 is"),
        (["bench", "resnet18", "--prompt-len", "7"], "--prompt-len is an option of language models"),
        (["compile", "MODEL", "--batch", "4"], "--batch is an option of the built-in models"),
        (["compile", "MODEL", "--weights", "zip"], "unknown weight format 'zip'; known: bf16c12, "),
        (["compile", "MODEL", "--target", "abacus"], "unknown target 'abacus'"),
        (["describe", "MODEL"], "MODEL"),
        (["ops", "--markdown", "relu"], "leave out the pattern"),
    ],
)
def test_user_errors(model: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    argv = [str(model) if a == "MODEL" else a for a in argv]
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("npusim: ") and message.replace("MODEL", str(model)) in err
    assert "error" in as_json(capsys, *argv, status=1)


def test_usage_errors_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["fly"], ["run"], ["compile", "x", "--dtype", "float3"], ["bench", "x", "--threads", "0"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 1
    assert "'0' is not a positive whole number" in capsys.readouterr().err
    for text in ("-1", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            cli.main(["bench", "x", "--seconds", text])
        assert f"{text!r} is not a number of seconds above 0" in capsys.readouterr().err
    assert cli.main([]) == 1


def test_defects_exit_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(args: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("npusim.verbs.ops.run", broken)
    monkeypatch.delenv("NPU_DEBUG", raising=False)
    assert cli.main(["ops"]) == 2
    assert "internal error: ZeroDivisionError: oops" in capsys.readouterr().err
    monkeypatch.setenv("NPU_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["ops"])


# ----------------------------------------------------------------------------------------------------- ops and doctor


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "ops")
    assert data["count"] == len(data["ops"]) >= 90
    assert all(op["samples"] >= 3 for op in data["ops"] if op["family"] == "activations")
    assert cli.main(["ops", "softmax"]) == 0
    assert "aten.softmax.int" in capsys.readouterr().out
    assert cli.main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Operators")


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "doctor")
    cpu, cuda, metal = (data["targets"][name] for name in ("cpu", "cuda", "metal"))
    assert all(data["targets"][name]["device"].startswith(f"{name}:") for name in ("cpu", "cuda", "metal"))
    assert data["device"] == target_config("cpu").device.spec
    assert data["problems"] == [] and cpu["available"] and cpu["devices"] and cpu["compiler"] and not cpu["missing"]
    for other in (cuda, metal):
        assert other["available"] == (other["reason"] is None) == (not other["missing"])
        assert other["available"] or other["missing"][0] in other["reason"]
    assert data["packages"]["numpy"] == np.__version__
    assert data["variables"]["NPU_CXX"]["meaning"] == env.VARIABLES["NPU_CXX"].meaning
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(v.name in shown and v.meaning in shown for v in env.VARIABLES.values())
    monkeypatch.setenv("NPU_NUM_THREADS", "many")
    monkeypatch.setenv("NPU_THREADS", "2")
    problems = as_json(capsys, "doctor", status=1)["problems"]
    assert any("NPU_NUM_THREADS='many'" in p for p in problems) and any("NPU_THREADS is set" in p for p in problems)
