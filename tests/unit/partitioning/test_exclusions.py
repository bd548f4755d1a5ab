"""What the caller of ``partition`` keeps off the NPU, in every spelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import npu_compiler
from npu_compiler.aten.ir import IRGraph
from npu_compiler.partitioning.explain import explain
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, PartitionPlan
from npu_compiler.support.errors import ConfigError
from npusim.cli import main

from ...support.toy_ir import ADD, RELU, RELU_, SIGMOID, Builder

RESNET18 = Path(__file__).parents[3] / "tests" / "data" / "ir" / "resnet18.json"
EXP, GELU = "aten.exp.default", "aten.gelu.default"


def mixed() -> IRGraph:
    """``a`` is written in place by ``b``; ``c`` is out of place; ``d`` is neither."""
    b = Builder().node("a", ADD, "x", "x").node("b", RELU_, "a").node("c", RELU, "b").node("d", SIGMOID, "c")
    return b.out("d")


def excluded(plan: PartitionPlan) -> set[str]:
    return {n for n, r in plan.reasons.items() if r.rule in ("forced", "no_kernel")}


@pytest.mark.parametrize(
    ("name", "nodes"), [(RELU_, {"b"}), (RELU, {"b", "c"}), ("d", {"d"}), ("aten.sigmoid_.default", set())]
)
def test_names_are_known_as_the_ir_spells_them(name: str, nodes: set[str]) -> None:
    assert excluded(partition(mixed(), force_cpu=[name])) == nodes
    assert excluded(partition(mixed(), force_cpu=name)) == nodes
    if "." in name:
        assert excluded(partition(mixed(), lambda op: op != name)) == nodes


def test_resnet_in_its_own_spelling() -> None:
    functional = partition(RESNET18, force_cpu=["aten.relu.default"])
    for plan in (
        partition(RESNET18, force_cpu=["aten.relu_.default"]),
        partition(RESNET18, is_supported_fn=lambda op: op != "aten.relu_.default"),
        partition(RESNET18, is_supported=lambda op: op != "aten.relu_.default"),
    ):
        assert len(plan.partitions) == len(functional.partitions) > 1
        assert plan.reasons.keys() == functional.reasons.keys()


@pytest.mark.parametrize(
    ("name", "near"),
    [("aten.relu.defualt", RELU), ("relu", RELU), ("nodes", "'mixed'"), ("aten.relux_.default", RELU_)],
)
def test_unknown_names_are_refused_with_near_misses(name: str, near: str) -> None:
    ir = mixed()
    ir.model_name = "mixed"
    with pytest.raises(ConfigError, match="neither a node nor an op") as caught:
        partition(ir, force_cpu=["d", name])
    assert repr(name) in str(caught.value) and near in str(caught.value)


def test_an_op_that_other_models_have_is_known() -> None:
    """One list serves several graphs."""
    assert excluded(partition(mixed(), force_cpu=["aten.gelu.default"])) == set()


def test_the_callback_gets_attributes_if_it_takes_them() -> None:
    seen: list[tuple[Any, ...]] = []

    def both(op: str, attrs: dict[str, Any]) -> bool:
        seen.append((op, attrs))
        return attrs.get("alpha") is None

    def one(op: str) -> bool:
        seen.append((op,))
        return True

    def with_default(op: str, blocked: tuple[str, ...] = (SIGMOID,)) -> bool:
        return op not in blocked

    class Method:
        def supports(self, op: str, attrs: dict[str, Any]) -> bool:
            return both(op, attrs)

    ir = mixed()
    ir.nodes[0].attrs["alpha"] = 2
    for f in (both, Method().supports, lambda *both_of_them: both(*both_of_them)):
        assert excluded(partition(ir, is_supported_fn=f)) == {"a"}
    assert (ADD, {"alpha": 2}) in seen
    seen.clear()
    assert excluded(partition(ir, one)) == set() and (ADD,) in seen
    assert excluded(partition(ir, with_default)) == {"d"}
    assert excluded(partition(ir, {RELU, ADD, SIGMOID, RELU_}.__contains__)) == set()
    assert excluded(partition(ir, npu_compiler.is_op_supported)) == set()


def test_one_callback_under_two_names() -> None:
    allow: Callable[[str], bool] = lambda op: True  # noqa: E731
    with pytest.raises(ConfigError, match="one of them"):
        partition(mixed(), allow, is_supported=allow)


def test_only_what_is_excluded_moves_if_the_caller_wants_that() -> None:
    b = Builder().node("e", EXP, "x").node("r", RELU, "e").node("g", GELU, "r").node("s", SIGMOID, "g")
    ir = b.out("s")
    assert partition(ir, force_cpu=[GELU]).reasons.keys() > {"g"}, "cheap neighbours move with it"
    plan = partition(ir, force_cpu=[GELU], minimise_transfers=False)
    assert plan.reasons.keys() == {"g"}
    assert [p.nodes for p in plan.partitions if p.device == HOST] == [("g",)]
    report = explain(ir, force_cpu=[GELU], minimise_transfers=False)
    assert [n.device for n in report.nodes] == ["npu", "npu", "host", "npu"]


def test_the_command_line_excludes_ops(capsys: pytest.CaptureFixture[str]) -> None:
    def explained(*options: str) -> tuple[int, dict[str, Any]]:
        code = main(["explain", str(RESNET18), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    _, moved = explained("--force-cpu", "aten.relu_.default")
    code, kept = explained("--force-cpu", "aten.relu_.default", "--no-minimise-transfers")
    on_host = {n["op"] for n in kept["nodes"] if n["device"] == "host"}
    assert code == 0 and on_host == {"aten.relu_.default"} and kept["partitions"] == 35
    assert kept["npu_percent"] >= moved["npu_percent"]
    code, wrong = explained("--force-cpu", "aten.rely.default")
    assert code == 1 and "did you mean" in wrong["error"]["message"]
