"""Launches, barriers, bytes and threadgroup memory of decode steps, counted in programs compiled for Metal without
weights. The models have the widths of real ones and 3 layers; benchmarks/results has the whole ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import npu_compiler
from npu_compiler.support.ordering import barrier_groups
from npu_compiler.targets.metal.devices import DEVICES
from npusim import cli
from npusim.launch_counts import launch_counts

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STORED = json.loads((BENCHMARKS / "results" / "metal_counts.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", STORED, ids=lambda r: f"{r['model']}-{r['weight_format'] or 'bfloat16'}")
def test_a_layer_costs_what_the_stored_counts_say(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    counts = importlib.import_module("metal_counts").counts
    three, two = (counts(row["model"], row["weight_format"], layers) for layers in (3, 2))
    assert {key: three[key] - two[key] for key in row["layer"]} == row["layer"], "python benchmarks/metal_counts.py"
    assert three["shared_bytes"] == row["shared_bytes"] <= DEVICES[0].shared_bytes
    assert row["launches"] >= row["barriers"] > 0


def test_the_stored_counts_reach_their_aims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    aims = importlib.import_module("metal_counts").AIMS
    for row in STORED:
        layer = row["layer"]
        assert layer["launches"] <= aims["launches"] and layer["barriers"] <= aims["barriers"], row["model"]
        assert 1.0 <= row["bytes_read"] / row["least_bytes"] <= aims["read"], row["model"]


def test_phases_end_where_an_access_depends_on_one() -> None:
    assert barrier_groups([((), (1,)), ((), (2,)), ((3,), (4,))]) == [0, 0, 0]
    assert barrier_groups([((), (1,)), ((1,), (2,)), ((1,), (3,))]) == [0, 1, 1]  # a result is read
    assert barrier_groups([((1,), (2,)), ((3,), (1,))]) == [0, 1]  # what was read is overwritten
    assert barrier_groups([((), (1,)), ((), (1,)), ((), (5,))]) == [0, 1, 1]  # a result is overwritten
    assert barrier_groups([]) == []


def test_launches_without_a_grid_and_cpu_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 8)).eval()
    ir = npu_compiler.capture(model, (torch.zeros(4, 8),))
    for target in ("cpu", "metal"):
        program = npu_compiler.compile(ir, target=target)
        [(name, counts)] = launch_counts(program).items()
        assert name == "main" and counts.launches == len(program.entry().calls) > counts.barriers > 0
        assert (counts.shared_bytes is None) == (target == "cpu")
        program.save(tmp_path / f"{target}.npubin")
        assert cli.main(["describe", str(tmp_path / f"{target}.npubin"), "--counts", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counts"]["main"]["launches"] == counts.launches
