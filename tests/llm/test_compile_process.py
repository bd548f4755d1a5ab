"""A checkpoint that another process compiles: the same program and steps of progress, and nothing is left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from npu_compiler.artifact.serialize import program_to_plain
from npu_compiler.support.progress import Step, listening
from npu_runtime.llm import compile_process, loader
from npu_runtime.llm.compile_process import CompileOptions, compile_apart
from npu_runtime.llm.loader import Loader

from . import small_model

OPTIONS = CompileOptions("cpu", 32, True, False, None, None)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The processes that compile, although PyTorch is imported here."""
    started: list[Any] = []
    Popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        process = Popen(*args, **options)
        if compile_process._MAIN in args[0]:
            started.append(process)
        return process

    monkeypatch.setattr(compile_process, "saves_memory", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", start)
    yield started
    assert len(started) == 1 and started[0].poll() is not None


def test_the_program_and_its_progress(processes: list[Any], tmp_path: Path) -> None:
    path = small_model.write_model(tmp_path / "small")
    steps: dict[str, Step] = {}
    with listening(lambda s: steps.update({s.text: s})):
        program, _, _ = Loader("cpu", None, 32, None, False, None, scoring=True).load(path)
    assert all(s.finished for s in steps.values())
    assert {"compiling small", "capturing llama", "packing weights"} <= set(steps)
    here, _, _ = Loader("cpu", None, 32, None, False, None, scoring=True).compile(path)
    assert program_to_plain(program) == program_to_plain(here)


def test_a_process_that_fails_leaves_the_error_to_its_parent(
    processes: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG", "npu_runtime")
    assert compile_apart(tmp_path / "none", None, OPTIONS) is None
    (record,) = caplog.records
    assert record.getMessage() == f"the process that compiles {tmp_path / 'none'} failed; this process compiles it"


def test_an_interrupt_ends_the_process(processes: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(stdout: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_process, "_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_apart(tmp_path / "none", None, OPTIONS)


def test_a_process_that_has_imported_pytorch_compiles_itself(tmp_path: Path) -> None:
    assert compile_apart(tmp_path / "none", None, OPTIONS) is None


def test_loads_at_once_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_model.write_model(tmp_path / "small")
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    compiled, compile_checkpoint = [], loader.compile_checkpoint

    def counted(checkpoint: Any, options: CompileOptions) -> Any:
        compiled.append(options)
        return compile_checkpoint(checkpoint, options)

    monkeypatch.setattr(loader, "compile_checkpoint", counted)
    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(lambda _: Loader("cpu", None, 32, scoring=True).load(path)[0], range(2)))
    assert len(compiled) == 1 and program_to_plain(programs[0]) == program_to_plain(programs[1])
