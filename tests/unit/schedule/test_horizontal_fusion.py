"""Kernels inside and beside others: prologues, bundles and paired matmuls."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.graph import expr, interp
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.passes.dual_gemm import dual_gemm
from npu_compiler.pipeline import compile_graph, run_graph
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.support.errors import InputError
from npu_runtime import CPUBackend, Executor, load_weights

from ...support.graph_tools import run_kernels
from ...support.sweeps import FULL

RNG = np.random.default_rng(0)


def call(op: str, x: Value) -> Value:
    return x.graph.pointwise(lambda a: expr.call(op, a), x)


def norm(g: Graph, x: Value) -> Value:
    """An RMS norm with a weight, rounded where PyTorch rounds."""
    wide = x.cast("float32")
    scaled = wide * call("rsqrt", (wide * wide).mean((x.rank - 1,)) + 1e-5)
    return (scaled.cast(x.dtype) * g.weight("norm", (x.shape[-1],), x.dtype)).cast(x.dtype)


def gated_mlp(rows: int, dtype: str = "float32", hidden: int = 32, inner: int = 96) -> Graph:
    g = Graph("mlp")
    x = g.input("x", (rows, hidden), dtype)
    y = norm(g, x)
    gate = y.matmul(g.weight("gate", (hidden, inner), dtype))
    up = y.matmul(g.weight("up", (hidden, inner), dtype))
    inside = ((gate * call("sigmoid", gate)).cast(dtype) * up).cast(dtype)
    g.outputs = [("out", (x + inside.matmul(g.weight("down", (inner, hidden), dtype))).cast(dtype))]
    return g


def data(graph: Graph) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    made: dict[str, dict[str, np.ndarray]] = {"input": {}, "weight": {}, "state": {}}
    for node in graph.nodes:
        if node.op in made:
            key = node.attrs["name"] if node.op == "input" else node.attrs["key"]
            array = RNG.standard_normal(node.out.shape).astype(numpy_dtype(node.out.dtype))
            made[node.op][key] = array
    return made["input"], made["weight"] | made["state"]


def check(make: object, *args: object, tolerance: float = 2e-5) -> list[str]:
    """Kernel kinds of the program; the schedule in numpy and the compiled program give the graph's results."""
    graph = make(*args)  # type: ignore[operator]
    inputs, weights = data(graph)
    want = interp.run(graph, inputs, weights)
    state = run_graph(make(*args))  # type: ignore[operator]
    planned = run_kernels(state, inputs, weights)
    program = compile_graph(make(*args))  # type: ignore[operator]
    native = Executor(program, load_weights(program, weights), CPUBackend(threads=2)).run(inputs)
    for name, value in want.items():
        scale = float(np.abs(value.astype(np.float64)).max())
        for found in (planned[name], *([native[name]] if name in native else [])):  # a state is not an output
            error = np.abs(found.astype(np.float64) - value.astype(np.float64)).max()
            assert error <= tolerance * scale, (name, error, scale)
    assert state.schedule is not None
    return [k.kind for k in state.schedule.kernels]


DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize(  # by default the dtypes take turns
    ("rows", "dtype"), [(r, d) for r in (1, 2, 3, 4) for i, d in enumerate(DTYPES) if FULL or (r - 1) % 3 == i]
)
def test_a_decoding_mlp_is_two_kernels(rows: int, dtype: str) -> None:
    tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    assert check(gated_mlp, rows, dtype, tolerance=tolerance) == ["gemm", "gemm"]


@pytest.mark.parametrize(("rows", "hidden", "inner"), [(5, 32, 96), (17, 48, 32), (64, 64, 160), (130, 32, 1024)])
def test_longer_products_are_paired_but_compute_the_norm_once(rows: int, hidden: int, inner: int) -> None:
    assert check(gated_mlp, rows, "float32", hidden, inner) == ["loops", "gemm", "gemm"]


def test_halves_of_a_panel_are_not_paired() -> None:
    assert check(gated_mlp, 8, "float32", 32, 80) == ["loops", "gemm", "gemm", "gemm"]


def two_readers() -> Graph:
    """The product of ``up`` is also a result of its own."""
    g = Graph("two_readers")
    x = g.input("x", (6, 32), "float32")
    gate, up = (x.matmul(g.weight(k, (32, 64), "float32")) for k in ("gate", "up"))
    g.outputs = [("out", call("tanh", gate) * up), ("up", up)]
    return g


def other_rows() -> Graph:
    g = Graph("other_rows")
    x, y = g.input("x", (6, 32), "float32"), g.input("y", (6, 32), "float32")
    a, b = x.matmul(g.weight("a", (32, 64), "float32")), y.matmul(g.weight("b", (32, 64), "float32"))
    g.outputs = [("out", call("tanh", a) * b)]
    return g


def shifted() -> Graph:
    """The epilogue of one product reads the other in another order."""
    g = Graph("shifted")
    x = g.input("x", (6, 32), "float32")
    a, b = (x.matmul(g.weight(k, (32, 64), "float32")) for k in "ab")
    g.outputs = [("out", call("tanh", a) * b.reshape(6, 2, 32).permute(0, 2, 1).reshape(6, 64))]
    return g


@pytest.mark.parametrize("make", [two_readers, other_rows, shifted])
def test_what_must_not_be_paired(make: object) -> None:
    graph = make()  # type: ignore[operator]
    nodes = [n for n in graph.nodes if n.op == "matmul"]
    claimed = {nodes[0]: [n for n in graph.nodes if n.op == "pointwise"], nodes[1]: []}
    before = dict(claimed)
    dual_gemm(graph, claimed, 32)
    assert claimed == before
    assert check(make).count("gemm") == 2


def changed_between() -> Graph:
    """The state that the norm reads is overwritten before the product runs: the norm must not move behind that."""
    g = Graph("changed")
    state = g.state("s", (1, 32), "float32")
    x = g.input("x", (1, 32), "float32")
    y = norm(g, state)
    g.outputs = [("out", y.matmul(g.weight("w", (32, 64), "float32")))]
    g.updates = [("s", x + state)]
    return g


def test_a_prologue_reads_what_the_kernel_would_have_read() -> None:
    assert "gemm" in check(changed_between)


def written_twice() -> Graph:
    """A row in which one kernel writes all elements and a second one writes an element again."""
    g = Graph("written_twice")
    x, one = g.input("x", (1, 32), "float32"), g.input("one", (1, 1), "float32")
    row = g.scatter(call("exp", x), one, [], [expr.index(0), expr.index(1) + 9])
    g.outputs = [("out", row.matmul(g.weight("w", (32, 64), "float32")))]
    return g


def test_a_prologue_writes_the_operand_alone() -> None:
    assert "gemm" in check(written_twice)


def independent() -> Graph:
    g = Graph("independent")
    x, y = g.input("x", (3, 40), "float32"), g.input("y", (7, 5), "float32")
    g.outputs = [
        ("a", call("exp", x)), ("b", y.sum((1,))), ("c", call("tanh", y.permute(1, 0))),
    ]  # fmt: skip
    return g


def test_independent_loops_are_one_launch() -> None:
    assert check(independent) == ["fused_loops"]
    state = run_graph(independent(), disable=("horizontal_fusion",))
    assert state.schedule is not None and [k.kind for k in state.schedule.kernels] == ["loops"] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_is_kept_once(dtype: str) -> None:
    def tied() -> Graph:
        g = Graph("tied")
        ids = g.input("ids", (3,), "int64")
        table = g.weight("table", (256, 48), dtype)
        rows = g.elementwise(
            (3, 48), [table, ids], expr.load(0, dtype, [expr.load(1, "int64", [expr.index(0)]), expr.index(1)])
        )
        g.outputs = [("rows", rows), ("logits", rows.matmul(table.permute(1, 0)))]
        return g

    rng = np.random.default_rng(1)
    inputs = {"ids": np.array([0, 255, 77])}
    weights = {"table": rng.standard_normal((256, 48)).astype(numpy_dtype(dtype))}
    want = interp.run(tied(), inputs, weights)
    planned = run_kernels(run_graph(tied()), inputs, weights)
    program = compile_graph(tied())
    executor = Executor(program, load_weights(program, weights), CPUBackend(threads=2))
    native = executor.run(inputs)
    for found in (planned, native):
        np.testing.assert_array_equal(found["rows"], want["rows"])
        scale = np.abs(want["logits"].astype(np.float64)).max()
        assert np.abs(found["logits"].astype(np.float64) - want["logits"].astype(np.float64)).max() <= 1e-2 * scale
    assert [b.kind for b in program.buffers].count("weight") == 1
    for wrong in (-1, 256):
        with pytest.raises(InputError, match="out of range"):
            executor.run({"ids": np.array([0, wrong, 1])})
