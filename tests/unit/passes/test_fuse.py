"""Kernels: attention, epilogues, rows and concatenations, each with what must not become one."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.graph import expr
from npu_compiler.graph.expr import fn, index, load
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.ops import norms
from npu_compiler.passes import attention, batch_dims, concat_to_select, decompose, normalise, patterns
from npu_compiler.pipeline import run_graph
from npu_compiler.schedule import checks
from npu_compiler.schedule.kernel import Loops
from npu_compiler.target_config import target_config

from ...support.graph_tools import compiled, exp, kept, kinds, layer_norm, linear, log, ops, relu, rsqrt, softmax, tanh

# -- rewrites as data -------------------------------------------------------------------------------------------------
REWRITES = (*attention.REWRITES, *batch_dims.REWRITES)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.name)
def test_rewrites_match_their_examples_and_keep_the_result(rewrite: patterns.Rewrite) -> None:
    for example in rewrite.examples:
        graph = example()
        normalise.normalise(graph)
        dtype = graph.nodes[0].out.dtype
        old = {v for _, v in graph.outputs}
        kept(graph, lambda g: patterns.apply(g, [rewrite]), dtype)
        assert {v for _, v in graph.outputs} - old, inspect.getsource(example)
        assert rewrite not in attention.REWRITES or "attention" in ops(graph), inspect.getsource(example)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.name)
def test_rewrites_leave_their_counter_examples_alone(rewrite: patterns.Rewrite) -> None:
    for example in rewrite.counter_examples:
        graph = example()
        normalise.normalise(graph)
        assert patterns.apply(graph, [rewrite]) == 0, inspect.getsource(example)


def attend(mask: Callable[[Graph], Value | None], causal: bool = False) -> Graph:
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 4, 6, 8), "float32") for n in "qkv")
    g.outputs = [("y", g.attention(q, k, v, mask(g), 0.3, causal))]
    return g


@pytest.mark.parametrize(
    ("mask", "causal", "operands"),
    [
        (lambda g: g.const(np.zeros((1, 1, 6, 6), np.float32)), False, 3),
        (lambda g: g.const(np.ones((6, 1), bool)).expand(6, 6), False, 3),
        (lambda g: g.const(np.tri(6, dtype=bool)), True, 3),
        (lambda g: g.elementwise((6, 6), [], index(1) <= index(0)), True, 3),
        (lambda g: g.elementwise((6, 6), [], ~(index(1) > index(0))).reshape(1, 1, 6, 6), True, 3),
        (lambda g: g.const(np.tri(6, k=1, dtype=bool)), False, 4),
        (lambda g: g.elementwise((6, 6), [], index(1) < index(0) + 2), False, 4),
        (lambda g: g.input("mask", (6, 6), "bool"), False, 4),
    ],
)
def test_masks_that_hide_nothing_or_just_the_future(mask: Callable, causal: bool, operands: int) -> None:
    graph = kept(attend(mask), attention.fuse_attention)
    (node,) = (n for n in graph.nodes if n.op == "attention")
    assert (node.attrs["causal"], len(node.inputs)) == (causal, operands)


@pytest.mark.parametrize("repeated", [True, False])
def test_attention_shares_heads_that_were_repeated(repeated: bool) -> None:
    g = Graph("grouped")
    q, k, v = (g.input(n, (2, 4 if n == "q" else 2, 6, 8), "float32") for n in "qkv")
    k, v = (x.reshape(2, 2, 1, 6, 8).expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
    g.outputs = [("y", g.attention(q, k if repeated else k + 1.0, v, None, 0.3, False))]
    kept(g, attention.fuse_attention, "float32")
    (node,) = (n for n in g.nodes if n.op == "attention")
    assert [x.shape[1] for x in node.inputs] == ([4, 2, 2] if repeated else [4, 4, 4])


def test_factors_of_queries_and_keys_become_part_of_the_scale() -> None:
    g = Graph("scaled")
    q, k, v = (g.input(n, (2, 6, 4, 8), "bfloat16") for n in "qkv")
    q, k = ((x * 0.5).cast("bfloat16").permute(0, 2, 1, 3) for x in (q, k))
    g.outputs = [("y", g.attention((q * 3.0).cast("bfloat16"), k, v.permute(0, 2, 1, 3), None, 0.4, False))]
    attention.fuse_attention(g)
    (node,) = (n for n in g.nodes if n.op == "attention")
    assert node.attrs["scale"] == pytest.approx(0.3) and ops(g)["pointwise"] == 0


def test_attention_over_doubles_becomes_products_and_loops() -> None:
    for causal in (False, True):
        g = Graph("attention")
        q, k, v = (g.input(n, (2, 4 if n == "q" else 2, 5, 8), "float64") for n in "qkv")
        g.outputs = [("y", g.attention(q, k, v, None, 0.3, causal))]
        graph = kept(g, lambda g: decompose.decompose(g, target_config("cpu")), "float64")
        assert ops(graph)["attention"] == 0 and ops(graph)["matmul"] == 2


# -- epilogues --------------------------------------------------------------------------------------------------------
def test_bias_activation_and_residual_run_in_the_epilogue() -> None:
    g = Graph("epilogue")
    x, r = g.input("x", (2, 5, 6), "float32"), g.input("r", (2, 5, 8), "float32")
    y = linear(x, 8) + g.weight("b", (8,), "float32")
    g.outputs = [("y", y * g.pointwise(fn("sigmoid"), y) + r)]
    _, kernels = compiled(g)
    assert kinds(kernels) == ["gemm"] and len(kernels[0].inputs) == 4


def test_a_result_with_two_readers_is_stored_once() -> None:
    g = Graph("two readers")
    y = linear(g.input("x", (5, 6), "float32"), 8)
    g.outputs = [("a", g.pointwise(tanh, y)), ("b", g.pointwise(exp, y).sum([1]))]
    _, kernels = compiled(g)
    assert kinds(kernels).count("gemm") == 1 and expr.render(kernels[0].epilogue) == "acc"


def test_an_addition_of_two_products_joins_one_of_them() -> None:
    g = Graph("two products")
    x = g.input("x", (5, 6), "float32")
    g.outputs = [("y", relu(linear(x, 8, "a") + linear(g.pointwise(tanh, x), 8, "b")))]
    _, kernels = compiled(g)
    assert sorted(kinds(kernels)) == ["gemm", "gemm", "map"]


def test_no_epilogue_through_a_transposition_or_a_gather() -> None:
    g = Graph("no epilogue")
    y = linear(g.input("x", (6, 6), "float32"), 6)
    rows = g.input("rows", (6,), "int64")
    g.outputs = [
        ("y", g.pointwise(lambda a, b: a + b, y, y.permute(1, 0))),
        (
            "z",
            g.elementwise(
                (6, 6),
                [linear(g.input("z", (6, 6), "float32"), 6, "v"), rows],
                load(0, "float32", [load(1, "int64", [index(0)]), index(1)]),
            ),
        ),
    ]
    _, kernels = compiled(g)
    assert kinds(kernels).count("gemm") == 2 and kinds(kernels).count("map") == 2


# -- loops ------------------------------------------------------------------------------------------------------------
def rms_norm(x: Value) -> Value:
    g = x.graph
    return x * g.pointwise(rsqrt, (x * x).mean([x.rank - 1]) + 1e-6) * g.weight("gain", (x.shape[-1],), "float32")


def log_softmax(x: Value) -> Value:
    shifted = x - x.amax([x.rank - 1])
    return shifted - x.graph.pointwise(log, x.graph.pointwise(exp, shifted).sum([x.rank - 1]))


@pytest.mark.parametrize(
    "f",
    [
        softmax, layer_norm, rms_norm, log_softmax, lambda x: softmax(x, 1),
        lambda x: softmax(x * 0.3 + x.graph.input("mask", (8, 16), "float32")),
        lambda x: layer_norm(x + x.graph.input("r", x.shape, "float32")),
        lambda x: layer_norm(x.cast("float16").cast("float32")).cast("float16"),
        lambda x: x.graph.pointwise(fn("sigmoid"), rms_norm(x)) * x,
    ],
)  # fmt: skip
def test_norms_and_softmax_are_one_kernel(f: Callable[[Value], Value]) -> None:
    g = Graph("rows")
    g.outputs = [("y", f(g.input("x", (3, 8, 16), "float32")))]
    _, kernels = compiled(g, dtype="float16")
    assert len(kernels) == 1, kinds(kernels)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_group_norm_and_its_activation_are_one_kernel(dtype: str) -> None:
    g = Graph("group norm")
    gain, shift = (g.weight(name, (6,), "float32") for name in ("gain", "shift"))
    y = norms.grouped(g.input("x", (2, 6, 10), dtype), 3, gain, shift, 1e-5)[0].cast(dtype)
    g.outputs = [("y", g.pointwise(tanh, y).cast(dtype))]
    _, kernels = compiled(g)
    assert len(kernels) == 1, kinds(kernels)


@pytest.mark.parametrize("shapes", [((6, 8), (8, 1)), ((1, 8), (8, 5)), ((6, 1), (1, 5))])
def test_products_that_become_loops_round_their_results_there(shapes: tuple[tuple[int, ...], ...]) -> None:
    g = Graph("vectors")
    a, b = (g.input(name, shape, "float16") for name, shape in zip("ab", shapes, strict=True))
    g.outputs = [("y", a.matmul(b).reshape(-1).cast("float16"))]
    _, kernels = compiled(g)
    assert len(kernels) == 1, kinds(kernels)


def test_pointwise_chains_are_one_kernel_and_shared_work_is_done_once() -> None:
    g = Graph("chain")
    x = g.input("x", (40, 50), "float32")
    e = g.pointwise(exp, x)
    g.outputs = [("a", g.pointwise(tanh, e * 2.0)), ("b", e + 1.0), ("c", e.permute(1, 0) * 3.0)]
    _, kernels = compiled(g)
    assert sum(k.text().count("exp(") for k in kernels) == 1


def test_no_group_is_merged_around_another_kernel() -> None:
    """y depends on a product of x; merging both readers of e would make that product wait for itself."""
    g = Graph("cycle")
    e = g.pointwise(exp, g.input("x", (8, 8), "float32"))
    product = linear(e, 8)
    g.outputs = [("y", g.pointwise(lambda a, b: tanh(a) * b, e, g.pointwise(tanh, product).permute(1, 0)))]
    state, kernels = compiled(g)
    checks.check_groups(state.graph, state.groups)
    assert kinds(kernels).count("gemm") == 1


def test_reductions_of_the_same_elements_share_a_kernel() -> None:
    """Not those of which one needs the other, through a product, or that read in another order."""
    g = Graph("siblings")
    x = g.input("x", (8, 8), "float32")
    low, high, at = x.amin([1]), x.amax([1]), g.reduce("argmax", x, [1])
    late = (x * linear(low.expand(8, 8), 8)).sum([1])
    g.outputs = [("low", low), ("high", high), ("at", at), ("late", late), ("across", x.permute(1, 0).amax([1]))]
    state, kernels = compiled(g)
    checks.check_groups(state.graph, state.groups)
    together = [sum(n.op == "reduce" for n in group.nodes) for group in state.groups]
    assert sorted(n for n in together if n) == [1, 1, 3]
    assert kinds(kernels).count("gemm") == 1


def test_rows_are_not_repeated_for_wider_kernels_without_a_reduction() -> None:
    g = Graph("widening")
    row = g.pointwise(exp, g.input("row", (64, 1), "float32"))
    g.outputs = [("y", g.pointwise(lambda a, b: a * b, g.input("x", (64, 64), "float32"), row))]
    state, _ = compiled(g)
    assert {group.domain for group in state.groups} == {(64, 1), (64, 64)}


def test_reductions_over_other_dims_or_nothing_are_other_kernels() -> None:
    g = Graph("reductions")
    x = g.input("x", (6, 8), "float32")
    g.outputs = [
        ("y", x.sum([0])),
        ("z", x.sum([1])),
        ("same", g.reduce("sum", x, [])),
        ("at", g.reduce("argmax", x.reshape(6, 8, 1), [2])),
    ]
    _, kernels = compiled(g)
    assert all(isinstance(p, Loops) for k in kernels for p in k.members)


# -- concatenations ---------------------------------------------------------------------------------------------------
def test_rotary_embedding_is_one_kernel() -> None:
    g = Graph("rotary")
    x, cos, sin = (
        g.input("x", (2, 4, 6, 8), "float32"),
        g.input("cos", (6, 8), "float32"),
        g.input("sin", (6, 8), "float32"),
    )
    turned = g.concat([-x.slice(3, 4, 8), x.slice(3, 0, 4)], 3)
    g.outputs = [("y", x * cos + turned * sin)]
    _, kernels = compiled(g)
    assert kinds(kernels) == ["map"]


def test_concatenations_that_others_read_or_kernels_write_stay() -> None:
    g = Graph("concat")
    x, y = g.input("x", (4, 3), "float32"), g.input("y", (4, 3), "float32")
    read = g.concat([x, y], 1)
    written = g.concat([g.pointwise(exp, x), g.pointwise(tanh, y)], 1)
    g.outputs = [("a", linear(read, 5)), ("b", g.pointwise(tanh, written)), ("c", g.pointwise(exp, written).sum([1]))]
    assert ops(kept(g, concat_to_select.concat_to_select))["concat"] == 2


def test_rows_of_a_table_in_blocks_are_decoded_once() -> None:
    """Neither each reader nor each pass of a row norm decodes them again."""
    g = Graph("lookup")
    blocks = g.add("quantize", [g.weight("w", (64, 64), "bfloat16")], [((64, 68), "uint8")], format="fp8_e4m3").out
    table = g.add("dequantize", [blocks], [((64, 64), "bfloat16")], format="fp8_e4m3", k=64, dtype="bfloat16").out
    place = (load(1, "int64", (index(0),)), index(1))
    rows = g.elementwise((4, 64), [table, g.input("ids", (4,), "int64")], load(0, "bfloat16", place))
    norm = g.pointwise(lambda x, m: x / m, rows, (rows * rows).mean([1]), promote=False)
    g.outputs = [("norm", norm), ("next", g.pointwise(lambda x: x + 1.0, rows))]
    schedule = run_graph(g, "cuda:sm_90", until="schedule").schedule
    assert schedule is not None
    (decoder,) = [k for k in schedule.kernels if any(o.buffer.kind == "weight" for o in k.inputs)]
    assert isinstance(decoder, Loops) and not decoder.body.axes
