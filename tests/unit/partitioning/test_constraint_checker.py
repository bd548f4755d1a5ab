"""The constraint checker, the partitioner and compile() give one answer: on targets, dtypes and ranks, and for targets
whose code generator has few kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import npu_compiler
from npu_compiler import target_config, targets
from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.graph import Graph
from npu_compiler.graph.verify import check_graph
from npu_compiler.ops.common import MAX_STEPS
from npu_compiler.ops.lower import lower_node
from npu_compiler.partitioning import constraint_checker
from npu_compiler.partitioning.constraint_checker import advice, check
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, NPU
from npu_compiler.pipeline import run_phases
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.support.dtypes import DTYPES
from npu_compiler.support.errors import CompileError, Reason
from npu_compiler.targets.cpu.target import CPUTarget
from npu_compiler.targets.metal.dialect import MAX_BUFFERS
from npu_runtime import DAGExecutor
from npu_runtime.backends.base import register_backend
from npu_runtime.backends.cpu import CPUBackend

from ...support.toy_ir import ADD, HEAVY, ODD, RELU, SIGMOID, Builder

ALL_DTYPES = sorted(DTYPES)


def tensor(name: str, shape: tuple[int, ...], dtype: str, made: bool = True) -> TensorSpec:
    return TensorSpec(name, shape, dtype, (name, 0) if made else None)


def abs_of(dtype: str, rank: int) -> IRGraph:
    shape = (2,) * min(rank, 2) + (1,) * (rank - 2)
    x, y = tensor("x", shape, dtype), tensor("y", shape, dtype)
    return IRGraph("one", [x], [y], [], {}, [OpNode("y", "aten.abs.default", [x], [TensorSpec("y", shape, dtype)])])


def refusals(ir: IRGraph, target: str) -> list[tuple[str, str, Reason]]:
    """What compile() refuses, without its code generator."""
    try:
        run_phases(ir, target, until="memory")
    except CompileError as error:
        return error.reasons
    return []


@pytest.mark.parametrize("target", ["cpu", "cuda", "metal"])
@pytest.mark.parametrize("rank", [0, 1, 4, 8, 9, 12])
def test_check_partition_and_compile_agree(target: str, rank: int) -> None:
    held = target_config.target_config(target).dtypes
    for dtype in ALL_DTYPES:
        ir = abs_of(dtype, rank)
        found = check(ir, target)
        assert found == refusals(ir, target)
        assert partition(ir, target=target).reasons == {name: reason for name, _, reason in found}
        assert bool(found) == (rank > 8 or dtype not in held), dtype
        (node,) = explain(ir, target).nodes
        assert (node.reason is not None) == bool(found)


def test_compile_reports_everything_at_once() -> None:
    ir = Builder().node("o", ODD, "x").node("r", RELU, "o").node("m", HEAVY, "r", "r", made_up=1).out("m")
    wide = tensor("w", (1,) * 9, "float64")
    ir.graph_inputs.append(wide)
    ir.nodes.append(OpNode("d", "aten.neg.default", [wide], [TensorSpec("d", wide.shape, "float64")]))
    ir.graph_outputs += [TensorSpec("d", wide.shape, "float64", ("d", 0)), wide]
    with pytest.raises(CompileError, match="4 node") as caught:
        npu_compiler.compile(ir, "metal")
    found = {name: reason.rule for name, _, reason in caught.value.reasons}
    assert found == {"o": "no_kernel", "m": "attribute", "d": "rank", "w": "rank"}
    assert check(ir, "metal") == caught.value.reasons


def test_an_output_that_no_node_makes() -> None:
    """It needs a copy, which a target may not be able to make; the partitioner hands it over on the host."""
    ir = Builder().node("r", RELU, "x").out("r")
    double = tensor("x64", (3,), "float64")
    ir.graph_inputs.append(double)
    assert check(ir, "metal") == [], "an input that nothing reads does no harm"
    ir.graph_outputs.append(double)
    assert [(name, reason.rule) for name, _, reason in check(ir, "metal")] == [("x64", "dtype")]
    with pytest.raises(CompileError, match="x64"):
        npu_compiler.compile(ir, "metal")
    plan = partition(ir, target="metal")
    assert [p.device for p in plan.partitions] == [NPU] and plan.partitions[0].outputs == (("r", 0),)
    npu_compiler.compile(plan.partitions[0].ir, "metal")


# ------------------------------------------------------------------------------------------- targets with few kernels


class FewKernels(CPUTarget):
    """The CPU's code generator, with some kinds of kernels only."""

    def __init__(self, *kinds: str, **numbers: Any):
        self.name, self.kinds = "few", kinds
        self.config = replace(CPUTarget.config, name="few", bundles=False, prologue_rows=0, **numbers)

    def supports(self, kernel: Kernel) -> Reason | None:
        return None if kernel.kind in self.kinds else Reason("no_kernel", f"no {kernel.kind} kernel yet")


class FewBackend(CPUBackend):
    name = "few"


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    from npu_runtime import registry

    with pytest.MonkeyPatch.context() as patch:
        for table in (target_config._registered, targets._registered, registry._registered):
            patch.setitem(table, "few", None)  # what was there before is put back
            del table["few"]
        register_backend("few", FewBackend)
        yield


def small_network() -> IRGraph:
    """conv, relu, a sum over a dim, a product with a weight, softmax, sort."""
    b = Builder()
    x, w = tensor("x", (1, 3, 6, 6), "float32"), tensor("p_w", (8, 3, 3, 3), "float32", made=False)
    m = tensor("p_m", (4, 5), "float32", made=False)
    ir = b.ir
    ir.graph_inputs = [x]
    ir.weights = [replace(w, name="w"), replace(m, name="m")]
    ir.weight_name_mapping = {"p_w": "w", "p_m": "m"}

    def node(name: str, op: str, shape: tuple[int, ...], *inputs: TensorSpec, **attrs: Any) -> TensorSpec:
        ir.nodes.append(OpNode(name, op, list(inputs), [TensorSpec(name, shape, "float32")], attrs))
        return TensorSpec(name, shape, "float32", (name, 0))

    c = node("conv", "aten.conv2d.default", (1, 8, 4, 4), x, w)
    r = node("relu", RELU, (1, 8, 4, 4), c)
    s = node("sum", "aten.sum.dim_IntList", (1, 8, 4), r, dim=[3])
    p = node("product", "aten.matmul.default", (1, 8, 5), s, m)
    ir.graph_outputs = [node("softmax", "aten.softmax.int", (1, 8, 5), p, dim=-1)]
    return ir


def test_a_target_can_start_with_loops_alone() -> None:
    """What its code generator refuses runs on the host, with the reason; all of them say the same."""
    targets.register_target(FewKernels("loops"))
    ir = small_network()
    reasons = {name: reason.detail for name, _, reason in check(ir, "few")}
    assert reasons == {"conv": "no conv2d kernel yet", "product": "no gemm kernel yet"}
    plan = partition(ir, target="few", minimise_transfers=False)
    assert {n: r.detail for n, r in plan.reasons.items()} == reasons
    assert {n.name for n in explain(ir, "few", minimise_transfers=False).nodes if n.device == "host"} == set(reasons)
    assert [p.device for p in plan.partitions] == [HOST, NPU, HOST, NPU]
    with pytest.raises(CompileError) as caught:
        npu_compiler.compile(ir, "few")
    assert [(name, reason.detail) for name, _, reason in caught.value.reasons] == list(reasons.items())

    rng = np.random.default_rng(0)
    weights = {w.name: rng.standard_normal(w.shape, np.float32) for w in ir.weights}
    x = rng.standard_normal((1, 3, 6, 6), np.float32)
    mixed = DAGExecutor(plan, "few", weights=weights).execute([x])["softmax"]
    whole = DAGExecutor(partition(ir), "cpu", weights=weights).execute([x])["softmax"]
    np.testing.assert_allclose(mixed, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("written", [False, True])
def test_a_weight_that_is_computed_when_weights_are_loaded(written: bool) -> None:
    """Its convolution is a kernel of its own, as is one of a weight that changes from run to run."""
    targets.register_target(FewKernels("loops"))
    ir = small_network()
    w = tensor("p_w", (8, 3, 3, 3), "float32", made=False)
    double = OpNode("w2", "aten.mul_.Tensor" if written else "aten.mul.Tensor", [w], [replace(w, name="w2")])
    double.attrs["other"] = 2.0
    conv = ir.nodes[0]
    conv.inputs[1] = tensor("w2", w.shape, "float32")
    ir.nodes.insert(0, double)
    refused = {name for name, _, _ in check(ir, "few")}
    assert refused == {"conv", "product"}
    assert refused == {name for name, _, _ in refusals(ir, "few")}
    plan = partition(ir, target="few", minimise_transfers=False)
    assert set(plan.reasons) == refused
    weights = {s.name: np.full(s.shape, 0.25, np.float32) for s in ir.weights}
    x = np.linspace(-1, 1, 108, dtype=np.float32).reshape(1, 3, 6, 6)
    mixed = DAGExecutor(plan, "few", weights=weights).execute([x])["softmax"]
    np.testing.assert_allclose(mixed, DAGExecutor(partition(ir), weights=weights).execute([x])["softmax"], rtol=1e-5)


def test_a_fusion_that_the_target_has_no_kernel_for_is_left_out() -> None:
    """Products and loops, but no attention: the decomposed spelling stays as it is."""
    targets.register_target(FewKernels("loops", "gemm", "pack"))
    b = Builder(("q", "k", "v"))
    b.node("t", "aten.transpose.int", "k", dim0=0, dim1=1).node("s", HEAVY, "q", "t")
    b.node("p", "aten.softmax.int", "s", dim=-1).node("y", HEAVY, "p", "v")
    ir = four_dims(b.out("y"))
    assert "attention" in kinds(ir, "cpu") and check(ir, "few") == []
    assert kinds(ir, "few") == {"gemm", "loops", "pack"}


def kinds(ir: IRGraph, target: str) -> set[str]:
    schedule = run_phases(ir, target, until="memory").schedule
    assert schedule is not None
    return {k.kind for k in schedule.kernels}


def four_dims(ir: IRGraph) -> IRGraph:
    """The same graph on tensors [1, 2, rows, columns]."""

    def wider(t: TensorSpec) -> TensorSpec:
        return replace(t, shape=(1, 2, *t.shape))

    for node in ir.nodes:
        node.inputs, node.outputs = [wider(t) for t in node.inputs], [wider(t) for t in node.outputs]
        node.attrs = {k: v + 2 if k.startswith("dim") and v >= 0 else v for k, v in node.attrs.items()}
    ir.graph_inputs, ir.graph_outputs = [wider(t) for t in ir.graph_inputs], [wider(t) for t in ir.graph_outputs]
    return ir


def test_a_fused_kernel_of_too_many_operands() -> None:
    """Metal binds at most 31 buffers: every sum of two compiles, so their sum does."""
    names = [f"x{i}" for i in range(MAX_BUFFERS + 9)]
    b = Builder(names).node("s0", ADD, names[0], names[1])
    for i, name in enumerate(names[2:], 1):
        b.node(f"s{i}", ADD, f"s{i - 1}", name)
    ir = b.out(f"s{len(names) - 2}")
    assert check(ir, "metal") == []
    program = npu_compiler.compile(ir, "metal")
    assert program.entries["main"].calls and partition(ir, target="metal").reasons == {}


def test_every_kernel_that_is_refused_names_its_nodes() -> None:
    """A core graph has no IR to try again from: the error lists the kernels."""
    targets.register_target(FewKernels())
    with pytest.raises(CompileError, match="no loops kernel yet") as caught:
        npu_compiler.compile(Builder().node("a", RELU, "x").node("b", SIGMOID, "x").out("a", "b"), "few")
    assert [name for name, _, _ in caught.value.reasons] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------- advice


@pytest.mark.parametrize(("channels", "padded"), [(33, 64), (32, None), (1000, None), (5, 32)])
def test_advice_says_what_the_weight_packing_does(channels: int, padded: int | None) -> None:
    x, w = tensor("x", (1, 3, 8, 8), "float32"), tensor("p_w", (channels, 3, 3, 3), "float32", made=False)
    conv = OpNode("c", "aten.conv2d.default", [x, w], [TensorSpec("c", (1, channels, 6, 6), "float32")])
    text = advice(conv, "cpu")
    assert (text == "") if padded is None else text.startswith(f"{channels} output channels cost as much as {padded}")
    ir = IRGraph("c", [x], [tensor("c", (1, channels, 6, 6), "float32")], [replace(w, name="w")], {"p_w": "w"}, [conv])
    state = run_phases(ir, "cpu", disable=("winograd",), until="memory")
    (packed,) = [v.shape for _, v in state.recipes if v.op == "pack"]
    assert packed[1] * packed[-1] == (padded or -(-channels // 32) * 32), "the very buffer"
    assert advice(conv, "cuda") == "", "no panels there"


# ------------------------------------------------------------------------------------------------ what an answer costs


def test_each_call_is_tried_once_for_a_graph_and_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def counted(node: OpNode, weights: tuple[int, ...]) -> Any:
        tried.append(node.op_type)
        return lower_node(node, weights)

    monkeypatch.setattr(constraint_checker, "lower_node", counted)
    ir = Builder().node("a", RELU, "x").node("b", SIGMOID, "a").node("c", RELU, "b").node("d", ODD, "c").out("d", "b")
    check(ir)
    plan = partition(ir)
    explain(ir)
    for part in plan.partitions:
        if part.device == NPU:
            run_phases(part.ir, "cpu", until="memory")
    assert sorted(tried) == sorted((RELU, SIGMOID, ODD))
    assert copy.deepcopy(ir) == ir and not copy.deepcopy(ir).dry_runs
    explain(ir, target="metal")
    assert sorted(tried) == sorted((RELU, SIGMOID, ODD) * 2)


def call_of(op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], **attrs: Any) -> IRGraph:
    given = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(inputs)]
    y = tensor("y", output, "float32")
    return IRGraph("one", given, [y], [], {}, [OpNode("y", op, given, [y], attrs)])


@pytest.mark.parametrize("more", [0, 1])
def test_calls_of_very_many_kernels_go_to_the_fallback(more: int) -> None:
    depth = MAX_STEPS + more
    for ir in (
        call_of("aten.conv3d.default", [(1, 1, depth, 2, 2), (1, 1, depth, 2, 2)], (1, 1, 1, 1, 1)),
        call_of("aten.diff.default", [(depth + 1,)], (1,), n=depth),
    ):
        reasons = [reason for _, _, reason in check(ir)]
        assert [r.rule for r in reasons] == ["size"] * more
        assert all(f"at most {MAX_STEPS} are compiled" in r.detail for r in reasons)


def test_a_wrong_part_of_many_is_shown_alone() -> None:
    graph = Graph()
    shapes = [(2, 3)] * 1000 + [(3, 2)]
    parts = [graph.input(str(i), shape, "float32") for i, shape in enumerate(shapes)]
    with pytest.raises(ValueError, match="concat of float32") as raised:
        graph.concat(parts, 0)
        check_graph(graph)
    assert len(str(raised.value)) < 200
