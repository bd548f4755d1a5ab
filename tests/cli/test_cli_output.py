"""The command line's output: terminals, pipes, files that cannot be read or written, JSON of errors."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from npusim import cli
from npusim.console import Table, show

torch = pytest.importorskip("torch")
import npusim  # noqa: E402


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
