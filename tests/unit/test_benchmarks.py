"""What the CPU benchmarks compute from their measurements."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a script of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def script(name: str) -> ModuleType:
        return importlib.import_module(name)

    return script


def test_a_ratio_compares_turns_of_one_round(load: Any) -> None:
    turns = load("turns")
    # The machine becomes 10 times as slow after the first of three rounds; ours takes half the time throughout.
    ours = [turns.Turn([t, t], True) for t in (1.0, 10.0, 10.0)]
    peer = [turns.Turn([t, 3 * t], True) for t in (1.0, 10.0, 10.0)]
    slow = [turns.Turn([t], True) for t in (9.0, 90.0, 90.0)]
    assert turns.ratio(ours, [slow, peer]) == 0.5
    disturbed = [turns.Turn([1e-3], False), *peer, *peer]
    assert turns.summary(disturbed)["min_ms"] == 1000.0  # without the turn that other processes disturbed


def test_largest_scores(load: Any) -> None:
    kept = load("cpu").largest_kept
    exact = np.array([[5.0, 4.0, 1.0], [3.0, 2.9, 0.0]])
    assert kept(exact, exact, 1, 0.5)
    assert kept(np.array([[5.0, 4.0, 1.0], [2.9, 3.0, 0.0]]), exact, 1, 0.5)  # too near to each other to tell
    assert not kept(np.array([[4.0, 5.0, 1.0], [3.0, 2.9, 0.0]]), exact, 1, 0.5)
    assert kept(np.array([[4.0, 5.0, 1.0], [2.9, 3.0, 0.0]]), exact, 2, 0.5)
    assert not kept(np.array([[4.0, 1.0, 5.0], [2.9, 3.0, 0.0]]), exact, 2, 0.5)


def test_parts_of_a_run_replace_rows_of_the_same_machine(load: Any) -> None:
    merged = load("readme").merged
    whole = {
        "hardware": "A", "date": "1", "versions": {"torch": "2"}, "command": "c",
        "rows": [{"n": 1, "ms": 1}, {"n": 2, "ms": 2}],
    }  # fmt: skip
    part = {"hardware": "A", "date": "2", "versions": {"openvino": "3"}, "rows": [{"n": 2, "ms": 5}, {"n": 3, "ms": 6}]}
    both = merged(whole, part, "rows", lambda row: row["n"])
    assert both == {
        "hardware": "A", "date": "2", "versions": {"torch": "2", "openvino": "3"}, "command": "c",
        "rows": [{"n": 1, "ms": 1}, {"n": 2, "ms": 5}, {"n": 3, "ms": 6}],
    }  # fmt: skip
    for other, message in (
        ({"hardware": "B"}, "those of A, the part is from B"),
        ({"versions": {"torch": "1"}}, "torch"),
    ):
        with pytest.raises(ValueError, match=message):
            merged(whole, part | other, "rows", lambda row: row["n"])


def test_a_metric_has_fewer_rounds_if_its_ratios_agree(load: Any) -> None:
    settled = load("llm_cpu").settled
    assert settled({"npusim": [1.0, 2.0, 3.0], "llama.cpp": [2.0, 4.0, 6.06]}, 0.02)  # the machine became slower
    assert not settled({"npusim": [1.0, 2.0, 3.0], "llama.cpp": [2.0, 4.0, 6.3]}, 0.02)
    assert not settled({"npusim": [1.0, 1.001], "llama.cpp": [2.0, 2.0]}, 0.0) and not settled({}, 1.0)


def test_results_of_a_model_are_stored_beside_those_of_other_days(load: Any, tmp_path: Path) -> None:
    begun, path = load("llm_gguf").begun, tmp_path / "cpu_gguf.json"
    fresh = {"hardware": "A", "date": "2", "versions": {"llama-cpp-python": "1"}, "models": []}
    assert begun(fresh, path) == fresh
    path.write_text(json.dumps(fresh | {"date": "1", "models": [{"model": "q"}, {"model": "s", "date": "0"}]}))
    assert [m["date"] for m in begun(fresh, path)["models"]] == ["1", "0"]
    assert begun(fresh | {"versions": {"llama-cpp-python": "2"}}, path)["models"] == []
