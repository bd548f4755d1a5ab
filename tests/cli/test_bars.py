"""Progress bars: late, on terminals only, and gone before the next line; verbosity; completion."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_compiler import save_ir
from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import listening, step
from npusim import bars, cli
from tests.support.toy_ir import RELU, Builder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("rich", [True, False])
def test_a_long_step_appears_and_is_erased(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    with listening(bars.ProgressBars(terminal, patience=0.0)):
        with step("downloading weights\x1b[2J", 3_000_000, "B") as current:
            current.update(done=1_500_000)
            wait(lambda: "1.5 of 3.0 MB" in terminal.getvalue())
            with step("unpacking", 7) as inner:
                inner.advance(5)
                wait(lambda: "unpacking" in terminal.getvalue() and "5/7" in terminal.getvalue())
        shown = terminal.getvalue()
        assert "downloading weights" in shown and "\x1b[2J" not in shown
        assert shown.rstrip("\x1b[?25h").endswith(("\x1b[2K", "\x1b[K"))
        time.sleep(0.15)
        assert terminal.getvalue() == shown, "nothing is drawn after the last step"
        with step("again"):
            wait(lambda: "again" in terminal.getvalue())


def test_short_steps_and_other_streams_show_nothing() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with bars.progress_bars(stream), step("working"):
            time.sleep(0.25)
    assert terminal.getvalue() == pipe.getvalue() == ""


@pytest.mark.parametrize(("options", "drawn"), [([], True), (["-q"], False), (["--json"], False), (["-v"], False)])
def test_when_the_command_line_draws(options: list[str], drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[object] = []
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("npusim.bars.ProgressBars", lambda stream: listeners.append(stream) or (lambda step: None))
    assert cli.main(["ops", "gelu", *options]) == 0
    assert bool(listeners) == drawn


def test_verbosity_and_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NPU_DEBUG", raising=False)
    model = tmp_path / "toy.json"
    save_ir(Builder().node("y", RELU, "x").out("y"), model)
    command = ["compile", str(model), "-o", str(tmp_path / "toy.npubin")]
    printed = []
    for options in ([], ["-v"], ["-vv"], ["-vvvv"]):
        assert cli.main([*command, *options]) == 0
        printed.append(capsys.readouterr().err)
    quiet, phases, kernels, sources = printed
    assert quiet == "" and "npusim: schedule" in phases and "k0_" not in phases
    assert "k0_" in kernels and "%0" not in kernels and "extern" in sources

    data = "npusim: warning: the data is odd\nnpusim: it is wrong\n"

    def warns(args: object) -> None:
        logging.getLogger("npu_runtime.native").warning("it is logged")
        warnings.warn("the data is odd", stacklevel=1)
        raise InputError("it is wrong")

    monkeypatch.setattr("npusim.verbs.ops.run", warns)
    assert cli.main(["ops"]) == 1
    assert capsys.readouterr().err == f"npusim: warning: it is logged\n{data}"
    assert cli.main(["ops", "-q"]) == 1
    assert capsys.readouterr().err == data


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    verbs = [p.stem for p in Path(cli.__file__).with_name("verbs").glob("[a-z]*.py")]
    assert all(verb in script for verb in verbs) and "emit-source" in script
    if shell == "bash":
        assert "perplexity_pos_1_COMPGEN=_shtab_compgen_files" in script  # TEXT is a file
        (tmp_path / "npusim").write_text(script)
        ask = "source ./npusim; COMP_WORDS=(npusim comp); COMP_CWORD=1; _shtab_npusim; echo ${COMPREPLY[@]}"
        done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["compile", "completion"]


def test_completion_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'npusim[cli]'" in capsys.readouterr().err
