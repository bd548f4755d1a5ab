"""Hostile ``.npubin`` files: what is in them is shown harmlessly, costs a bounded amount, and need not be believed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npu_runtime
from npu_compiler.artifact import serialize
from npu_compiler.artifact.program import BufferSpec, CompiledProgram
from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.support.errors import ArtifactError, BackendError
from npu_compiler.targets.simt.lang import program as launch_list
from npusim.cli import main

from ..support import handmade
from ..unit.artifact.test_artifact import repack


def forged(tmp_path: Path, **changes: Any) -> str:
    """A file of the handmade program whose checksum is right and whose fields are ``changes``."""
    path = tmp_path / "forged.npubin"
    path.write_bytes(repack({**serialize.program_to_plain(handmade.program()), **changes}))
    return str(path)


# -- what is shown ----------------------------------------------------------------------------------------------------
def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\r\n\u202eentry fake\x9b31m"
    path = forged(tmp_path, name=evil, build={"compiler\x1b[1m": evil})
    assert main(["describe", path]) == 0
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "program \\x1b]0;title\\x07\\x1b[2J\\r\\n\\u202eentry fake\\x9b31m: compiled for cpu" in shown
    assert main(["run", path]) == 1  # it needs weights: the error has the file's name
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().err)


def test_json_has_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = forged(tmp_path, build={"a": math.nan, "b": [math.inf, {"c": -math.inf}]})
    assert main(["describe", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert shown["program"]["build"] == {"a": "nan", "b": ["inf", {"c": "-inf"}]}


@pytest.mark.parametrize("name", ["x" * 300, "../x", "", "a/b", "a\0", ".x"])
def test_names_of_sources_are_names_of_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"sources: expected names of sources like"):
        CompiledProgram.load(forged(tmp_path, sources={name: ""}))


# -- launch lists -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"binary\.entries: expected a map"),
        ({"e": 3}, r"binary\.entries\.e: expected a list"),
        ({"e": [[]]}, r"binary\.entries\.e\[0\]: expected a list of 7"),
        ({"e": [["f", "1", 1, 0, [], False, []]]}, r"binary\.entries\.e\[0\]\[1\]: expected a whole number"),
        (
            {"e": [["f", 1, 1, 0, [[-2, 0]], False, []]]},
            r"binary\.entries\.e\[0\]\[4\]\[0\]\[0\]: expected a whole number from -1",
        ),
        (
            {"e": [["f", 1, 1, 0, [], False, [[1, 2, []]]]]},
            r"binary\.entries\.e\[0\]\[6\]\[0\]\[2\]: expected a list of 6",
        ),
    ],
)
def test_a_damaged_launch_list(entries: Any, message: str) -> None:
    import msgpack

    binary = msgpack.packb({"version": launch_list.VERSION, "entries": entries, "code": {}})
    with pytest.raises(ArtifactError, match=f"damaged launch list: {message}"):
        launch_list.unpack(binary)


# -- objects that do not match their sources --------------------------------------------------------------------------
def test_from_source_runs_the_sources(tmp_path: Path) -> None:
    program = handmade.program()
    other = handmade.SOURCE.replace("v > 0 ? v : 0", "v * 7")
    assert other != handmade.SOURCE
    forged = replace(program, binary=handmade.binary(other))
    serialize.stamp_layout(forged)
    given, weights = handmade.inputs(), handmade.weights()
    expected = handmade.expected(given)["y"]
    assert not np.allclose(npu_runtime.load(forged, weights).run(given)["y"], expected)
    assert np.allclose(npu_runtime.load(forged, weights, from_source=True).run(given)["y"], expected)
    garbage = replace(program, binary=b"\x7fELF garbage", requires=("a CPU from the future",))
    assert np.allclose(npu_runtime.load(garbage, weights, from_source=True).run(given)["y"], expected)


def test_what_cannot_be_rebuilt() -> None:
    with pytest.raises(BackendError, match="its binary is not to be used; it holds no source"):
        npu_runtime.load(replace(handmade.program(), sources={}), handmade.weights(), from_source=True)
    with pytest.raises(BackendError, match="only programs for the CPU are rebuilt"):
        npu_runtime.load(replace(handmade.program(), target="cuda"), handmade.weights(), from_source=True)
    with pytest.raises(BackendError, match="could not be rebuilt from its source either"):
        broken = replace(handmade.program(), sources={"program": "this is not C++"})
        npu_runtime.load(broken, handmade.weights(), from_source=True)


def test_from_source_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import safetensors.numpy

    handmade.program(binary=b"\x7fELF garbage").save(tmp_path / "a.npubin")
    safetensors.numpy.save_file(handmade.weights(), tmp_path / "a.safetensors")
    np.savez(tmp_path / "in.npz", **handmade.inputs())
    call = ["run", str(tmp_path / "a.npubin"), "--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out")]
    assert main([*call, "--from-source"]) == 0
    with np.load(tmp_path / "out") as outputs:
        np.testing.assert_allclose(outputs["y"], handmade.expected(handmade.inputs())["y"], rtol=1e-6)
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "A .npubin is native code" in " ".join(capsys.readouterr().out.split())


# -- recipes that cost too much ---------------------------------------------------------------------------------------
def with_recipes(build: Callable[[Graph], dict[str, Value]]) -> Any:
    """The handmade program with further recipes, whose results are constants of their own; as plain data, unchecked."""
    program = handmade.program()
    made = build(program.recipes)
    program.recipes.outputs += list(made.items())
    program.buffers += [BufferSpec(100 + i, "const", v.dtype, v.shape, n) for i, (n, v) in enumerate(made.items())]
    return serialize.program_to_plain(program)


def refused(plain: Any, message: str) -> None:
    data = repack(plain)
    start = time.process_time()
    with pytest.raises(ArtifactError, match=message):
        CompiledProgram.loads(data)
    assert time.process_time() - start < 30, "it took too long to refuse"


def test_many_recipes_that_expand_a_number() -> None:
    """Each makes 16 MB of four bytes, which is allowed; 600 are 9.5 GB."""
    refused(
        with_recipes(lambda g: {f"e{i}": g.const(np.float32(i)).reshape(1).expand(2**22) for i in range(600)}),
        r"recipes\.nodes\[\d+\]: the recipes up to here take \d+ bytes more than their weights allow",
    )


def test_many_recipes_that_multiply() -> None:
    def build(g: Graph) -> dict[str, Value]:
        square = g.const(np.float32(1)).reshape(1, 1).expand(2048, 2048)
        x = square
        for _ in range(500):
            x = x.matmul(square).slice(0, 0, 2048)
        return {"x": x.slice(0, 0, 1)}

    refused(with_recipes(build), "take [0-9]+ (bytes|operations) more than")


def test_a_long_formula_over_many_elements() -> None:
    def build(g: Graph) -> dict[str, Value]:
        e = expr.index(0).cast("float32")
        for _ in range(3000):
            e = expr.fn("exp")(e)
        return {"x": g.elementwise((2**20,), [], e)}

    refused(with_recipes(build), "operations more than")


def test_attention_whose_scores_would_fill_the_memory() -> None:
    def build(g: Graph) -> dict[str, Value]:
        q = g.const(np.zeros((1, 1, 2**18, 1), np.float32))
        return {"x": g.attention(q, q, q, None, 1.0, False)}

    refused(with_recipes(build), "bytes more than their weights allow")


@pytest.mark.parametrize("doublings", [60, 2000])
def test_a_formula_that_doubles(doublings: int) -> None:
    """As a tree it has 2 ** n parts; it is loaded, shown, evaluated and named in an error as the n + 1 parts it is."""

    def build(g: Graph) -> dict[str, Value]:
        bias = g.const(np.zeros(4, np.float32))
        e = expr.load(0, "float32", [expr.index(0) + 9])
        for _ in range(doublings):
            e = e + e
        return {"x": g.elementwise((4,), [bias], e)}

    program = CompiledProgram.loads(repack(with_recipes(build)))
    assert program.describe() and program.to_json()
    with pytest.raises(ArtifactError, match="index out of range in ") as caught:
        npu_runtime.load_weights(program, handmade.weights())
    assert len(str(caught.value)) < 100_000


def test_many_entry_points() -> None:
    plain = serialize.program_to_plain(handmade.program())
    empty = {**plain["entries"][1], "inputs": [], "outputs": [], "calls": [], "updates": []}
    plain["entries"] = [{**empty, "name": f"step {i}"} for i in range(20_000)]
    data = repack(plain)
    start = time.process_time()
    assert len(CompiledProgram.loads(data).entries) == 20_000
    assert time.process_time() - start < 15  # a quadratic search for equal names takes longer
