"""Mixed models on the command line: compiled to one file, described, run and measured; what is excluded and refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.aten.json_writer import save_ir
from npu_compiler.mixed.program import MixedProgram, load_program
from npusim import cli

from ..support.mixed_model import example, graph, weights
from ..support.toy_ir import HEAVY, ODD, RELU, RELU_, Builder

torch = pytest.importorskip("torch")
from npu_runtime import execute_cpu_partition  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixed model as IR JSON, compiled with its sources, its weights and an input."""
    folder = tmp_path_factory.mktemp("mixed")
    save_ir(graph(), folder / "small.json")
    np.savez(folder / "w.npz", **weights())
    np.save(folder / "x.npy", example())
    output = ["-o", str(folder / "small.npubin"), "--emit-source", str(folder / "source")]
    assert cli.main(["compile", str(folder / "small.json"), *output, "-q"]) == 0
    return folder


@pytest.fixture
def chain(tmp_path: Path) -> str:
    """exp, relu in place, gelu, sigmoid."""
    b = Builder().node("e", "aten.exp.default", "x").node("r", RELU_, "e").node("g", "aten.gelu.default", "r")
    save_ir(b.node("s", "aten.sigmoid.default", "g").out("s"), tmp_path / "chain.json")
    return str(tmp_path / "chain.json")


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == status
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_one_file_has_it_all(folder: Path) -> None:
    model = load_program(folder / "small.npubin")
    assert isinstance(model, MixedProgram) and model.programs.keys() == {0, 2}
    written = {str(p.relative_to(folder / "source")) for p in (folder / "source").rglob("*.*")}
    assert written == {f"p{id}/{name}" for id, p in model.programs.items() for name in p.sources}


def test_it_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", str(folder / "small.npubin"), "--input", str(folder / "x.npy")]
    assert cli.main(run) == 1
    assert (
        f"needs 3 weights: pass --weights, or put them into {folder / 'small.safetensors'}" in capsys.readouterr().err
    )
    run += ["--weights", str(folder / "w.npz"), "--output", str(tmp_path / "out.npz")]
    assert cli.main(run) == 0
    wanted = execute_cpu_partition(graph(), {"x": example()}, weights())
    with np.load(tmp_path / "out.npz") as found:
        assert sorted(found) == sorted(wanted)
        for name in found:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_it_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", str(folder / "small.npubin")]) == 0
    text = capsys.readouterr().out
    assert "mixed model small" in text and "transfer sum host -> npu, 64 bytes" in text
    assert f"first      {ODD}" in text and "no lowering for" in text
    data = as_json(capsys, "describe", str(folder / "small.npubin"))
    assert data["program"]["host_ops"] == ["aten.special_bessel_j0.default", ODD]


def test_it_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "bench", str(folder / "small.npubin"), "--seconds", "0.01")
    assert data["results"]["npusim"]["runs"] >= 10


def test_what_is_written_says_that_it_needs_pytorch(
    chain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", str(tmp_path / "c.npubin"), "--force-cpu", "aten.gelu.default,aten.exp.default"]
    assert cli.main(["compile", chain, *options]) == 0
    out = capsys.readouterr().out
    assert "on the host: aten.exp.default, aten.gelu.default" in out and "running it needs PyTorch" in out


@pytest.mark.parametrize("spelling", ["aten.relu_.default", "aten.relu.default", "r"])
def test_ops_are_excluded_in_every_spelling(spelling: str, chain: str, capsys: pytest.CaptureFixture[str]) -> None:
    exact = ["--force-cpu", spelling, "--no-minimise-transfers"]
    data = as_json(capsys, "compile", chain, *exact, "--until", "fuse")
    assert [n for n, r in data["plan"]["reasons"].items() if r["rule"] == "forced"] == ["r"]
    assert data["plan"]["reasons"].keys() == {"r"}, "and nothing else moves"
    assert data["graphs"].keys() == {"0", "2"}
    moved = as_json(capsys, "explain", chain, "--force-cpu", spelling)
    assert moved["npu_percent"] < 75, "by default cheap neighbours move, too"


def test_unknown_ops_are_refused_with_suggestions(chain: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("compile", "explain"):
        message = as_json(capsys, verb, chain, "--force-cpu", "g,aten.relu.defualt", status=1)["error"]["message"]
        assert "'aten.relu.defualt' is neither a node nor an op" in message and f"did you mean {RELU}" in message


def test_an_op_that_can_run_nowhere_is_found_by_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_ir(Builder().node("n", "aten.no_such_op.default", "x").out("n"), tmp_path / "n.json")
    output = tmp_path / "n.npubin"
    error = as_json(capsys, "compile", str(tmp_path / "n.json"), "-o", str(output), status=1)["error"]
    assert error["type"] == "CompileError" and "has no op aten.no_such_op.default" in error["message"]
    assert not output.exists()


def test_every_partition_is_dumped(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compile", str(folder / "small.json"), "--dump", str(tmp_path), "--disable", "layout"]
    assert cli.main([*argv, "-o", str(tmp_path / "m.npubin")]) == 0
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")}
    assert {"p0_0_lower.txt", "p2_0_lower.txt", "p2_7_memory.txt", "p0/main.cpp", "p2/main.cpp"} <= names
    assert "NPU_DUMP" not in os.environ
    assert not {n for n in names if n.startswith("0_")}
    assert cli.main(["compile", str(folder / "small.json"), "--until", "memory"]) == 0
    assert "partition 2\n" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["metal", "cuda:sm_80"])
def test_other_targets(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    save_ir(Builder().node("o", ODD, "x").node("y", RELU, "x").node("z", HEAVY, "o", "y").out("z"), path)
    output = tmp_path / "m.npubin"
    if cli.main(["compile", str(path), "--target", target, "-o", str(output)]) != 0:
        pytest.skip(capsys.readouterr().err)  # no NVRTC
    model = load_program(output)
    assert isinstance(model, MixedProgram) and model.device.startswith(target.partition(":")[0])
    assert {p.target for p in model.programs.values()} == {model.target} != {"cpu"}


def test_language_models_run_whole_on_the_npu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("compile", "bench"):
        assert cli.main([verb, "smollm2-135m", "--force-cpu", "aten.silu.default"]) == 1
        assert "do not apply to a language model" in capsys.readouterr().err


def test_a_file_for_another_verb_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("explain", "compile"):
        assert cli.main([verb, str(folder / "small.npubin")]) == 1
        assert "small.npubin is compiled already: run, bench, profile and describe take it" in capsys.readouterr().err
    data = as_json(capsys, "profile", str(folder / "small.npubin"), "--runs", "2")
    assert {row["device"] for row in data["sections"][0]["rows"]} == {"npu", "host", "transfer"}
