"""Placement, grouping and transfers; minimality against brute force on small random graphs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.aten.ir import IRGraph, OpNode, StateUpdate, TensorSpec
from npu_compiler.aten.json_reader import load_ir
from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.partitioning.algorithms import fewest_runs, min_cut
from npu_compiler.partitioning.constraint_checker import NodeChecker, check
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.functionalize import functionalize
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, NPU, PartitionPlan, TransferOp
from npu_compiler.support.errors import CompileError, IRError, Reason
from npu_compiler.target_config import target_config

from ...support.toy_ir import ADD, GETITEM, HEAVY, ODD, RELU, RELU_, SHAPE, SIGMOID, VIEW, Builder


def only_odd_refused(node: OpNode) -> Reason | None:
    return Reason("no_kernel", "odd") if node.op_type == ODD else None


def plan_of(ir: IRGraph, **options: object) -> PartitionPlan:
    return partition(ir, check=only_odd_refused, **options)  # type: ignore[arg-type]


def devices(plan: PartitionPlan) -> str:
    return " ".join(p.device for p in plan.partitions)


def check_plan(plan: PartitionPlan) -> None:
    """Every value is made before it is read, on the reading device; nothing is moved twice or in vain."""
    held = {((t.name, 0), d) for t in plan.inputs for d in (NPU, HOST)}
    held |= {((p, -1), NPU) for p in plan.ir.weight_name_mapping}
    made: set[str] = set()
    moved: set[tuple[object, str]] = set()
    for i, step in enumerate(plan.steps):
        if isinstance(step, TransferOp):
            assert (step.value, step.src) in held and (step.value, step.dst) not in held
            assert (step.value, step.dst) not in moved
            rest = [s for s in plan.steps[i:] if not isinstance(s, TransferOp) and s.device == step.dst]
            assert any(step.value in s.inputs for s in rest), "moved, but not read there"
            moved.add((step.value, step.dst))
            held.add((step.value, step.dst))
        else:
            assert {(k, step.device) for k in step.inputs} <= held
            assert [t.producer for t in step.ir.graph_inputs] == [(t.name, 0) for t in step.ir.graph_inputs]
            load_ir(json.loads(json.dumps(ir_to_dict(step.ir))))  # a graph of its own
            held |= {(k, step.device) for k in step.outputs}
            made.update(step.nodes)
    assert made == {n.name for n in plan.ir.nodes}
    assert {n for p in plan.partitions if p.device == HOST for n in p.nodes} == set(plan.reasons)


# ----------------------------------------------------------------------------------------------------------- grouping


def test_one_device_is_one_partition_without_transfers() -> None:
    plan = plan_of(Builder().node("a", RELU, "x").node("b", HEAVY, "a", "a").out("b"))
    assert devices(plan) == "npu" and not plan.transfers and not plan.reasons
    assert plan.partitions[0].ir.graph_outputs == plan.outputs


def test_independent_branches_share_partitions() -> None:
    b = Builder()
    for i in range(3):  # interleaved in program order: npu host npu, three times
        b.node(f"a{i}", HEAVY, "x", "x").node(f"o{i}", ODD, f"a{i}").node(f"b{i}", HEAVY, f"o{i}", f"o{i}")
    plan = plan_of(b.node("s", ADD, "b0", "b1").node("t", ADD, "s", "b2").out("t"))
    assert devices(plan) == "npu host npu"
    assert len(plan.transfers) == 6 and plan.transferred_bytes == 6 * 64
    check_plan(plan)


def test_start_device_is_chosen() -> None:
    ir = Builder().node("o", ODD, "x").node("a", HEAVY, "x", "x").node("b", HEAVY, "a", "o").out("b")
    assert devices(plan_of(ir)) == "host npu"


def test_value_moves_once_per_direction() -> None:
    b = Builder().node("a", HEAVY, "x", "x").node("o1", ODD, "a").node("o2", ODD, "a").node("b", HEAVY, "o1", "a")
    plan = plan_of(b.node("o3", ODD, "b").node("c", ADD, "o3", "a").node("o4", ADD, "o2", "c").out("o4"))
    assert [t.value[0] for t in plan.transfers].count("a") == 1
    check_plan(plan)


def test_graph_outputs_and_inputs_are_no_transfers() -> None:
    plan = plan_of(Builder().node("a", HEAVY, "x", "x").node("o", ODD, "x").out("a", "o", "x", "a"))
    assert not plan.transfers and [t.name for t in plan.outputs] == ["a", "o", "x", "a"]
    check_plan(plan)


def test_getitem_follows_its_producer() -> None:
    b = Builder().node("s", ODD, "x", outputs=2).node("m", HEAVY, "x", "x")
    b.node("g0", GETITEM, "s_0", "s_1", index=0).node("g1", GETITEM, "s_0", "s_1", index=1)
    plan = plan_of(b.node("y", HEAVY, "g1", "m").out("y", "g0"))
    assert devices(plan) == "host npu" and plan.reasons["g1"].rule == "follows"
    assert [t.value for t in plan.transfers] == [("g1", 0)]
    check_plan(plan)


def test_dead_nodes_are_dropped() -> None:
    plan = plan_of(Builder().node("a", RELU, "x").node("o", ODD, "a").out("a"))
    assert devices(plan) == "npu" and plan.partitions[0].nodes == ("a",)


def test_colliding_tensor_names_are_told_apart() -> None:
    b = Builder().node("o", ODD, "x", outputs=2)
    b.node("o_1", ODD, "x")  # its tensor is also called o_1
    first, second = TensorSpec("o_1", SHAPE, "float32", ("o", 1)), TensorSpec("o_1", SHAPE, "float32", ("o_1", 0))
    b.ir.nodes.append(OpNode("y", HEAVY, [first, second], [TensorSpec("y", SHAPE, "float32")]))
    b.ir.graph_outputs = [TensorSpec("y", SHAPE, "float32", ("y", 0))]
    plan = plan_of(b.ir)
    assert {t.value for t in plan.transfers} == {("o", 1), ("o_1", 0)}
    npu = plan.partitions[-1].ir
    assert len({t.name for t in npu.graph_inputs}) == 2 and npu.nodes[0].inputs[0] != npu.nodes[0].inputs[1]
    check_plan(plan)


def brute_force_runs(labels: Sequence[str], deps: Sequence[set[int]]) -> int:
    best = len(labels)
    for order in itertools.permutations(range(len(labels))):
        at = {item: i for i, item in enumerate(order)}
        if all(at[d] < at[i] for i, before in enumerate(deps) for d in before):
            best = min(best, sum(1 for _ in itertools.groupby(order, key=lambda i: labels[i])))
    return best


@st.composite
def dags(draw: st.DrawFn, limit: int) -> tuple[list[str], list[set[int]]]:
    n = draw(st.integers(1, limit))
    labels = draw(st.lists(st.sampled_from((NPU, HOST)), min_size=n, max_size=n))
    deps = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(n)]
    return labels, deps


@settings(max_examples=150, deadline=None)
@given(dags(6))
def test_fewest_runs_is_minimal(dag: tuple[list[str], list[set[int]]]) -> None:
    labels, deps = dag
    runs = fewest_runs(labels, deps)
    order = [i for run in runs for i in run]
    assert sorted(order) == list(range(len(labels)))
    assert all(order.index(d) < order.index(i) for i, before in enumerate(deps) for d in before)
    assert all(len({labels[i] for i in run}) == 1 for run in runs)
    assert len(runs) == brute_force_runs(labels, deps)


@settings(max_examples=100, deadline=None)
@given(dags(40))
def test_plans_of_random_graphs_are_consistent(dag: tuple[list[str], list[set[int]]]) -> None:
    labels, deps = dag
    b = Builder()
    for i, (label, before) in enumerate(zip(labels, deps, strict=True)):
        b.node(f"n{i}", ODD if label == HOST else HEAVY, *([f"n{d}" for d in sorted(before)] or ["x"]))
    plan = plan_of(b.out(*(f"n{i}" for i in range(len(labels)))))
    check_plan(plan)
    assert len(plan.partitions) == len(fewest_runs(labels, deps))


def test_empty_graph_has_no_partitions() -> None:
    plan = plan_of(Builder().out("x"))
    assert plan.steps == [] and "0 NPU and 0 host" in str(plan)


# ---------------------------------------------------------------------------------------------------------- transfers


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 6), st.data())
def test_min_cut_equals_brute_force(n: int, data: st.DataObject) -> None:
    nodes = ["s", "t", *range(n)]
    pairs = [(a, b) for a in nodes for b in nodes if a != b and a != "t" and b != "s"]
    weights = data.draw(st.lists(st.sampled_from((0, 0, 1, 2, 5)), min_size=len(pairs), max_size=len(pairs)))
    capacity = {p: float(w) for p, w in zip(pairs, weights, strict=True)}

    def cost(sink_side: set[object]) -> float:
        return sum(c for (a, b), c in capacity.items() if a not in sink_side and b in sink_side)

    subsets = (set(c) | {"t"} for k in range(n + 1) for c in itertools.combinations(range(n), k))
    found = min_cut(capacity, "s", "t")
    assert "t" in found and "s" not in found
    assert cost(found) == min(map(cost, subsets))


def test_cheap_nodes_stay_beside_cpu_neighbours() -> None:
    b = Builder().node("o1", ODD, "x").node("v", VIEW, "o1", size=[4, 4]).node("r", RELU, "v").node("o2", ODD, "r")
    plan = plan_of(b.out("o2"))
    assert devices(plan) == "host" and not plan.transfers
    assert {n: r.rule for n, r in plan.reasons.items()} == {
        "o1": "no_kernel", "v": "transfer", "r": "transfer", "o2": "no_kernel",
    }  # fmt: skip


def test_costly_nodes_do_not_move() -> None:
    plan = plan_of(Builder().node("o1", ODD, "x").node("m", HEAVY, "o1", "o1").node("o2", ODD, "m").out("o2"))
    assert devices(plan) == "host npu host" and plan.transferred_bytes == 128


def test_cheap_node_between_devices_does_not_move_in_vain() -> None:
    plan = plan_of(Builder().node("o", ODD, "x").node("r", RELU, "o").node("m", HEAVY, "r", "r").out("m"))
    assert "r" not in plan.reasons and plan.transferred_bytes == 64


def test_moving_never_adds_partitions() -> None:
    # On the host, c would need one small value instead of two large ones, but the NPU's run would be split.
    b = Builder().node("small", HEAVY, "x", "x", shape=(1, 1)).node("o1", ODD, "x").node("o2", ODD, "x")
    b.node("c", "aten.clamp.Tensor", "o1", "small", "o2").node("m", HEAVY, "c", "c")
    plan = plan_of(b.out("m"))
    assert devices(plan) == "host npu" and plan.transferred_bytes == 128
    b.node("o3", ODD, "small").node("k", HEAVY, "o3", "m")  # now the run is split in any case
    plan = plan_of(b.out("k"))
    assert devices(plan) == "npu host npu" and plan.reasons["c"].rule == "transfer"
    check_plan(plan)


# ----------------------------------------------------------------------------------------------- aliases and state


def test_in_place_chain_becomes_functional() -> None:
    b = Builder().node("m", HEAVY, "x", "x").node("r", RELU_, "m").node("y", ADD, "m", "r")
    ir, shared = functionalize(b.out("y", "m"))
    assert not shared and [n.op_type for n in ir.nodes] == [HEAVY, RELU, ADD]
    assert [t.producer for t in ir.nodes[2].inputs] == [("r", 0), ("r", 0)]  # m now means what relu_ left in it
    assert [t.producer for t in ir.graph_outputs] == [("y", 0), ("r", 0)]


def test_earlier_reader_of_a_written_tensor_keeps_the_old_value() -> None:
    b = Builder().node("m", HEAVY, "x", "x").node("old", SIGMOID, "m").node("r", RELU_, "m")
    plan = plan_of(b.node("o", ODD, "r").node("y", HEAVY, "o", "old").out("y"))
    old = next(n for n in plan.ir.nodes if n.name == "old")
    assert old.inputs[0].producer == ("m", 0)
    check_plan(plan)


def test_view_written_under_its_base_stays_on_one_device() -> None:
    b = Builder().node("m", HEAVY, "x", "x").node("v", VIEW, "m", size=[4, 4]).node("r", RELU_, "v")
    ir = b.node("y", ADD, "m", "r").node("o", ODD, "y").node("z", HEAVY, "o", "x").out("z")
    plan = plan_of(ir)
    assert {n for n, r in plan.reasons.items() if r.rule == "alias"} == {"m", "v", "r", "y"}
    order = [n for p in plan.partitions for n in p.nodes]
    assert order.index("v") < order.index("r") < order.index("y")
    assert next(n for n in plan.ir.nodes if n.name == "r").op_type == RELU_  # really in place
    check_plan(plan)


def test_shared_memory_alone_needs_no_cpu() -> None:
    ir = Builder().node("v", VIEW, "x", size=[4, 4]).node("r", RELU_, "v").node("y", ADD, "x", "r").out("y")
    assert devices(partition(ir)) == "npu"


def test_writing_two_parts_of_a_split_is_seen_as_shared() -> None:
    b = Builder().node("s", "aten.split.Tensor", "x", outputs=2, split_size=2)
    b.node("g0", GETITEM, "s_0", "s_1", index=0).node("r", RELU_, "g0").node("g1", GETITEM, "s_0", "s_1", index=1)
    _, shared = functionalize(b.node("y", ADD, "g1", "r").node("o", ODD, "y").out("o"))
    assert [s.root for s in shared] == [("x", 0)] and shared[0].writers == {"r"}
    assert devices(plan_of(b.ir)) == "host"


def test_written_buffer_becomes_state() -> None:
    b = Builder(weights=("count",)).node("r", RELU_, "p_count").node("y", ADD, "x", "p_count")
    plan = plan_of(b.out("y"))
    assert plan.ir.state == [StateUpdate("count", TensorSpec("r", SHAPE, "float32", ("r", 0)))]
    assert plan.ir.nodes[1].inputs[1].producer == ("r", 0)


def stateful(odd_reader: bool) -> IRGraph:
    b = Builder(weights=("kv",)).node("new", HEAVY, "p_kv", "x")
    b.node("o", ODD, "p_kv" if odd_reader else "new").node("y", HEAVY, "o", "p_kv")
    ir = b.out("y")
    ir.state.append(StateUpdate("kv", b.specs["new"]))
    return ir


def test_state_stays_on_one_device() -> None:
    plan = plan_of(stateful(odd_reader=True))
    assert devices(plan) == "host"
    assert plan.reasons["new"].rule == "state" and not plan.feeds


def test_state_of_several_partitions_is_fed() -> None:
    plan = plan_of(stateful(odd_reader=False))
    assert devices(plan) == "npu host npu" and plan.feeds == {"kv": ("new", 0)}
    assert all("kv" not in {w.name for w in p.ir.weights} for p in plan.partitions)
    check_plan(plan)


def test_state_of_one_partition_is_its_own() -> None:
    b = Builder(weights=("kv",)).node("new", HEAVY, "p_kv", "x").node("o", ODD, "new").node("y", HEAVY, "o", "o")
    ir = b.out("y")
    ir.state.append(StateUpdate("kv", b.specs["new"]))
    plan = plan_of(ir)
    assert not plan.feeds and [u.key for u in plan.partitions[0].ir.state] == ["kv"]
    check_plan(plan)


def test_constant_written_through_a_view_is_refused() -> None:
    import numpy as np

    b = Builder()
    b.ir.constants["c"] = np.zeros(SHAPE, np.float32)
    b.specs["c"] = TensorSpec("c", SHAPE, "float32")
    b.node("v", VIEW, "c", size=[4, 4]).node("r", RELU_, "v").node("o", ODD, "c").node("y", HEAVY, "o", "x")
    with pytest.raises(CompileError, match="clone"):
        plan_of(b.out("y"))


def test_getitem_out_of_range_is_an_error() -> None:
    b = Builder().node("r", RELU_, "x").node("g", GETITEM, "r", index=3)
    with pytest.raises(IRError, match="getitem index 3"):
        plan_of(b.out("g"))


# ------------------------------------------------------------------------------------------------- rules and reports


def test_checker_and_partitioner_give_the_same_answer() -> None:
    b = Builder().node("r", RELU, "x").node("o", ODD, "r").node("m", SIGMOID, "o")
    ir = b.out("m")
    ir.nodes[0].attrs["made_up"] = 1
    refused = check(ir)
    assert [(name, reason.rule) for name, _, reason in refused] == [("r", "attribute"), ("o", "no_kernel")]
    plan = partition(ir)
    assert {n: r for n, r in plan.reasons.items() if r.rule != "transfer"} == {n: r for n, _, r in refused}


def test_rank_and_dtype_limits() -> None:
    def one(shape: tuple[int, ...], dtype: str) -> list[str]:
        t = TensorSpec("x", shape, dtype, ("x", 0))
        node = OpNode("r", RELU, [t], [TensorSpec("r", shape, dtype)])
        ir = IRGraph("one", [t], [TensorSpec("r", shape, dtype, ("r", 0))], [], {}, [node])
        return [reason.rule for _, _, reason in check(ir)]

    assert one((1,) * 8, "float32") == []
    assert one((1,) * 9, "float32") == ["rank"]
    assert one((2,), "complex64") == ["dtype"]
    narrow = replace(target_config("cpu"), name="narrow", dtypes=frozenset({"float16"}))
    assert NodeChecker(narrow)(Builder().node("r", RELU, "x").ir.nodes[0]) == Reason(
        "dtype", "x is float32, which narrow does not hold", "cast it to one of float16"
    )


def test_plan_reads_well_and_serialises() -> None:
    plan = plan_of(Builder().node("o", ODD, "x").node("m", HEAVY, "o", "o").out("m"))
    text = str(plan)
    assert "toy: 1 NPU and 1 host partition(s), 1 transfer(s), 64 bytes" in text
    assert "transfer o host -> npu, 64 bytes" in text and "odd [no_kernel]" in text
    data = json.loads(json.dumps(plan.to_dict()))
    assert [s["step"] for s in data["steps"]] == ["partition", "transfer", "partition"]
    assert data["reasons"]["o"] == {"rule": "no_kernel", "detail": "odd", "fix": ""}


def test_explain_says_what_runs_where() -> None:
    b = Builder().node("a", RELU, "x").node("o", ODD, "x").node("dead", ODD, "a")
    report = explain(b.out("a", "o"))
    assert [n.device for n in report.nodes] == ["npu", "host", "dropped"]
    assert report.npu_percent == 50.0 and report.rows()[0][:2] == (ODD, 1)
    assert "1 of 2 nodes on the NPU (50 %)" in str(report) and ODD in str(report)
    assert json.loads(json.dumps(report.to_dict()))["partitions"] == 2
