"""Steps reach their listeners, from every part that may take long, and end whatever happens."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import npu_compiler
import npu_runtime
from npu_compiler.support import log
from npu_compiler.support.errors import WeightError
from npu_compiler.support.progress import Step, listening, step
from npu_runtime.llm.find_model import hub_progress
from tests.support.toy_ir import RELU, Builder


def test_a_step_tells_its_beginning_changes_and_end() -> None:
    seen: list[tuple[str, int, int | None, bool]] = []
    with listening(lambda s: seen.append((s.text, s.done, s.total, s.finished))):
        with step("working", 3) as current:
            current.advance()
            current.update("still working", done=3)
        with pytest.raises(ZeroDivisionError), step("dividing"):
            raise ZeroDivisionError
    with step("unheard"):
        pass
    assert seen == [
        ("working", 0, 3, False), ("working", 1, 3, False), ("still working", 3, 3, False),
        ("still working", 3, 3, True), ("dividing", 0, None, False), ("dividing", 0, None, True),
    ]  # fmt: skip


def test_threads_advance_one_step() -> None:
    with step("counting", 1000) as current, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: current.advance(), range(1000)))
    assert current.done == 1000


def test_compiling_and_packing_are_steps(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    ir = Builder(weights=["w"]).node("y", "aten.mm.default", "x", "p_w").out("y")
    found: dict[str, Step] = {}
    with listening(lambda s: found.setdefault(s.text.partition(":")[0], s)):
        plan = npu_compiler.partition(ir)
        program = npu_compiler.compile(plan.ir)
        npu_runtime.load_weights(program, {"w": np.ones((4, 4), np.float32)})
    assert [*found] == [
        "checking the ops of toy",
        "compiling toy",
        "generating code for toy",
        "compiling C++",
        "packing weights",
    ]
    assert all(s.finished for s in found.values())
    assert all(s.total is None or s.done in (s.total, s.total - 1) for s in found.values())


def test_a_failed_step_ends() -> None:
    program = npu_compiler.compile(Builder(weights=["w"]).node("y", "aten.mm.default", "x", "p_w").out("y"))
    running: set[Step] = set()
    with listening(running.add), pytest.raises(WeightError):
        npu_runtime.load_weights(program, {})
    assert all(s.finished for s in running)


def test_bars_of_the_hub_become_bytes_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with step("downloading") as current:
        bar = hub_progress(current)
        with bar(total=3, unit="it") as files:
            files.update(1)
        assert (current.done, current.total) == (0, None)
        with bar(total=4_000_000, unit="B", mininterval=0) as bytes_:
            bytes_.update(1_500_000)
        assert (current.done, current.total, current.unit) == (1_500_000, 4_000_000, "B")
    assert capsys.readouterr() == ("", "")


def test_levels_are_shown_and_restored(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("npu_compiler.pipeline")
    with log.shown(log.level(2)):
        logger.log(log.KERNELS, "kernels")
        logger.log(log.GRAPHS, "graphs")
        logging.getLogger("npu_runtime.native").warning("%s", "careful")
    logger.info("unseen")
    assert capsys.readouterr().err == "npusim: kernels\nnpusim: warning: careful\n"
    assert [log.level(n) for n in range(6)] == [30, 20, 10, 8, 6, 6]


def test_a_library_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_DEBUG", raising=False)
    npu_compiler.compile(Builder().node("y", RELU, "x").out("y"))
    assert capsys.readouterr() == ("", "")
