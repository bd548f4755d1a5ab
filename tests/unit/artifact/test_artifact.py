"""The .npubin file: what is written is read, what is damaged is refused with its place, a kill leaves no harm."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from npu_compiler.artifact import container, serialize
from npu_compiler.artifact.describe import recipe_words
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.graph import expr, interp, verify
from npu_compiler.graph.graph import Graph
from npu_compiler.graph.text import graph_text
from npu_compiler.support.errors import ArtifactError
from npu_compiler.support.records import Field
from npu_compiler.support.text import si

from ...support import handmade

ROOT = Path(__file__).parents[3]


def repack(plain: Any) -> bytes:
    """A file with these contents and a header that fits them."""
    return with_header(msgpack.packb(plain))


def with_header(body: bytes, contents: int = container.PROGRAM) -> bytes:
    digest = hashlib.sha256(body).digest()
    return container.HEADER.pack(container.MAGIC, container.FORMAT_VERSION, contents, len(body), digest) + body


# -- round trip -----------------------------------------------------------------------------------------------------
def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    program = handmade.rich_program()
    program.save(tmp_path / "a.npubin")
    again = CompiledProgram.load(tmp_path / "a.npubin")
    for field in ("name", "target", "dtype", "entries", "buffers", "weights", "sources", "binary", "requires", "build"):
        assert getattr(again, field) == getattr(program, field), field
    assert graph_text(again.recipes).count("\n") == graph_text(program.recipes).count("\n")
    assert serialize.dumps(again) == serialize.dumps(program)  # the bytes depend on nothing but the program


def test_recipes_of_every_op_keep_their_meaning() -> None:
    graph = handmade.every_op()
    assert {n.op for n in graph.nodes} == set(verify.ATTRS) - {"input", "state"}
    again = serialize.graph_from_plain(Field(msgpack.unpackb(msgpack.packb(serialize.graph_to_plain(graph)))))
    before, after = (interp.run(g, {}, handmade.every_weight()) for g in (graph, again))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        np.testing.assert_array_equal(array, after[name])
    assert [n.sources for n in again.nodes] == [n.sources for n in graph.nodes]


def test_special_constants_survive() -> None:
    g = Graph()
    x = g.weight("x", (2,), "float32")
    values = [-0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 0.1]
    g.outputs = [(str(i), g.pointwise(lambda a, v=v: expr.maximum(a, v) + v, x)) for i, v in enumerate(values)]
    g.outputs.append(("int", g.pointwise(lambda a: a.cast("int64") * (2**63 - 1), x)))
    again = serialize.graph_from_plain(Field(msgpack.unpackb(msgpack.packb(serialize.graph_to_plain(g)))))
    data = {"x": np.array([1, -1], np.float32)}
    for (name, a), b in zip(interp.run(g, {}, data).items(), interp.run(again, {}, data).values(), strict=True):
        assert a.tobytes() == b.tobytes(), name


def test_a_file_gets_the_mode_of_any_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npubin"
    handmade.program().save(path)
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


# -- damage ---------------------------------------------------------------------------------------------------------
def test_every_truncation_and_extension_is_found() -> None:
    data = serialize.dumps(handmade.program())
    for length in [*range(0, 80), *range(80, len(data), 997), len(data) - 1]:
        with pytest.raises(ArtifactError, match="offset"):
            CompiledProgram.loads(data[:length])
    with pytest.raises(ArtifactError, match="offset 16"):
        CompiledProgram.loads(data + b"\0")


def test_every_flipped_bit_of_the_header_and_many_of_the_body_are_found() -> None:
    data = serialize.dumps(handmade.program())
    body = random.Random(0).sample(range(8 * container.HEADER.size, 8 * len(data)), 300)
    for bit in [*range(8 * container.HEADER.size), *body]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactError, match="offset"):
            CompiledProgram.loads(bytes(damaged))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("entries", 0, "calls", 1, "inputs", 0), 99, r"entries\[0\].calls\[1\].inputs\[0\]: there is no buffer 99"),
        (("entries", 0, "calls", 1, "flops"), -1, r"entries\[0\].calls\[1\].flops: expected a whole number from 0"),
        (("entries", 0, "calls", 1, "flops"), True, r"entries\[0\].calls\[1\].flops: expected a whole number"),
        (("entries", 0, "calls", 0, "outputs", 0), 4, r"calls\[0\].outputs\[0\]: buffer 4 \(weight\) is read only"),
        (("entries", 0, "calls", 0, "inputs", 0), 6, r"buffer 6 is read before it is written"),
        (("entries", 0, "calls", 0, "inputs", 0), 7, r"buffer 7 is the input of another entry point"),
        (("entries", 0, "symbol"), "system", r"entries\[0\].symbol: 'system' is not like"),
        (("entries", 0, "symbol"), "npu_stop", r"entries\[0\].symbol: 'npu_stop' is not like"),
        (("entries", 0, "arena_bytes"), 100, r"calls\[0\].outputs\[0\]: buffer 6 ends at byte 112 of an arena of 100"),
        (("entries", 0, "arena_bytes"), 2**60, r"entries\[0\].arena_bytes: expected a whole number"),
        (("entries", 0, "inputs", 0, "shape"), [3, 5], r"entries\[0\].inputs\[0\].shape: .*not what buffer 0 holds"),
        (
            ("entries", 0, "inputs", 0, "shape"),
            [3, -4],
            r"entries\[0\].inputs\[0\].shape\[1\]: expected a whole number",
        ),
        (("entries", 0, "inputs", 0, "dtype"), "float16", r"entries\[0\].inputs\[0\].shape: .*not what buffer 0 holds"),
        (("entries", 0, "inputs", 0, "dtype"), "quad", r"entries\[0\].inputs\[0\].dtype: expected one of"),
        (("entries", 0, "inputs", 1, "name"), "x", r"entries\[0\].inputs\[0\].name: 'x' is listed twice"),
        (("entries", 0, "outputs", 0, "buffer"), 8, r"entries\[0\].outputs\[0\].shape"),
        (("entries", 1, "name"), "main", r"entries\[1\].name: there are two entry points 'main'"),
        (("entries", 1, "updates", 0, 0), "nobody", r"entries\[1\].updates\[0\]: 'nobody' is not a state"),
        (("entries",), [], "entries: there is no entry point"),
        (("buffers", 2, "id"), 0, r"buffers\[2\].id: 0 is used twice"),
        (("buffers", 2, "kind"), "magic", r"buffers\[2\].kind"),
        (("buffers", 6, "offset"), 66, r"buffers\[6\].offset: 66 is not a place for float32"),
        (("buffers", 4, "shape"), [5], r"buffers\[4\].shape: its recipe makes"),
        (("buffers", 4, "name"), "other", r"buffers\[4\].name: no recipe makes 'other'"),
        (("buffers", 9, "shape"), [2**40, 2**40], r"buffers\[9\].shape: .* too large"),
        (("weights", 0, "shape"), [2], r"recipes.nodes\[.\].attrs.key: 'layer.weight'"),
        (("weights", 1, "key"), "layer.weight", r"weights\[1\].key: 'layer.weight' is listed twice"),
        (("recipes", "nodes", 0, "op"), "bomb", r"recipes.nodes\[0\].op: expected one of"),
        (("recipes", "nodes", 0, "op"), "const", r"recipes.nodes\[0\].attrs: expected the fields data"),
        (("recipes", "nodes", 3, "inputs", 0, 0), 7, r"recipes.nodes\[3\].inputs\[0\]\[0\]: expected an earlier node"),
        (("recipes", "nodes", 3, "attrs", "expr"), [], r"recipes.nodes\[3\].attrs.expr: an expression is a non-empty"),
        (("recipes", "nodes", 3, "outputs", 0, 1), "int8", r"recipes.nodes\[3\]: pointwise: "),
        (("requires",), "avx2", "requires: expected a list"),
        (("binary",), "text", "binary: expected bytes"),
        (("build",), {"a": b""}, "build.a: expected a text"),
        (("target",), "../cpu", "target: expected a text like"),
        (("name",), None, "name: expected a text"),
    ],
)
def test_a_wrong_field_is_named(at: tuple[Any, ...], value: Any, message: str) -> None:
    plain = msgpack.unpackb(msgpack.packb(serialize.program_to_plain(handmade.program())))
    inner = plain
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    with pytest.raises(ArtifactError, match=message):
        CompiledProgram.loads(repack(plain))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x91" * 5000 + b"\x90", msgpack.packb(3), msgpack.packb([]), msgpack.packb({1: 2}),
     msgpack.packb({"name": "x"}), b"\xdd\xff\xff\xff\xff", b"\xa4\xff\xfe\xfd\xfc", msgpack.packb({}) + b"\0"],
)  # fmt: skip
def test_a_body_that_is_no_program(body: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"offset 56|body: expected"):
        CompiledProgram.loads(with_header(body))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.npubin: cannot be read: No such file"):
        CompiledProgram.load(tmp_path / "none.npubin")
    with pytest.raises(ArtifactError, match="cannot be read"):
        CompiledProgram.load(tmp_path)
    (tmp_path / "text.npubin").write_text("not a program, but long enough to have the header's fifty-six bytes")
    with pytest.raises(ArtifactError, match=r"text\.npubin: offset 0: this is not a \.npubin file"):
        CompiledProgram.load(tmp_path / "text.npubin")


def test_a_newer_version_is_named() -> None:
    data = bytearray(serialize.dumps(handmade.program()))
    data[8] = 9
    reads = f"this build reads {container.FORMAT_VERSION}"
    with pytest.raises(ArtifactError, match=f"format version 9, {reads}; compile the model again"):
        CompiledProgram.loads(bytes(data))


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no entry point"):
        handmade.program(entries={}).save(tmp_path / "a.npubin")
    with pytest.raises(ArtifactError, match="cannot be written"):
        handmade.program(build={"when": object()}).save(tmp_path / "a.npubin")
    assert list(tmp_path.iterdir()) == []


# -- graphs that lie ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "inputs", "out", "attrs", "message"),
    [
        ("reshape", ["a"], ((5, 5), "float32"), {"shape": (5, 5)}, "reshape of"),
        ("permute", ["a"], ((2, 2, 2), "float32"), {"perm": (0, 0, 0)}, "perm"),
        ("expand", ["a"], ((2, 9, 4), "float32"), {"shape": (2, 9, 4)}, "expand of"),
        ("slice", ["a"], ((2, 3, 5), "float32"), {"starts": (0,) * 3, "steps": (1,) * 3, "shape": (2, 3, 5)},
         "outside"),
        ("slice", ["a"], ((2, 3, 2), "float32"), {"starts": (0, 0, 3), "steps": (1, 1, -1), "shape": (2, 3, 2)},
         "outside"),
        ("matmul", ["a", "a"], ((2, 3, 4), "float32"), {}, "matmul of"),
        ("matmul", ["a", "m"], ((2, 3, 6), "float32"), {},
         r"declares float32\[2, 3, 6\], but computes float32\[2, 3, 5\]"),
        ("concat", ["a", "m"], ((2, 3, 9), "float32"), {"axis": 2}, "concat of"),
        ("concat", ["a", "a"], ((2, 3, 8), "float32"), {"axis": 7}, "axis 7"),
        ("sort", ["a"], ((2, 3, 9), "float32"), {"axis": 2, "descending": True, "k": 9}, "the first 9 of 4"),
        ("scan", ["a"], ((2, 3, 4), "float32"), {"kind": "mean", "axis": 0}, "unknown scan"),
        ("pack", ["a"], ((1,), "float32"), {"panel": 8, "layout": "panels"}, "pack of"),
        ("pack", ["a"], ((1,), "float32"), {"panel": 8}, "attributes"),
        ("reduce", ["a"], ((1,), "float32"),
         {"kind": "max", "axes": (0,), "domain": (0,), "expr": expr.const(1.0, "float32")}, "over no elements"),
        ("pointwise", ["a"], ((2,), "float32"), {"expr": expr.load(1, "float32", [expr.index(0)])}, "operand 1 of 1"),
        ("pointwise", ["a"], ((2,), "float32"), {"expr": expr.load(0, "float32", [expr.index(0)])}, "has 3 dims"),
        ("pointwise", ["a"], ((2,), "int64"), {"expr": expr.index(1)}, "index 1 of 1 dims"),
        ("pointwise", [], ((2,), "float32"), {"expr": expr.acc()}, "no meaning outside a kernel"),
        ("pointwise", [], ((2,), "bool"), {"expr": expr.Expr("neg", "bool", [expr.const(1, "bool")])}, "neg of bool"),
        ("pointwise", [], ((2,), "float32"), {"expr": expr.Expr("not", "float32", [expr.const(1, "float32")])},
         "not of"),
        ("pointwise", [], ((2,), "float32"),
         {"expr": expr.Expr("add", "float32", [expr.const(1, "int64"), expr.const(1.0, "float32")])}, "mixed dtypes"),
        ("conv2d", ["x", "w"], ((1, 5, 5, 6), "float32"),
         {"stride": (0, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 2}, "are >= 1"),
        ("conv2d", ["x", "w"], ((1, 5, 5, 6), "float32"),
         {"stride": (1, 1), "padding": (2**30,) * 4, "dilation": (1, 1), "groups": 2}, "too large"),
        ("conv2d", ["x", "w"], ((1, 5, 5, 6), "float32"),
         {"stride": (1, 1), "padding": (0,) * 4, "dilation": (9, 9), "groups": 2}, "larger than the padded input"),
        ("scatter", ["a", "m"], ((2, 3, 4), "float32"), {"idx": (expr.index(0),), "mode": "set"}, "with 1 indices"),
        ("attention", ["x", "x", "w"], ((1, 5, 5, 2), "float32"),
         {"scale": 1.0, "causal": False, "limited": False}, "attention of"),
        ("loop", [], ((2,), "float32"), {}, "unknown op 'loop'"),
    ],
)  # fmt: skip
def test_a_node_that_is_not_what_it_declares(
    op: str, inputs: list[str], out: tuple[tuple[int, ...], str], attrs: dict[str, Any], message: str
) -> None:
    g = Graph()
    values = {
        "a": g.weight("a", (2, 3, 4), "float32"),
        "m": g.weight("m", (4, 5), "float32"),
        "x": g.weight("x", (1, 5, 5, 4), "float32"),
        "w": g.weight("w", (6, 3, 3, 2), "float32"),
    }
    g.add(op, [values[name] for name in inputs], [out], **attrs)
    with pytest.raises(ValueError, match=message):
        verify.check_graph(g)


def test_a_graph_out_of_order_is_refused() -> None:
    g = Graph()
    x = g.weight("x", (2,), "float32")
    y = -x
    g.outputs = [("y", y)]
    verify.check_graph(g)
    g.nodes.reverse()
    with pytest.raises(ValueError, match="not the output of an earlier node"):
        verify.check_graph(g)


def test_a_recipe_may_not_explode() -> None:
    program = handmade.program()
    program.recipes.expand(program.recipes.outputs[1][1], (2**24, 4))
    with pytest.raises(ArtifactError, match=r"recipes.nodes\[.\]: it makes 268435456 bytes out of weights that allow"):
        serialize.dumps(program)


# -- saving is atomic -----------------------------------------------------------------------------------------------
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npubin"
    handmade.program(name="old").save(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"a\.npubin: cannot be written: No space left on device"):
        handmade.program(name="new").save(path)
    assert CompiledProgram.load(path).name == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ArtifactError, match="cannot be written"):
        handmade.program().save(tmp_path / "no such directory" / "a.npubin")


def test_kill_during_save_keeps_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npubin"
    handmade.program(name="old").save(path)
    script = """
import sys
from npu_compiler.artifact.program import CompiledProgram
program = CompiledProgram.load(sys.argv[1])
program.build["padding"] = "x" * 60000
program.sources["padding"] = "y" * 30_000_000
print("ready", flush=True)
while True:
    program.name = "new" if program.name == "old" else "old"
    program.save(sys.argv[1])
"""
    rng = random.Random(1)
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        assert CompiledProgram.load(path).name in ("old", "new")


# -- for people -----------------------------------------------------------------------------------------------------
def test_describe_tells_everything() -> None:
    text = handmade.program().describe()
    for fact in (
        "program handmade: compiled for cpu, compute dtype float32",
        "compiler: by hand",
        "entry main (symbol npu_main)",
        "out0 = maximum(in0[i0, i1] + in1[i1], 0.0)",
        "aten.bias_relu",
        "1 buffers of 48 B in an arena of 112 B",
        "██··",
        "w.folded <- float32(layer.weight) * (norm.weight * rsqrt(norm.var + 1e-05))",
        "totals: 5 kernels, 120 FLOP, reads 320 B, writes 240 B; arena 112 B, weights 32 B, state 32 B",
    ):
        assert fact in text, fact
    assert max(map(len, text.splitlines())) < 200


def test_to_json_is_json() -> None:
    facts = json.loads(json.dumps(handmade.rich_program().to_json()))
    assert facts["totals"]["kernels"] == 5
    assert facts["entries"][0]["lifetimes"] == [{"buffer": 6, "first": 0, "last": 1}]
    assert facts["recipes"]["matmul"] == "matmul(a, m)"
    assert facts["buffers"][0]["bytes"] == 48


def test_a_formula_of_shared_parts_stays_short() -> None:
    g = Graph()
    x = g.weight("x", (1,), "float32")
    for _ in range(200):
        x = x * x + x
    g.outputs = [("y", x)]
    assert len(recipe_words(g)["y"]) < 1000


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (1234567, "1.23 M"), (8.2e9, "8.2 G"), (2.5e15, "2.5e+03 T")],
)
def test_si(value: float, text: str) -> None:
    assert si(value) == text
