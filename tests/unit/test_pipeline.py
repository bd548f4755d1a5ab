"""The compiler as a whole: switches, verification after each phase, dumps."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler import pipeline
from npu_compiler.graph import expr, interp
from npu_compiler.graph.expr import Expr, const, index, load, where
from npu_compiler.graph.graph import Graph
from npu_compiler.ops.affine_quantization import dequantized, quantized
from npu_compiler.passes import fuse, padding
from npu_compiler.pipeline import State, run_graph, switches
from npu_compiler.schedule import checks
from npu_compiler.support.errors import CompileError

from ..support.graph_tools import (
    Arrays,
    assert_close,
    batch_norm,
    conv,
    data_for,
    layer_norm,
    linear,
    ops,
    padded,
    relu,
    run_kernels,
    softmax,
    tanh,
)


# -- switches ---------------------------------------------------------------------------------------------------------
def everything() -> Graph:
    """A program on which every switch makes a difference."""
    g = Graph("everything")
    x = g.input("x", (2, 3, 8, 8), "float32")
    y = relu(batch_norm(conv(padded(x, (0, 1, 0, 1)), "c1", 32), "bn"))
    y = relu(conv(y, "c2", 64, bias=True) + conv(y, "c3", 64))
    rows = g.concat(
        [g.weight("token", (1, 1, 64), "float32").expand(2, 1, 64), y.reshape(2, 64, 81).permute(0, 2, 1)], 1
    )
    at = g.const(np.arange(82))
    table = g.input("table", (100, 64), "float32")
    place = g.elementwise((82, 64), [table, at], load(0, "float32", [load(1, "int64", [index(0)]), index(1)]))
    h = layer_norm(rows + place)
    q, k, v = (linear(h, 64, n).reshape(2, 82, 4, 16).permute(0, 2, 1, 3) for n in "qkv")
    seen = g.pointwise(
        lambda m: where(m, const(0.0, "float32"), -3e38), g.input("keep", (2, 1, 1, 82), "bool"), promote=False
    )
    p = softmax(q.matmul(k.permute(0, 1, 3, 2)) * (0.5 * 0.5) + seen)
    z = p.matmul(v).permute(0, 2, 1, 3).reshape(2, 82, 64)
    reached = g.elementwise(
        (82, 82), [g.input("at", (82,), "int64")], Expr("le", "bool", (index(1), load(0, "int64", [index(0)])))
    )
    cached = g.attention(q, k, v, reached, 0.25, False)
    twice = g.const(np.array([1.0, 2.0], np.float32)) * 2.0
    same = g.pointwise(lambda e: e, z).permute(0, 1, 2)
    z = linear(same, 8, "out") * 0.05
    g.outputs = [("y", g.pointwise(tanh, z) + twice.sum([0])), ("again", g.pointwise(tanh, z))]
    row = g.input("row", (1, 64), "float32")
    normed = layer_norm(row)
    g.outputs += [
        ("gated", g.pointwise(tanh, linear(normed, 64, "gate")) * linear(normed, 64, "up")),
        ("beside", g.pointwise(tanh, row)), ("other", g.pointwise(tanh, table)), ("cached", cached),
    ]  # fmt: skip
    rounded = dequantized(quantized(row, 50.0, 128, 0, 255, "uint8"), 0.02, 128, None)
    weight = dequantized(g.weight("int8", (64, 8), "int8"), g.const(np.full(8, 0.01, np.float32)), 0, None)
    g.outputs.append(("rounded", quantized(relu(rounded.matmul(weight)), 10.0, 0, 0, 255, "uint8")))
    g.outputs.append(("batch", x.reshape(3, 16, 8).matmul(x.reshape(3, 8, 16))))
    flat = x.reshape(48, 8).matmul(g.weight("flat", (8, 5), "float32")) + g.weight("bias", (5,), "float32")
    g.outputs.append(("rows", g.pointwise(tanh, flat.reshape(6, 8, 5))))
    g.outputs.append(("short", conv(x, "c4", 6, groups=3)))
    g.outputs.append(("largest", quantized(rounded.amax([1]), 50.0, 128, 0, 255, "uint8")))
    return g


def fingerprint(state: State) -> list[tuple[str, str, int]]:
    assert state.schedule is not None
    return [(k.kind, k.text(), len(k.inputs)) for k in state.schedule.kernels]


# Without AMX, beside which Winograd's algorithm and packing inside products are not used; the kernels are interpreted.
CPU = "cpu:avx512"


@pytest.fixture(scope="module")
def usual() -> tuple[Arrays, list[tuple[str, str, int]]]:
    graph = everything()
    data = data_for(graph)
    want = interp.run(graph, data, data)
    state = run_graph(graph, CPU)
    assert_close(run_kernels(state, data, data), want)
    return want, fingerprint(state)


# Other passes call "normalise". Four switches want programs or devices that ask for them: test_format.py has one for
# "compress_weights", test_quantize_activations.py for "quantize_activations", test_rewrites.py for "fold_cache_scales",
# test_limbs.py for "limbs".
ELSEWHERE = ("normalise", "compress_weights", "quantize_activations", "fold_cache_scales", "limbs")


@pytest.mark.parametrize("switch", [s for s in switches("cpu") if s not in ELSEWHERE])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_every_switch_changes_the_program_and_not_its_result(
    switch: str, by: str, usual: tuple[Arrays, list[tuple[str, str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = everything()
    data = data_for(graph)
    if by == "environment":
        monkeypatch.setenv("NPU_DISABLE", switch)
        state = run_graph(graph, CPU)
    else:
        state = run_graph(graph, CPU, disable=(switch,))
    want, kernels = usual
    assert fingerprint(state) != kernels
    if by == "argument":
        assert_close(run_kernels(state, data, data), want)


def test_normalise_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def twins() -> Graph:
        g = Graph("twins")
        x = g.input("x", (4, 4), "float32")
        g.outputs = [("a", g.pointwise(tanh, x)), ("b", g.pointwise(tanh, x))]
        return g

    assert ops(run_graph(twins(), until="normalise").graph)["pointwise"] == 1
    assert ops(run_graph(twins(), disable=("normalise",), until="normalise").graph)["pointwise"] == 2
    monkeypatch.setenv("NPU_DISABLE", "normalise")
    assert ops(run_graph(twins(), until="normalise").graph)["pointwise"] == 2


def test_everything_switched_off_still_runs(usual: tuple[Arrays, list[tuple[str, str, int]]]) -> None:
    graph = everything()
    data = data_for(graph)
    assert_close(run_kernels(run_graph(graph, disable=switches("cpu")), data, data), usual[0])


def test_unknown_switches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="cannot disable fold_bn; these can be: normalise"):
        run_graph(everything(), disable=("fold_bn",))
    monkeypatch.setenv("NPU_DISABLE", "layout,nothing")
    with pytest.raises(CompileError, match="cannot disable nothing"):
        run_graph(everything())


def test_passes_are_listed_in_the_order_in_which_they_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run_pass = pipeline.State.run_pass
    monkeypatch.setattr(pipeline.State, "run_pass", lambda s, name, f: (ran.append(name), run_pass(s, name, f)))
    run_graph(everything())
    found = list(dict.fromkeys(ran))
    assert len(found) > 12 and found == [name for name in pipeline.PASSES if name in found]


# -- what NPU_VERIFY and NPU_DUMP do ----------------------------------------------------------------------------------
def test_verification_finds_the_phase_that_breaks_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VERIFY", "2")
    run_graph(everything())

    def wrong_result(graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "pointwise" and node.attrs["expr"].op == "maximum":
                node.attrs["expr"] = node.attrs["expr"] + 1.0

    def wrong_shape(graph: Graph) -> None:
        next(n for n in graph.nodes if n.op == "conv2d").out.shape = (1, 2, 3, 4)

    def wrong_load(graph: Graph) -> None:
        node = graph.outputs[1][1].node
        e = node.attrs["expr"]
        node.attrs["expr"] = expr.substitute(e, loads=lambda x: expr.load(x.value, x.dtype, [i + 100 for i in x.args]))

    for level, damage, message in (
        ("2", wrong_result, "after phase 'layout': output 'y' differs from its value before this step"),
        ("1", wrong_shape, r"after phase 'layout': node \d+ \(conv2d\): declares float32\[1, 2, 3, 4\]"),
        ("1", wrong_load, r"after phase 'layout': .* reads 100 to "),
    ):
        monkeypatch.setenv("NPU_VERIFY", level)
        with monkeypatch.context() as patch:
            patch.setattr(padding, "fold_padding", damage)
            with pytest.raises(CompileError, match=message):
                run_graph(everything())


def test_dumps_are_numbered_and_readable(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPU_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("NPU_DEBUG", "2")
    g = Graph("small")
    g.sources = ("linear",)
    g.outputs = [("y", relu(linear(g.input("x", (4, 6), "float32"), 8)))]
    run_graph(g)
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    phases = [name for name, _, _ in pipeline.PHASES]
    assert names == [f"{phases.index(n)}_{n}.txt" for n in phases[1 : phases.index("memory") + 1]]
    text = (tmp_path / "dump" / names[-1]).read_text()
    assert "%2: float32[4, 8] = matmul(%0, %1)  # linear" in text
    assert "k0_gemm: gemm batch=1 m=4 n=8 k=6" in text and "    maximum(acc, 0.0)" in text
    printed = capsys.readouterr().err
    assert "npusim: memory" in printed and "k0_gemm" in printed


def test_the_graph_a_phase_leaves_is_well_formed() -> None:
    for until in [name for name, _, _ in pipeline.PHASES[1:5]]:
        state = run_graph(everything(), until=until)
        checks.check_graph(state.graph)
        if until == "fuse":
            checks.check_groups(state.graph, state.groups)
            assert all(fuse.LEAVES.isdisjoint({n.op for n in group.nodes}) for group in state.groups)
