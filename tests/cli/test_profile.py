"""Profiles: what they measure, how they are saved, compared and shown."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npusim
from npu_compiler.frontend import capture
from npu_compiler.pipeline import compile_ir, compile_unshared
from npu_compiler.support.errors import ConfigError, InputError
from npu_compiler.target_config import Roofline
from npusim.cli import main
from npusim.profiling import accuracy, bounds, collect
from npusim.profiling.compare import annotated, compare, slower
from npusim.profiling.report import ProfileReport, read_report

FLAT = Roofline({"float32": 1e11}, ((1 << 20, 1e11), (float("inf"), 1e10)), "made up")


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        pooled = torch.special.bessel_j1(torch.relu(self.conv(x)).mean((2, 3)))
        return self.fc(pooled) + self.calls


def tower() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    return Tower().eval(), (torch.randn(1, 3, 16, 16),)


@pytest.fixture(scope="module")
def model() -> npusim.Model:
    return npusim.build(*tower(), threads=1)


@pytest.fixture(scope="module")
def report(model: npusim.Model) -> ProfileReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "roofline_of", lambda program, backend: FLAT)
        return model.profile(runs=3, warmup=1)


def test_every_step_has_its_row(report: ProfileReport, model: npusim.Model) -> None:
    (section,) = report.sections
    assert [r.index for r in section.rows] == list(range(len(section.rows)))
    assert {r.device for r in section.rows} == {"npu", "host", "transfer"}
    kernels = sum(len(p.entries["main"].calls) for p in model.programs)
    assert sum(r.device == "npu" for r in section.rows) == kernels
    assert all(r.end >= r.start and r.seconds >= r.least >= 0 for r in section.rows)
    assert all(r.start >= before.end - 1e-9 for before, r in zip(section.rows, section.rows[1:], strict=False))
    transfers = [r for r in section.rows if r.device == "transfer"]
    assert [r.read for r in transfers] == [t.nbytes for t in model.plan.transfers]


def test_a_row_says_where_it_comes_from_and_what_it_reads(report: ProfileReport) -> None:
    rows = report.sections[0].rows
    conv = next(r for r in rows if "conv2d" in r.ops and r.kind == "conv2d")
    assert "conv" in conv.module and conv.places[0].source.split(":")[0].endswith("test_profile.py")
    assert any("float32[1, 3, 16, 16]" in t for r in rows for t in r.inputs) and conv.dtype == "float32"
    host = next(r for r in rows if r.device == "host")
    assert host.ops == ("special_bessel_j1",) and host.after and rows[host.after[0]].index < host.index
    (missing,) = report.not_on_npu
    assert missing.node == "special_bessel_j1" and "j1" in missing.op and missing.reason


def test_the_bound_is_the_larger_of_moving_and_computing(report: ProfileReport) -> None:
    for r in report.sections[0].rows:
        if r.device == "npu":
            assert r.roof == pytest.approx(max(r.flops / 1e11, (r.read + r.written) / 1e11))  # all of it fits the cache
            assert r.bound == ("compute" if r.flops > r.read + r.written else "memory")
            assert r.lost == pytest.approx(max(0, r.seconds - r.roof))
        else:
            assert r.lost == r.seconds and r.roof == 0


def test_data_that_no_cache_can_hold_comes_from_memory(model: npusim.Model) -> None:
    small = replace(FLAT, bandwidths=((64, 1e11), (float("inf"), 1e10)))
    program = model.programs[0]
    entry = program.entries["main"]
    for call, bound in zip(entry.calls, bounds.bounds(program, entry, small), strict=True):
        if call.bytes_read + call.bytes_written > 1000:
            assert bound.seconds > 0.8 * (call.bytes_read + call.bytes_written) / 1e10
    assert {b.seconds for b in bounds.bounds(program, entry, None)} == {0.0}


@pytest.mark.parametrize(("points", "fewer"), [(16, 2.25), (25, 1.44), (36, 4)])
def test_the_bound_of_winograd_counts_its_multiplications(model: npusim.Model, points: int, fewer: float) -> None:
    program = model.programs[0]
    entry = program.entries["main"]
    call = next(c for c in entry.calls if c.kind == "conv2d")
    weight = next(b for b in program.buffers if b.id == call.inputs[1])
    shape = (1, 1, points, 3, 32)
    buffers = tuple(replace(b, shape=shape) if b is weight else b for b in program.buffers)
    made = replace(entry, calls=(replace(call, kind="winograd", flops=10**9),))
    (bound,) = bounds.bounds(replace(program, buffers=buffers), made, FLAT)
    assert bound.kind == "compute" and bound.seconds == pytest.approx(1e9 / fewer / 1e11)


def test_the_peak_of_the_arena_has_owners(report: ProfileReport) -> None:
    for arena in report.sections[0].arenas:
        alive = [b for b in arena.blocks if b.first <= arena.peak <= b.last]
        assert arena.live == sum(b.nbytes for b in alive) <= arena.nbytes or not alive
        assert [arena.blocks[n].nbytes for n in arena.owners] == sorted((b.nbytes for b in alive), reverse=True)
    assert {h.name for h in report.held if h.kind == "state"} <= {"calls"} and any(
        h.kind == "weight" for h in report.held
    )


def test_json_is_read_back_as_it_was(report: ProfileReport, tmp_path: Path) -> None:
    assert read_report(report.save(tmp_path / "a.json")) == report
    for damage in ({"schema": 9}, {"schema": 1}, {**report.to_json(), "sections": [3]}, []):
        (tmp_path / "b.json").write_text(json.dumps(damage))
        with pytest.raises(InputError, match=r"b\.json is (not a profile|damaged)"):
            read_report(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="saved as html, json, trace, model-explorer, not as 'png'"):
        report.save(tmp_path / "a.png")


def test_a_notebook_and_print_show_tables(report: ProfileReport) -> None:
    text, page = str(report), report._repr_html_()
    assert "lost µs" in text and "not on the NPU" in text and "of the roofline" in text
    assert page.count("<tr>") == 1 + len(report.sections[0].rows) and "lost µs" in page


def test_the_trace_has_the_run_that_is_shown(report: ProfileReport, tmp_path: Path) -> None:
    events = json.loads(report.save(tmp_path / "t", "trace").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans] == [r.name for r in report.sections[0].rows]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"cpu", "host", "transfer"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)


def test_model_explorer_gets_a_connected_graph(report: ProfileReport, tmp_path: Path) -> None:
    made = json.loads(report.save(tmp_path / "g", "model-explorer").read_text())
    (graph,) = made["graphs"]
    ids = {n["id"] for n in graph["nodes"]}
    edges = [(e["sourceNodeId"], n["id"]) for n in graph["nodes"] for e in n["incomingEdges"]]
    assert len(ids) == len(report.sections[0].rows) and edges and all(a in ids and int(a) < int(b) for a, b in edges)
    assert {n["namespace"] for n in graph["nodes"]} >= {"conv", "fc"}


def changed(report: ProfileReport, factor: float) -> ProfileReport:
    section = report.sections[0]
    rows = tuple(replace(r, seconds=r.seconds * factor) for r in section.rows)
    return replace(report, sections=(replace(section, rows=rows),))


def test_kernels_are_compared_with_float64(model: npusim.Model, tmp_path: Path) -> None:
    report = model.profile(runs=1, warmup=0, accuracy=True)
    errors = {r.name: r.error for r in report.sections[0].rows if r.device == "npu"}
    measured = [e for e in errors.values() if e is not None and e.rms is not None]
    assert all(e is not None and (e.note == "") == (e.rms is not None) for e in errors.values())
    assert len(measured) >= 3 and all(0 <= e.rms < 1e-6 for e in measured if e.rms is not None)
    assert any(e.rms for e in measured)  # a product rounds
    assert read_report(report.save(tmp_path / "a.json")) == report
    with pytest.raises(ConfigError, match="from its IR"):
        npusim.profile(model.executor.executors[0], accuracy=True)


def test_half_precision_errors_are_those_of_rounding_the_results() -> None:
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    built = npusim.build(mlp.eval(), (torch.randn(16, 64),), dtype="bfloat16", threads=1)
    for r in built.profile(runs=1, warmup=0, accuracy=True).sections[0].rows:
        assert r.error is not None and r.error.rms is not None, r
        assert r.error.rms < 2**-9  # half a unit in the last place of bfloat16; rounding errors average 2**-9 / sqrt(3)


def test_the_error_of_a_wrong_result_is_large() -> None:
    right = np.linspace(1, 2, 100)
    found = accuracy._compared([(np.where(np.arange(100) == 7, 3.0, right), right)])
    assert found.largest == pytest.approx((3 - right[7]) / 2) and found.rms is not None and found.rms > 0.1
    assert accuracy._compared([(right, np.full(100, np.inf))]).note == "it has no finite result"


def test_buffers_that_share_no_memory_change_no_result() -> None:
    ir = capture(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))), (torch.zeros(2, 16),))
    apart, shared = compile_unshared(ir), compile_ir(ir)
    assert apart.schedule is not None and apart.program is not None
    blocks = sorted((b.offset, b.offset + b.nbytes) for b in apart.schedule.buffers if b.kind == "arena")
    assert len(blocks) == 3 and all(end <= begin for (_, end), (begin, _) in itertools.pairwise(blocks))
    assert apart.program.entries["main"].arena_bytes > shared.entries["main"].arena_bytes


def test_comparison_has_a_threshold(report: ProfileReport) -> None:
    for factor, verdict in ((1.04, "same"), (1.06, "slower"), (0.9, "faster")):
        (section,) = changes = compare(report, changed(report, factor))
        assert section.verdict(0.05) == verdict and slower(changes, 0.05) == (verdict == "slower")
    (seen,) = annotated(report, changes).sections
    assert seen.before == report.sections[0].kernel_seconds and [r.before for r in seen.rows] == [
        r.seconds for r in report.sections[0].rows
    ]
    gone = replace(report.sections[0], rows=report.sections[0].rows[:-1])
    (section,) = compare(report, replace(report, sections=(gone,)))
    assert [c.old for c in section.changes if c.new is None] == [report.sections[0].rows[-1]]
    with pytest.raises(InputError, match="nothing in common"):
        compare(report, replace(report, sections=(replace(gone, name="other"),)))


def test_the_verb(
    report: ProfileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "roofline_of", lambda program, backend: FLAT)
    name, quick = f"{__name__}:tower", ["--runs", "2", "--warmup", "1", "--threads", "1"]
    page, data = tmp_path / "p.html", tmp_path / "p.json"
    assert main(["profile", name, *quick, "-o", str(page), "-o", str(data), "--trace", str(tmp_path / "t.json")]) == 0
    text = capsys.readouterr().out
    assert "lost µs" in text and "special_bessel_j1" in text and "of the roofline" in text
    assert page.stat().st_size > 1000 and (tmp_path / "t.json").exists()
    slow = changed(read_report(data), 1e6).save(tmp_path / "slow.json")
    assert main(["profile", name, *quick, "--compare", str(slow), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"][0]["verdict"] == "faster"
    fast = changed(report, 1e-6).save(tmp_path / "fast.json")
    assert main(["profile", name, *quick, "--compare", str(fast), "--threshold", "50%"]) == 4
    assert "slower" in capsys.readouterr().out
    assert main(["profile", f"{__name__}:nothing"]) == 1
    assert "name a function of a module" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["profile", name, "--threshold", "much"])
