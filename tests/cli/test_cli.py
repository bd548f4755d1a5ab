"""The command line: results, exit statuses, JSON, silence when piped."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.json_writer import save_ir
from npu_compiler.support import env
from npu_compiler.support.errors import CompileError, InputError
from npu_compiler.target_config import target_config
from npusim import cli
from npusim.console import Table, show

from ..support.toy_ir import HEAVY, ODD, RELU, Builder

torch = pytest.importorskip("torch")
import npusim  # noqa: E402
from npu_runtime import load  # noqa: E402


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


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == status
    out, err = capsys.readouterr()
    assert not err
    data: dict[str, Any] = json.loads(out)
    assert data["schema_version"] == cli.SCHEMA_VERSION and data["command"] == argv[0]
    return data


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


# ----------------------------------------------------------------------------------------------------------- terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_plain_when_piped_and_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    table: Sequence[str | Table] = [Table(("op", "count"), [("[relu]", 12), ("add", 3)])]
    pipe, terminal = io.StringIO(), Terminal()
    show(table, pipe)
    assert pipe.getvalue() == "op      count\n[relu]     12\nadd         3\n"
    monkeypatch.setenv("NO_COLOR", "1")
    show(table, terminal)
    assert terminal.getvalue() == pipe.getvalue()
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR")
    show(table, coloured := Terminal())
    assert "[relu]" in coloured.getvalue() and "12" in coloured.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system does not have /dev/full")
def test_output_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        child = subprocess.run([sys.executable, "-m", "npusim", "ops", "--json"], stdout=full, stderr=subprocess.PIPE)
    assert child.returncode == 1
    assert child.stderr == b"npusim: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make():\n    raise ValueError('no')\n", r"the function failed at .*broken\.py:2: ValueError: no"),
        ("raise ValueError('no')\n", r"module 'broken' failed at .*broken\.py:1: ValueError: no"),
        ("def (:\n", r"module 'broken' failed.*: SyntaxError: invalid syntax \(broken\.py, line 1\)"),
    ],
)
def test_a_model_whose_own_code_fails(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert cli.main(["explain", "broken:make"]) == 1
    assert re.fullmatch(f"npusim: broken:make: {message}\n", capsys.readouterr().err)


def test_output_in_an_encoding_that_lacks_a_character_is_escaped(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "npusim", "compile", str(model), "-o", str(tmp_path / "é.npubin")]
    for more in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "ascii:surrogateescape"}):
        child = subprocess.run(command, env={**os.environ, **more}, capture_output=True)
        assert (child.returncode, child.stderr) == (0, b"") and rb"\xe9.npubin" in child.stdout


def test_broken_pipe_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-m", "npusim", "ops"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0


# -------------------------------------------------------------------------------------------------------------- build


class Structured(torch.nn.Module):
    """Nested arguments and results, a baked number, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pair: Any, scale: float) -> Any:
        self.calls += 1
        y = self.linear(pair["a"]) * scale
        return {"y": y, "parts": (y + pair["b"], None, self.calls * 1)}


def test_build_keeps_structure_kind_and_state() -> None:
    torch.manual_seed(0)
    net = Structured()
    pair = {"a": torch.randn(2, 4), "b": torch.randn(2, 3)}
    built = npusim.build(net, (pair, 2.0))
    assert net.training and net.calls == 0
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            want, found = net(pair, 2.0), built(pair, 2.0)
            torch.testing.assert_close(found, want)
    as_numpy = built({k: v.numpy() for k, v in pair.items()}, 2.0)
    assert isinstance(as_numpy["y"], np.ndarray) and as_numpy["parts"][1] is None and as_numpy["parts"][2] == 3
    with pytest.raises(InputError, match=r"built for 2\.0"):
        built(pair, 3.0)
    with pytest.raises(InputError, match="structure"):
        built(pair["a"], 2.0)
    assert [p.device for p in built.plan.partitions] == ["npu"]
    assert "(100 %)" in built.report() and "program Structured: " in built.report()


def test_build_saves_what_load_runs(tmp_path: Path) -> None:
    net = torch.torch.nn.Linear(4, 3).to(torch.bfloat16)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    built = npusim.build(net, x)
    path, weights = built.save(tmp_path / "new" / "linear")
    assert (path.name, weights.name) == ("linear.npubin", "linear.safetensors")
    again = load(path, weights)(x)
    assert again.dtype == torch.bfloat16 and torch.equal(again, built(x))
    numpy_in = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    assert built(numpy_in).dtype == ml_dtypes.bfloat16


def test_build_without_fallback(tmp_path: Path) -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.i1(x) @ x

    x = torch.rand(4, 4)
    with pytest.raises(CompileError) as caught:
        npusim.build(Mixed(), x, fallback=False)
    assert [op for _, op, _ in caught.value.reasons] == [ODD]
    built = npusim.build(Mixed(), x)
    torch.testing.assert_close(built(x), Mixed()(x))
    assert "host node" in built.report()
    torch.testing.assert_close(load(*built.save(tmp_path / "m.npubin"))(x), Mixed()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "metal"], "--target takes effect when a model is compiled, and PROGRAM is compiled already"),
        (["--dtype", "float16"], "--dtype takes effect"),
        (["--no-fallback"], "--fallback takes effect"),
        (["--disable", "layout"], "--disable takes effect"),
    ],
)
def test_options_of_compiling_do_not_change_a_program(
    program: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    for verb in ("bench", "profile"):
        assert cli.main([verb, str(program), *options]) == 1
        assert message.replace("PROGRAM", str(program)) in capsys.readouterr().err


def test_run_says_what_is_wrong_with_files(program: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = str(tmp_path / "x.npy")
    assert cli.main(["run", str(program), "--input", f"x={x}", "--input", f"x={x}"]) == 1
    assert "input 'x' is given twice" in capsys.readouterr().err
    assert cli.main(["run", str(program), "--input", x, "--output", x]) == 1
    assert "call it .npz" in capsys.readouterr().err and np.load(x).shape == (4, 4)


def test_bfloat16_arrays_are_read_as_numpy_writes_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = torch.arange(4, dtype=torch.bfloat16).reshape(1, 4)
    path, _ = npusim.build(torch.nn.ReLU(), (x,)).save(tmp_path / "relu.npubin")
    np.save(tmp_path / "x.npy", x.float().numpy().astype(ml_dtypes.bfloat16))
    assert cli.main(["run", str(path), "--input", str(tmp_path / "x.npy")]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_files_of_pytorch_that_are_no_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layer, path = torch.nn.Linear(2, 2), tmp_path / "model.pt"
    torch.save(layer.state_dict(), path)
    assert cli.main(["compile", str(path)]) == 1
    assert "a file of torch.save (weights without the model)" in capsys.readouterr().err
    torch.jit.save(torch.jit.script(layer), path)
    assert cli.main(["compile", str(path)]) == 1
    assert "TorchScript" in capsys.readouterr().err
    torch.export.save(torch.export.export(layer, (torch.zeros(1, 2),)), tmp_path / "m.pt2")
    (tmp_path / "cut.pt2").write_bytes((tmp_path / "m.pt2").read_bytes()[:3000])
    assert cli.main(["compile", str(tmp_path / "cut.pt2")]) == 1
    assert "damaged" in capsys.readouterr().err


def test_usage_errors_are_objects_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compile", "x", "--json", "--dtype", "int8"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "UsageError" and "int8" in error["message"]


def test_the_doctor_finds_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "file"))
    cli.main(["doctor"])
    assert "is not a directory; set NPU_CACHE_DIR to one" in capsys.readouterr().out


def test_a_model_without_ops_needs_no_pytorch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Identity(), (torch.zeros(1, 2),)), tmp_path / "same.pt2")
    assert cli.main(["compile", str(tmp_path / "same.pt2"), "-o", str(tmp_path / "same.npubin")]) == 0
    assert "PyTorch" not in capsys.readouterr().out


def test_outputs_that_are_no_files(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["compile", str(model), "-o", "."]) == 1
    assert "directory" in capsys.readouterr().err
    real, link = tmp_path / "real.npubin", tmp_path / "link.npubin"
    link.symlink_to(real)
    assert cli.main(["compile", str(model), "-o", str(link), "-q"]) == 0 and link.is_symlink() and real.exists()
    os.mkfifo(tmp_path / "pipe.npubin")
    assert cli.main(["compile", str(model), "-o", str(tmp_path / "pipe.npubin"), "-q"]) == 1
    assert "is not a regular file" in capsys.readouterr().err


def test_names_that_are_too_long_and_closed_streams(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "x" * 5000 + ".json"]) == 1
    assert "there is no such file" in capsys.readouterr().err
    command = f"{sys.executable} -m npusim explain nothing.json 2>&-"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=model.parent)
    assert found.returncode == 1 and not found.stdout
