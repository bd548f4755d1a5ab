"""Scheduling and the memory plan: random programs against the graph interpreter, in numpy and as native code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.graph import interp
from npu_compiler.graph.expr import const, fn, index, load
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.pipeline import State, compile_graph, run_graph, switches
from npu_compiler.schedule import checks
from npu_compiler.schedule.anchors import Gemm
from npu_compiler.schedule.buffers import contiguous_strides
from npu_compiler.schedule.kernel import Buffer, Kernel, LoopBody, Loops, Operand
from npu_compiler.schedule.memory_planner import in_place, plan_memory
from npu_compiler.schedule.schedule import Schedule
from npu_runtime import Executor

from ...support.graph_tools import run_kernels
from ...support.random_graphs import Maker, compare

relu = fn("maximum")


def tolerances(makers: list[Maker], graph: Graph) -> dict[str, float]:
    values = [*graph.outputs, *((f"state:{key}", v) for key, v in graph.updates)]
    return {name: m.error[v] for m in makers for name, v in values if v in m.error}


# -- random programs --------------------------------------------------------------------------------------------------
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 14),
    off=st.sampled_from([(), (), (), *((s,) for s in switches("cpu"))]),
)
def test_random_programs_compute_what_their_graph_says(seed: int, steps: int, off: tuple[str, ...]) -> None:
    maker = Maker(random.Random(seed), Graph("random")).build(steps)
    graph = maker.graph
    graph.clean()
    checks.check_graph(graph)
    want, error = interp.run(graph, maker.inputs, maker.weights), tolerances([maker], graph)
    state = run_graph(graph, disable=off, until="memory")
    assert state.schedule is not None
    checks.check_schedule(state.schedule, state.config.buffer_align, planned=True)
    compare(error, run_kernels(state, maker.inputs, maker.weights), want)


@pytest.mark.parametrize("first", [0, 1000])
def test_random_programs_as_native_code(first: int) -> None:
    graph = Graph("many")
    makers = [Maker(random.Random(s), graph, f"g{s}_").build(1 + s % 12) for s in range(first, first + 40)]
    graph.clean()
    inputs = {name: a for m in makers for name, a in m.inputs.items()}
    weights = {name: a for m in makers for name, a in m.weights.items()}
    want, error = interp.run(graph, inputs, weights), tolerances(makers, graph)
    executor = Executor(compile_graph(graph), weights)
    got = executor.run({i.name: inputs[i.name] for i in executor.inputs})
    got |= {f"state:{key}": a for key, a in executor.state.snapshot().items()}
    compare(error, got, want)


# -- where results lie ------------------------------------------------------------------------------------------------
def scheduled(build: Callable[[Graph], None], disable: tuple[str, ...] = ()) -> tuple[State, list[Kernel]]:
    """The program that ``build`` writes, checked against the interpreter on random data."""
    graph = Graph("test")
    build(graph)
    rng = np.random.default_rng(0)
    leaves = {
        n.attrs.get("name") or n.attrs.get("key"): n.out for n in graph.nodes if n.op in ("input", "weight", "state")
    }
    data = {
        name: rng.standard_normal(v.shape).astype(np.float32) if v.dtype == "float32" else rng.integers(0, 2, v.shape)
        for name, v in leaves.items()
    }
    want = interp.run(graph, data, data)
    state = run_graph(graph, disable=disable, until="memory")
    assert state.schedule is not None
    checks.check_schedule(state.schedule, state.config.buffer_align, planned=True)
    got = run_kernels(state, data, data)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    return state, state.schedule.kernels


def kinds(kernels: list[Kernel]) -> list[str]:
    """Of all kernels, those inside others included."""
    return [p.label for k in kernels for p in ((k.prologue,) if isinstance(k, Gemm) and k.prologue else ()) + k.members]


def tanh(x: Value) -> Value:
    return x.graph.pointwise(fn("tanh"), x)


def test_outputs_may_be_inputs_weights_states_and_repeated() -> None:
    def build(g: Graph) -> None:
        x, w, s = g.input("x", (3, 4), "float32"), g.weight("w", (3, 4), "float32"), g.state("s", (3, 4), "float32")
        y = tanh(x)
        g.outputs = [("x", x), ("w", w), ("s", s), ("y", y), ("again", y), ("turned", y.permute(1, 0))]

    _, kernels = scheduled(build)
    assert kinds(kernels).count("map") == 1 and len(kinds(kernels)) == 6


def test_states_may_exchange_their_contents_and_still_be_returned() -> None:
    def build(g: Graph) -> None:
        a, b = (g.state(k, (3, 3), "float32") for k in "ab")
        g.outputs = [("old", a + b), ("a", a)]
        g.updates = [("a", b), ("b", a)]

    scheduled(build)


def test_a_state_may_become_its_own_transpose() -> None:
    def build(g: Graph) -> None:
        a = g.state("a", (3, 3), "float32")
        g.updates = [("a", a.permute(1, 0))]

    scheduled(build)


def write_row(base: Value, row: Value, at: Value) -> Value:
    from npu_compiler.graph.expr import load

    return base.graph.scatter(base, row, [at], [load(0, "int64", [index(0)]), index(1)])


def test_a_cache_is_written_in_place() -> None:
    def build(g: Graph) -> None:
        cache, row, at = (
            g.state("cache", (8, 4), "float32"),
            g.input("row", (1, 4), "float32"),
            g.input("at", (1,), "int64"),
        )
        new = write_row(cache, row, at)
        g.outputs = [("sum", new.sum([0]))]
        g.updates = [("cache", new)]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["scatter", "sum"]


def test_a_cache_whose_old_contents_are_returned_is_not() -> None:
    def build(g: Graph) -> None:
        cache, row, at = (
            g.state("cache", (8, 4), "float32"),
            g.input("row", (1, 4), "float32"),
            g.input("at", (1,), "int64"),
        )
        g.outputs = [("old", cache)]
        g.updates = [("cache", write_row(cache, row, at))]

    scheduled(build)


def test_several_writes_to_one_cache() -> None:
    def build(g: Graph) -> None:
        cache, row, at = (
            g.state("cache", (8, 4), "float32"),
            g.input("row", (1, 4), "float32"),
            g.input("at", (1,), "int64"),
        )
        g.updates = [("cache", write_row(write_row(cache, row, at), tanh(row), at))]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["scatter", "scatter"]


def test_a_scatter_reuses_the_memory_of_a_base_nobody_else_reads() -> None:
    def build(g: Graph) -> None:
        base, row, at = (
            tanh(g.input("x", (8, 4), "float32")),
            g.input("row", (1, 4), "float32"),
            g.input("at", (1,), "int64"),
        )
        g.outputs = [("y", write_row(base, row, at).sum([0]))]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["map", "scatter", "sum"]


def test_producers_write_into_a_concatenation() -> None:
    def build(g: Graph) -> None:
        a, b = g.input("a", (2, 3), "float32"), g.input("b", (2, 5), "float32")
        g.outputs = [("y", g.concat([tanh(a), tanh(b)], 1))]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["map", "map"]
    assert [k.outputs[0].offset for k in kernels] == [0, 3]


def test_nested_concatenations_share_one_buffer() -> None:
    """Every layer of a dense block appends to what there is."""

    def build(g: Graph) -> None:
        x = tanh(g.input("x", (4, 8), "float32"))
        for i in range(3):
            w = g.weight(f"w{i}", (x.shape[1], 8), "float32")
            x = g.concat([x, tanh(tanh(x).matmul(w))], 1)
        g.outputs = [("y", x)]

    _, kernels = scheduled(build)
    assert "copy" not in kinds(kernels)


def test_a_part_that_is_used_twice_is_copied_once() -> None:
    def build(g: Graph) -> None:
        a = tanh(g.input("a", (2, 3), "float32"))
        g.outputs = [("y", g.concat([a, a], 1)), ("a", a)]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["map", "copy", "copy"]


def test_results_go_through_permutes_into_outputs_and_concatenations() -> None:
    def build(g: Graph) -> None:
        a, b = g.input("a", (2, 3, 4), "float32"), g.input("b", (4, 1, 2), "float32")
        softmax = fn("exp")
        y = g.pointwise(softmax, a - a.amax([2]))
        g.outputs = [("y", y.permute(2, 0, 1)), ("z", g.concat([tanh(a).permute(2, 1, 0), tanh(b)], 1).reshape(4, 8))]

    _, kernels = scheduled(build)
    assert "copy" not in kinds(kernels)


def test_an_output_that_is_permuted_and_reshaped_is_copied_once() -> None:
    def build(g: Graph) -> None:
        a, s = g.input("a", (2, 6, 4), "float32"), g.state("s", (3, 4), "float32")
        shuffled = a.reshape(2, 2, 3, 4).permute(0, 2, 1, 3).reshape(2, 6, 4)
        g.outputs = [("shuffled", shuffled), ("flat", shuffled.reshape(48)), ("turned", s.permute(1, 0).reshape(12))]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["copy"] * 3


def test_epilogues_store_rows_and_a_copy_transposes_them() -> None:
    """An epilogue that stored columns would write its vectors element by element; the copy transposes in registers."""

    def build(g: Graph) -> None:
        a, w = g.input("a", (40, 6), "float32"), g.weight("w", (6, 36), "float32")
        g.outputs = [("y", (a.matmul(w) + 1.0).cast("float16").permute(1, 0))]

    _, kernels = scheduled(build)
    assert kinds(kernels) == ["gemm", "copy"]
    assert kernels[0].outputs[0].strides == (36, 1)


def test_rows_that_repeat_are_no_strides_of_a_product() -> None:
    def build(g: Graph) -> None:
        a, w = g.input("a", (1, 6), "float32"), g.weight("w", (6, 5), "float32")
        g.outputs = [("y", a.expand(4, 6).matmul(w)), ("z", a.reshape(6, 1).expand(6, 3).permute(1, 0).matmul(w))]
        g.outputs.append(("batches of a row", a.reshape(1, 1, 6).expand(4, 1, 6).matmul(w)))

    scheduled(build)


def test_batches_of_single_rows_become_one_product() -> None:
    def build(g: Graph) -> None:
        a, w = g.input("a", (5, 1, 6), "float32"), g.weight("w", (6, 5), "float32")
        g.outputs = [("y", a.matmul(w))]

    _, (kernel,) = scheduled(build)
    assert (kernel.batch, kernel.m) == (1, 5)


def test_values_without_elements_and_without_dims() -> None:
    def build(g: Graph) -> None:
        a, s = g.input("a", (0, 3), "float32"), g.input("s", (), "float32")
        w = g.weight("w", (3, 2), "float32")
        g.outputs = [("empty", tanh(a)), ("product", a.matmul(w)), ("sum", a.sum([0])), ("scalar", tanh(s) + s)]
        k = g.input("k", (4, 0), "float32")
        g.outputs.append(("no depth", k.matmul(g.input("k2", (0, 3), "float32"))))

    scheduled(build)


def test_an_index_along_a_dim_of_one_element_stays_zero_in_a_wider_kernel() -> None:
    def build(g: Graph) -> None:
        a = g.input("a", (3, 4), "float32")
        offset = g.elementwise((3, 1), [], index(1).cast("float32") + index(0).cast("float32"))
        g.outputs = [("y", fn_add(a, offset) / a.sum([1]))]

    def fn_add(a: Value, b: Value) -> Value:
        return a.graph.pointwise(lambda x, y: fn("tanh")(x) + fn("exp")(y * const(0.1, "float32")), a, b)

    scheduled(build)


def test_a_lookup_reads_the_rows_it_looks_up() -> None:
    g = Graph("lookup")
    ids, table = g.input("ids", (3,), "int64"), g.weight("table", (256, 48), "float16")
    rows = g.elementwise((3, 48), [table, ids], load(0, "float16", [load(1, "int64", [index(0)]), index(1)]))
    g.outputs = [("rows", rows)]
    (call,) = compile_graph(g).entries["main"].calls
    assert (call.bytes_read, call.bytes_written) == (3 * 48 * 2 + 3 * 8, 3 * 48 * 2)


# -- the memory plan --------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), align=st.sampled_from([1, 64, 256]))
def test_buffers_that_live_together_never_overlap(data: st.DataObject, align: int) -> None:
    sizes = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=25))
    buffers = [Buffer(i, "arena", "float32", (n,), f"b{i}") for i, n in enumerate(sizes)]
    kernels, known = [], 0
    for number in range(data.draw(st.integers(len(sizes), 2 * len(sizes)))):
        reads = data.draw(st.lists(st.integers(0, known - 1), max_size=3)) if known else []
        target = min(known, len(sizes) - 1)
        known = min(known + 1, len(sizes))
        inputs = tuple(whole(buffers[i]) for i in reads if i != target)
        body, outputs = LoopBody((), (), ()), (whole(buffers[target]),)
        kernels.append(Loops(label="map", number=number, inputs=inputs, outputs=outputs, body=body))
    schedule = Schedule("plan", kernels, buffers, [], [])
    plan_memory(schedule, align)
    checks.check_schedule(schedule, align, planned=True)
    touched = {o.buffer.id for k in kernels for o in (*k.inputs, *k.outputs)}
    rounded = [-(-max(b.nbytes, 1) // align) * align for b in buffers if b.id in touched]
    assert max(rounded) <= schedule.arena_bytes <= sum(rounded)
    assert [b.id for b in schedule.buffers] == sorted(touched)


def whole(b: Buffer) -> Operand:
    return Operand(b, b.shape, contiguous_strides(b.shape))


def test_a_result_takes_the_memory_of_a_residual_that_is_not_read_again() -> None:
    def build(g: Graph) -> None:
        ws = [g.weight(f"w{i}", (32, 32), "float32") for i in range(7)]
        a = g.input("x", (40, 32), "float32").matmul(ws[0])
        b = a.matmul(ws[1]).matmul(ws[2]) + a  # reads a for the last time
        c = b.matmul(ws[3]) + b  # b is an operand of the product, too
        d = c.matmul(ws[4]).matmul(ws[5]) + c
        g.outputs = [("y", d.matmul(ws[6]) + c)]  # reads c for the last time

    state, kernels = scheduled(build)
    assert state.schedule is not None
    taken = in_place(kernels)
    products = [k for k in kernels if isinstance(k, Gemm)]
    assert taken == {products[2].outputs[0].buffer.id: products[0].outputs[0].buffer.id}
    assert products[2].outputs[0].buffer.offset == products[0].outputs[0].buffer.offset
    plan_memory(state.schedule, 64)
    first, third = (k.outputs[0].buffer for k in (state.schedule.kernels[i] for i in (0, 2)))
    assert first.offset != third.offset


def test_kernels_of_one_phase_touch_different_data() -> None:
    def build(g: Graph) -> None:
        xs = [tanh(g.input(f"x{i}", (4 + i, 3), "float32")) for i in range(3)]
        g.outputs = [(f"o{i}", x.matmul(g.weight(f"w{i}", (3, 4), "float32"))) for i, x in enumerate(xs)]

    _, kernels = scheduled(build)
    for a in kernels:
        for b in kernels:
            if a is not b and a.barrier_group == b.barrier_group:
                assert not {o.buffer.id for o in a.outputs} & {o.buffer.id for o in (*b.inputs, *b.outputs)}
    assert kernels[-1].barrier_group < len(kernels) - 1


# -- the checks themselves --------------------------------------------------------------------------------------------
def chain() -> State:
    g = Graph("chain")
    x = g.input("x", (64,), "float32")
    y = tanh(x).reshape(8, 8).sum([1])
    g.outputs = [("z", tanh(y).sum([0]))]
    return run_graph(g, disable=("fuse_loops", "fuse_pointwise"), until="memory")


def broken(schedule: Schedule, **changes: object) -> None:
    """Changes the second arena buffer everywhere."""
    old = [b for b in schedule.buffers if b.kind == "arena"][1]
    new = replace(old, **changes)  # type: ignore[arg-type]
    schedule.buffers = [new if b is old else b for b in schedule.buffers]
    schedule.kernels = [k.on_buffers(lambda b: new if b.id == old.id else b) for k in schedule.kernels]


def test_the_check_sees_buffers_that_overlap_or_are_too_small() -> None:
    for changes, message in (
        ({"offset": 0}, "overlap"),
        ({"offset": 4}, "misaligned"),
        ({"shape": (1,)}, "leaves its buffer"),
    ):
        schedule = chain().schedule
        assert schedule is not None
        checks.check_schedule(schedule, 64, planned=True)
        broken(schedule, **changes)
        with pytest.raises(ValueError, match=message):
            checks.check_schedule(schedule, 64, planned=True)


def test_values_once_a_row_do_not_read_reduced_indices() -> None:
    """An element of a normalised row, at a data-dependent index: what is computed once a row has no place in it."""
    g = Graph("element")
    x, place = g.input("x", (8,), "float32"), g.input("place", (1,), "int64")
    y = x - x.mean([0])
    at = load(0, "float32", (load(1, "int64", (index(0),)),))
    g.outputs = [("y", g.elementwise((1,), [y, place], at))]
    schedule = run_graph(g, "metal", until="memory").schedule
    assert schedule is not None and len(schedule.kernels) == 1
    checks.check_schedule(schedule)
    nest = schedule.kernels[0]
    assert isinstance(nest, Loops)
    stages = [replace(s, expr=s.expr + index(0).cast("float32")) for s in nest.body.stages]
    schedule.kernels = [replace(nest, body=replace(nest.body, stages=tuple(stages)))]
    with pytest.raises(ValueError, match="index i0 once a row"):
        checks.check_schedule(schedule)


def test_the_check_sees_reads_before_writes() -> None:
    schedule = chain().schedule
    assert schedule is not None
    schedule.kernels = schedule.kernels[::-1]
    with pytest.raises(ValueError, match="before it is written"):
        checks.check_schedule(schedule)
