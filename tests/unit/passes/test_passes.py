"""What each pass rewrites, what it must leave alone, and that results stay what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from npu_compiler.graph import expr
from npu_compiler.graph.expr import const, index, load, where
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.passes import fold, fold_iota, layout, normalise, padding
from npu_compiler.schedule.anchors import Anchor
from npu_compiler.schedule.kernel import Loops

from ...support.graph_tools import (
    batch_norm,
    compiled,
    conv,
    kept,
    kinds,
    layer_norm,
    nchw,
    ops,
    padded,
    relu,
    softmax,
    tanh,
)


# -- normalise --------------------------------------------------------------------------------------------------------
def test_no_ops_twins_and_chains_of_views_vanish() -> None:
    g = Graph("noops")
    x = g.input("x", (2, 3, 4), "float32")
    same = g.pointwise(lambda e: e, x)
    turned = same.permute(2, 0, 1).permute(1, 2, 0).reshape(6, 4).reshape(2, 12).reshape(6, 4)
    a, b = (g.pointwise(tanh, v) for v in (turned, x.reshape(6, 4)))
    g.outputs = [("y", a + b), ("z", x.permute(0, 1, 2).reshape(2, 3, 4).cast("float32"))]
    graph = kept(g, normalise.normalise)
    assert ops(graph) == {"input": 1, "reshape": 1, "pointwise": 2}
    assert graph.outputs[1][1].op == "input"


def test_a_permute_of_size_one_dims_is_a_reshape() -> None:
    g = Graph("units")
    x = g.input("x", (1, 5, 1, 3), "float32")
    g.outputs = [("y", x.permute(0, 2, 1, 3)), ("z", x.permute(3, 1, 0, 2))]
    assert ops(kept(g, normalise.normalise)) == {"input": 1, "reshape": 1, "permute": 1}


def test_nodes_of_other_shapes_or_states_are_no_twins() -> None:
    g = Graph("twins")
    x, s = g.input("x", (4,), "float32"), g.state("s", (4,), "float32")
    zero = [g.elementwise((n,), [], const(0.0, "float32")) for n in (3, 4)]
    g.outputs = [("a", zero[0]), ("b", zero[1]), ("c", g.concat([x, s, x], 0)), ("d", g.concat([x, x, s], 0))]
    assert ops(kept(g, normalise.normalise)) == {"input": 1, "state": 1, "pointwise": 2, "concat": 2}


def test_constants_are_computed_but_large_ones_and_bad_indices_are_not() -> None:
    g = Graph("constants")
    a = g.const(np.arange(6, dtype=np.float32).reshape(2, 3))
    x = g.input("x", (2, 3), "float32")
    big = g.elementwise((1000, 1000), [], index(0) * 1000 + index(1))
    beyond = g.elementwise((2,), [a], load(0, "float32", [index(0) + 5, const(0, "int64")]))
    g.outputs = [("y", x + a.permute(1, 0).reshape(2, 3) * 2.0), ("big", big.sum([0, 1]))]
    kept(g, normalise.fold_constants)
    assert ops(g)["pointwise"] == 2 and "permute" not in ops(g)
    g.outputs.append(("beyond", beyond))
    g.nodes.append(beyond.node)
    normalise.fold_constants(g)
    assert g.outputs[-1][1].op == "pointwise"


# -- positions --------------------------------------------------------------------------------------------------------
def test_tables_of_positions_become_index_arithmetic() -> None:
    g = Graph("positions")
    table = g.input("table", (9, 4), "float32")
    at = g.const(np.arange(1, 9, 2))
    wrapped = load(1, "int64", [index(0)])
    wrapped = where(wrapped < 0, wrapped + 9, wrapped)
    g.outputs = [("y", g.elementwise((4, 4), [table, at], load(0, "float32", [wrapped, index(1)])))]
    graph = kept(g, fold_iota.fold_iota)
    assert ops(graph) == {"input": 1, "pointwise": 1}
    assert expr.render(graph.outputs[0][1].node.attrs["expr"]) == "in0[((i0 * 2) + 1), i1]"


def test_uniform_constants_become_numbers_and_what_repeats_is_computed_once() -> None:
    g = Graph("uniform")
    x = g.input("x", (2, 1, 1, 5), "bool")
    rows = g.const(np.ones((1, 1, 6, 1), bool))
    both = g.pointwise(lambda a, b: a & b, x.expand(2, 1, 6, 5), rows.expand(2, 1, 6, 5), promote=False)
    g.outputs = [("mask", g.pointwise(lambda m: where(m, const(0.0, "float32"), -1e9), both, promote=False))]
    graph = kept(g, fold_iota.fold_iota)
    (node,) = (n for n in graph.nodes if n.op == "pointwise" and "-1000000000.0" in expr.render(n.attrs["expr"]))
    assert node.out.shape == (2, 1, 1, 5)


def test_a_uniform_result_is_filled_and_not_copied() -> None:
    g = Graph("filled")
    data = {"ones": np.ones((3, 5)), "nan": np.full(4, np.nan, np.float32), "one": np.ones(1), "none": np.ones((0, 3))}
    data |= {"zeros": np.array([0.0, -0.0]), "mask": np.array([True, False])}
    g.outputs = [(name, g.const(array)) for name, array in data.items()]
    graph = kept(g, fold_iota.fold_iota)
    assert {name for name, v in graph.outputs if v.op == "expand"} == {"ones", "nan"}
    assert graph.outputs[0][1].node.inputs[0].numel == 1


def test_other_tables_stay_tables() -> None:
    g = Graph("tables")
    x = g.input("x", (9,), "float32")
    for data in (np.array([1, 2, 4]), np.array([0.0, -0.0], np.float32), np.array([0, 1, 3, 4])):
        at = g.const(data)
        picked = g.elementwise(data.shape, [at], load(0, at.dtype, [index(0)]))
        g.outputs.append((f"y{len(g.outputs)}", picked.cast("float32") + x.slice(0, 0, len(data))))
    assert ops(kept(g, fold_iota.fold_iota))["const"] == 3


def test_a_scatter_to_constant_positions_needs_no_index() -> None:
    g = Graph("scatter")
    base, row = g.input("base", (8, 4), "float32"), g.input("row", (3, 4), "float32")
    g.outputs = [("y", g.scatter(base, row, [g.const(np.arange(2, 5))], [load(0, "int64", [index(0)]), index(1)]))]
    _, kernels = compiled(g)
    assert isinstance(kernels[-1], Loops) and not kernels[-1].body.serial


# -- layout -----------------------------------------------------------------------------------------------------------
def moves(graph: Graph) -> int:
    """Permutes that depend on an input and really move data."""
    static = normalise_static(graph)
    return sum(n.op == "permute" and n.out not in static for n in graph.nodes)


def normalise_static(graph: Graph) -> set[Value]:
    from npu_compiler.passes.load_time import static_values

    return static_values(graph)


def convnet() -> Graph:
    """Convolutions with residuals, a concatenation, a pool and a mean over [2, 3, 9, 8]."""
    g = Graph("convnet")
    x = relu(conv(g.input("x", (2, 3, 9, 8), "float32"), "c1", 8, bias=True))
    y = relu(batch_norm(conv(x, "c2", 8), "bn2") + x)
    y = g.concat([conv(y, "c3", 4), conv(y, "c4", 4, size=1, pad=0)], 1)
    window = load(0, "float32", [index(0), index(1) * 2 + index(4), index(2) * 2 + index(5), index(3)])
    last = y.permute(0, 2, 3, 1)
    pooled = nchw(g.reduce_expr("max", [last], window, (2, 4, 4, 8, 2, 2), [4, 5]).reshape(2, 4, 4, 8))
    z = pooled.slice(2, 0, 3) * g.weight("scale", (8, 1, 1), "float32")
    g.outputs = [("y", conv(z, "c5", 5).mean([2, 3]).reshape(2, 5).matmul(g.weight("fc", (5, 3), "float32")))]
    return g


def test_permutes_cancel_inside_a_convolutional_network() -> None:
    graph = kept(convnet(), lambda g: (normalise.normalise(g), layout.sink_permutes(g)))
    assert moves(graph) == 1  # of the input
    _, kernels = compiled(convnet())
    assert kinds(kernels).count("copy") == 1
    assert Counter(kinds(kernels)) == {"copy": 1, "conv2d": 5, "max": 1, "map": 1, "sum": 1, "gemm": 1}


def test_concatenations_follow_the_layout_of_their_larger_part() -> None:
    g = Graph("dense block")
    x = g.input("x", (1, 8, 6, 6), "float32")
    for i in range(2):
        x = g.concat([x, relu(conv(x, f"c{i}", 8, bias=True))], 1)
    g.outputs = [("y", conv(x, "last", 4))]
    assert moves(kept(g, layout.sink_permutes)) == 2  # the input's and the output's


def test_a_reshape_between_permutes_does_not_stop_them() -> None:
    g = Graph("patches")
    y = conv(g.input("x", (2, 3, 8, 8), "float32"), "c", 16, size=1, pad=0)
    g.outputs = [("y", softmax(y.reshape(2, 16, 64).permute(0, 2, 1)))]
    assert moves(kept(g, layout.sink_permutes)) == 1


@pytest.mark.parametrize(
    ("shape", "perm", "new"),
    [
        ((2, 3, 4, 5), (0, 3, 1, 2), (2, 5, 12)), ((2, 3, 4, 5), (0, 3, 1, 2), (2, 5, 3, 2, 2)),
        ((2, 3, 4, 5), (0, 3, 1, 2), (10, 12)), ((1, 3, 4, 5), (0, 3, 1, 2), (5, 12)),
        ((2, 1, 1, 5), (0, 3, 1, 2), (2, 5)), ((2, 3, 4, 5), (3, 2, 1, 0), (5, 4, 6)),
        ((2, 3, 4), (1, 0, 2), (1, 3, 2, 1, 4)), ((2, 3, 4), (2, 0, 1), (4, 6, 1)),
        ((6, 4), (1, 0), (4, 2, 3)), ((6, 4), (1, 0), (8, 3)),
    ],
)  # fmt: skip
def test_permutes_sink_through_reshapes(shape: tuple[int, ...], perm: tuple[int, ...], new: tuple[int, ...]) -> None:
    g = Graph("reshape")
    g.outputs = [("y", g.pointwise(tanh, g.input("x", shape, "float32").permute(*perm).reshape(*new)))]
    kept(g, layout.sink_permutes)


def test_what_ends_in_a_product_keeps_its_rows() -> None:
    g = Graph("transformer")
    x = g.input("x", (2, 16, 10), "float32").permute(0, 2, 1)
    h = x + softmax(x)
    h = h + layer_norm(h).matmul(g.weight("w", (16, 16), "float32"))
    g.outputs = [("y", h.matmul(g.weight("v", (16, 4), "float32")))]
    _, kernels = compiled(g)
    assert "copy" not in kinds(kernels)


def test_flattened_features_need_no_copy() -> None:
    g = Graph("classifier")
    x = g.input("x", (2, 3, 4, 5), "float32")
    y = relu(conv(x, "c", 6))
    g.outputs = [
        ("y", y.reshape(2, 120).matmul(g.weight("fc", (120, 7), "float32"))),
        ("z", y.reshape(2, 6, 20).matmul(g.weight("rows", (20, 7), "float32"))),  # the channels are not part of the sum
    ]
    _, kernels = compiled(g)
    assert kinds(kernels) == ["copy", "conv2d", "gemm", "copy", "gemm"]


def test_reshaped_products_have_epilogues_unless_these_depend_on_positions() -> None:
    g = Graph("reshaped")
    x, w = g.input("x", (6, 16), "float16"), g.weight("w", (16, 8), "float16")
    heads = g.pointwise(tanh, x.matmul(w).reshape(2, 3, 8)).cast("float16")
    rows = g.input("y", (6, 16), "float16").matmul(w).reshape(2, 3, 8)
    e = load(0, "float32", expr.identity_index(rows.shape)) + index(1).cast("float32")
    placed = g.elementwise(rows.shape, [rows], e)
    g.outputs = [("heads", heads), ("placed", placed)]
    _, kernels = compiled(g)
    assert kinds(kernels) == ["gemm", "gemm", "map"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ops_behind_a_pool_join_its_kernel_through_permute_and_reshape(dtype: str) -> None:
    g = Graph("average pool")
    x = g.input("x", (2, 3, 8, 6), dtype).permute(0, 2, 3, 1)
    window = load(0, dtype, [index(0), index(1) * 2 + index(4), index(2) * 2 + index(5), index(3)]).cast("float32")
    sums = g.reduce_expr("sum", [x], window, (2, 4, 3, 3, 2, 2), [4, 5]).reshape(2, 4, 3, 3)
    g.outputs = [("y", nchw(g.pointwise(lambda v: v / 4.0, sums)).cast(dtype))]
    _, kernels = compiled(g)
    assert kinds(kernels) == ["sum"]


def test_positions_of_a_maximum_count_in_their_own_order() -> None:
    g = Graph("argmax")
    x = g.input("x", (3, 4, 5), "float32").permute(2, 0, 1)
    g.outputs = [
        ("a", g.reduce("argmax", x, [1, 2])),
        ("b", g.reduce("argmax", x, [0, 2])),
        ("c", g.reduce("argmin", x, [2])),
    ]
    kept(g, layout.sink_permutes)
    compiled(g)


# -- padding ----------------------------------------------------------------------------------------------------------
def padded_conv(**kinds_of_pad: object) -> Graph:
    g = Graph("padded")
    x = g.input("x", (2, 3, 6, 7), "float32")
    g.outputs = [("y", conv(padded(x, **kinds_of_pad), "c", 4, pad=1))]  # type: ignore[arg-type]
    return g


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (2, 0, 1, 3), (1, 1, 1, 1)])
def test_zero_padding_joins_the_convolution(pads: tuple[int, int, int, int]) -> None:
    graph = kept(padded_conv(pads=pads), padding.fold_padding)
    (node,) = (n for n in graph.nodes if n.op == "conv2d")
    left, right, top, bottom = pads
    assert node.attrs["padding"] == (1 + top, 1 + left, 1 + bottom, 1 + right)
    assert ops(graph)["pointwise"] == 0


@pytest.mark.parametrize(
    "kinds_of_pad",
    [{"pads": (0, 1, 0, 1), "value": 1.0}, {"pads": (0, 1, 0, 1), "guard": index(2) > 2}, {"pads": (-1, 2, 0, 0)}],
)
def test_other_padding_does_not(kinds_of_pad: dict) -> None:
    graph = kept(padded_conv(**kinds_of_pad), padding.fold_padding)
    assert ops(graph)["pointwise"] == 1


def test_padding_of_channels_or_repeated_rows_does_not() -> None:
    g = Graph("channels")
    x = g.input("x", (2, 3, 6, 6), "float32")
    more = where(index(1) < 3, load(0, "float32", [index(d) for d in range(4)]), 0.0)
    rows = where(index(2) < 8, load(0, "float32", [index(0), index(1), const(0, "int64"), index(3)]), 0.0)
    g.outputs = [
        ("a", conv(g.elementwise((2, 5, 6, 6), [x], more), "a", 2)),
        ("b", conv(g.elementwise((2, 3, 9, 6), [x.slice(2, 0, 1)], rows), "b", 2)),
    ]
    assert ops(kept(g, padding.fold_padding))["pointwise"] == 2


def test_padding_with_two_readers_joins_both() -> None:
    g = Graph("shared")
    p = padded(g.input("x", (1, 3, 6, 6), "float32"), (0, 1, 0, 1))
    g.outputs = [("a", conv(p, "a", 2)), ("b", conv(p, "b", 2))]
    assert ops(kept(g, padding.fold_padding))["pointwise"] == 0


# -- batch norm -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
def test_batch_norm_folds_into_long_sums_of_float32(bias: bool) -> None:
    g = Graph("conv bn")
    g.outputs = [("y", relu(batch_norm(conv(g.input("x", (2, 8, 6, 6), "float32"), "c", 40, bias), "bn")))]
    _, kernels = compiled(g)
    (kernel,) = (k for k in kernels if k.kind in ("conv2d", "winograd"))
    assert expr.render(kernel.epilogue) == "maximum((acc + in2[i3]), 0.0)"


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 3), ("float16", 8), ("bfloat16", 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_batch_norm_is_one_scale_and_one_shift_elsewhere(dtype: str, channels: int, bias: bool) -> None:
    g = Graph("conv bn")
    x = g.input("x", (2, channels, 6, 6), dtype)
    g.outputs = [("y", relu(batch_norm(conv(x, "c", 40, bias), "bn")).cast(dtype))]
    _, kernels = compiled(g, dtype=dtype)
    (kernel,) = (k for k in kernels if k.kind in ("conv2d", "winograd"))
    assert "maximum(((acc * in2[i3]) + in3[i3]), 0.0)" in expr.render(kernel.epilogue)


def test_batch_norm_behind_depthwise_grouped_and_linear_layers() -> None:
    g = Graph("others")
    x, rows = g.input("x", (1, 8, 5, 5), "float32"), g.input("rows", (7, 80), "float32")
    y = rows.matmul(g.weight("w", (5, 80), "float32").permute(1, 0)) + g.weight("b", (5,), "float32")
    g.outputs = [
        ("depthwise", batch_norm(conv(x, "d", 8, groups=8), "bn0")),
        ("grouped", batch_norm(conv(x, "g", 6, groups=2), "bn1")),
        ("linear", batch_norm(y, "bn2")),
    ]
    _, kernels = compiled(g)
    epilogues = [expr.render(k.epilogue) for k in kernels if isinstance(k, Anchor)]
    assert sorted(epilogues) == ["((acc * in2[i3]) + in3[i3])"] * 2 + ["(acc + in2[i1])"]


def test_batch_norm_does_not_fold_where_others_see_the_convolution() -> None:
    for shared in (True, False):
        g = Graph("shared")
        y = conv(g.input("x", (1, 3, 5, 5), "float32"), "c", 4)
        g.outputs = [("bn", batch_norm(y, "bn"))] + ([("raw", y)] if shared else [("other", relu(y))])
        before = {n.attrs["key"] for n in g.nodes if n.op == "weight"}
        graph = kept(g, lambda g: (layout.sink_permutes(g), fold.fold_batch_norm(g)))
        (node,) = (n for n in graph.nodes if n.op == "conv2d")
        assert node.inputs[1].op == "permute" and before


@pytest.mark.parametrize(
    "scaled",
    [
        lambda y: y * y.graph.input("s", (4,), "float32"),  # not known at load time
        lambda y: y * y.graph.weight("s", (5, 1), "float32"),  # along rows
        lambda y: y.graph.weight("s", (4,), "float32") / y,  # not linear
        lambda y: y.cast("float64") * 0.5,
    ],
)
def test_other_scales_do_not_fold(scaled: Callable[[Value], Value]) -> None:
    g = Graph("scales")
    g.outputs = [("y", scaled(g.input("x", (5, 6), "float32").matmul(g.weight("w", (6, 4), "float32"))))]
    graph = kept(g, fold.fold_batch_norm)
    (node,) = (n for n in graph.nodes if n.op == "matmul")
    assert node.inputs[1].op == "weight"


def test_integer_products_keep_their_scale() -> None:
    g = Graph("integers")
    y = g.input("x", (5, 6), "int64").matmul(g.weight("w", (6, 4), "int64"))
    g.outputs = [("y", y.cast("float32") * 0.3)]
    assert ops(kept(g, fold.fold_batch_norm))["matmul"] == 1
