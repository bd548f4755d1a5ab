"""The partition path: plans, transfers, and execution on the NPU and the host."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npu_compiler
from npu_compiler import CompiledProgram, PartitionPlan
from npu_compiler.partitioner import Partition, TransferOp
from npu_compiler.support.errors import ConfigError
from npu_runtime import DAGExecutor, execute_cpu_partition, get_backend
from npusim import cli

from ..support.names_page import row_of
from ..support.toy_ir import HEAVY, ODD, SHAPE, SIGMOID, Builder
from .compiled import Compiled

GELU, BF16 = "aten.gelu.default", ml_dtypes.bfloat16


@dataclass
class Mixed:
    """A bfloat16 model x @ w -> gelu -> @ w with gelu on the host, and what was compiled for it."""

    ir: dict[str, Any]
    plan: PartitionPlan
    dag: DAGExecutor
    compiled: list[CompiledProgram]


X, W = (np.random.default_rng(seed).uniform(-1, 1, SHAPE).astype(BF16) for seed in (1, 2))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    b = Builder(weights=("w",)).node("a", HEAVY, "x", "p_w").node("g", GELU, "a").node("y", HEAVY, "g", "p_w")
    path = tmp_path_factory.mktemp("mixed") / "ir.json"
    npu_compiler.save_ir(b.out("y"), path)
    ir = json.loads(path.read_text().replace("float32", "bfloat16"))
    compiled: list[CompiledProgram] = []

    def compile_fn(part: Any) -> CompiledProgram:
        compiled.append(npu_compiler.compile(part))
        return compiled[-1]

    plan = npu_compiler.partition(ir, lambda op, attrs: op != GELU)
    return Mixed(ir, plan, DAGExecutor(plan, compile_fn=compile_fn), compiled)


def test_a_supported_model_is_one_partition(convnet: Compiled) -> None:
    """The documented spelling: an IR dict and a predicate over op types."""
    plan = npu_compiler.partition(json.loads(Path(convnet.path).read_text()), npu_compiler.is_op_supported)
    assert [p.device for p in plan.partitions] == ["npu"] and not plan.transfers and not plan.reasons


def test_unsupported_ops_go_to_the_host_by_themselves() -> None:
    ir = Builder().node("o", ODD, "x").node("y", HEAVY, "o", "x").out("y")
    plan = npu_compiler.partition(ir)
    assert [(p.device, p.nodes) for p in plan.partitions] == [("host", ("o",)), ("npu", ("y",))]
    assert "special_bessel_j1" in str(plan.reasons["o"])


def test_consecutive_nodes_share_a_partition_and_transfers_lie_between(mixed: Mixed) -> None:
    steps = [
        s.device if isinstance(s, Partition) else f"{s.src} to {s.dst}: {s.value[0]}, {s.nbytes} bytes"
        for s in mixed.plan.steps
    ]
    assert steps == ["npu", "npu to host: a, 32 bytes", "host", "host to npu: g, 32 bytes", "npu"]
    assert all(isinstance(t, TransferOp) for t in mixed.plan.transfers) and mixed.plan.transferred_bytes == 64


@pytest.mark.parametrize("argument", ["positional", "is_supported_fn", "is_supported"])
def test_row_062_callback_takes_op_and_attrs(convnet: Compiled, argument: str) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def callback(op: str, attrs: dict[str, Any]) -> bool:
        seen[op] = attrs
        return op != "aten.max_pool2d.default"

    if argument == "positional":
        plan = npu_compiler.partition(convnet.ir, callback)
    else:
        plan = npu_compiler.partition(convnet.ir, **{argument: callback})
    assert set(plan.reasons) == {"max_pool2d"} and "aten.max_pool2d.default" in str(plan.reasons["max_pool2d"])
    assert seen["aten.max_pool2d.default"]["kernel_size"] == [3, 3]
    assert npu_compiler.partition(convnet.ir, lambda op: op != "aten.max_pool2d.default").reasons == plan.reasons


@pytest.mark.parametrize("spelling", ["aten.relu_.default", "aten.relu.default"])
def test_row_063_in_place_ops_are_excluded_by_either_name(convnet: Compiled, spelling: str) -> None:
    for plan in (
        npu_compiler.partition(convnet.ir, force_cpu=[spelling], minimise_transfers=False),
        npu_compiler.partition(convnet.ir, lambda op: op != spelling, minimise_transfers=False),
    ):
        in_place = {"relu_", "relu__1"}
        assert set(plan.reasons) == (in_place if "_." in spelling else in_place | {"relu"})


def test_row_063_a_name_that_does_not_exist_is_refused(convnet: Compiled) -> None:
    with pytest.raises(ConfigError, match=r"'aten.relo.default' is neither .* did you mean aten\.relu\.default"):
        npu_compiler.partition(convnet.ir, force_cpu=["aten.relo.default"])


def test_row_065_only_what_is_excluded_moves() -> None:
    b = Builder().node("e", "aten.exp.default", "x").node("r", "aten.relu.default", "e").node("g", GELU, "r")
    ir = b.node("y", SIGMOID, "g").out("y")
    assert len(npu_compiler.partition(ir, force_cpu=[GELU]).partitions) == 1, "cheap ops follow to save transfers"
    plan = npu_compiler.partition(ir, force_cpu=[GELU], minimise_transfers=False)
    assert set(plan.reasons) == {"g"} and [p.device for p in plan.partitions] == ["npu", "host", "npu"]


def test_row_070_execute_takes_weights(mixed: Mixed) -> None:
    out = mixed.dag.execute({"x": X}, weights={"w": W})
    wanted = execute_cpu_partition(npu_compiler.load_ir(mixed.ir), {"x": X}, {"w": W})
    assert out["y"].dtype == wanted["y"].dtype == BF16, "bfloat16 is preserved across devices"
    np.testing.assert_allclose(out["y"].astype(np.float32), wanted["y"].astype(np.float32), rtol=0.05, atol=0.05)


def test_row_077_a_mixed_model_from_the_command_line(tmp_path: Path) -> None:
    """One file is compiled, with an op put on the host, and run."""
    ir, program, out = (str(tmp_path / name) for name in ("ir.json", "ir.npubin", "out.npz"))
    b = Builder(weights=("w",)).node("a", HEAVY, "x", "p_w").node("g", GELU, "a")
    npu_compiler.save_ir(b.out("g"), ir)
    x, w = (np.random.default_rng(seed).uniform(-1, 1, SHAPE).astype(np.float32) for seed in (1, 2))
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "w.npz", w=w)
    assert cli.main(["compile", ir, "--force-cpu", GELU, "-o", program, "-q"]) == 0
    weights = ["--weights", str(tmp_path / "w.npz")]
    assert cli.main(["run", program, *weights, "--input", str(tmp_path / "x.npy"), "--output", out]) == 0
    wanted = execute_cpu_partition(b.ir, {"x": x}, {"w": w})["g"]
    with np.load(out) as found:
        np.testing.assert_allclose(found["g"], wanted, rtol=1e-5, atol=1e-6)


def test_partitions_are_compiled_when_the_executor_is_made(mixed: Mixed) -> None:
    before = list(mixed.compiled)
    assert len(before) == 2 and list(mixed.dag.programs.values()) == before
    mixed.dag.load_weights({"w": W})
    stores = [e.weights for e in mixed.dag.executors.values()]
    first, second = mixed.dag.execute({"x": X}), mixed.dag.execute([X])
    np.testing.assert_array_equal(first["y"], second["y"])
    assert mixed.compiled == before, "runs compile nothing"
    assert all(e.weights is s for e, s in zip(mixed.dag.executors.values(), stores, strict=True)), "and load nothing"


def test_compile_fn_selects_the_compiler(mixed: Mixed) -> None:
    """``compile_fn`` gets the IR of each NPU partition; functools.partial sets a target or a dtype."""
    programs = iter(mixed.compiled)
    parts: list[Any] = []

    def compile_fn(ir: Any, target: str) -> CompiledProgram:
        parts.append((ir, target))
        return next(programs)

    DAGExecutor(mixed.plan, get_backend("cpu"), compile_fn=partial(compile_fn, target="cpu"))
    assert parts == [(p.ir, "cpu") for p in mixed.plan.partitions if p.device == "npu"]


def test_the_host_runs_what_the_npu_does_not(mixed: Mixed) -> None:
    torch = pytest.importorskip("torch")
    part = next(p for p in mixed.plan.partitions if p.device == "host")
    name = part.ir.graph_inputs[0].name
    (out,) = execute_cpu_partition(part.ir, {name: X}).values()
    wanted = torch.nn.functional.gelu(torch.from_numpy(X.astype(np.float32)).bfloat16())
    assert out.dtype == BF16
    np.testing.assert_array_equal(out.astype(np.float32), wanted.float().numpy())


def test_row_106_transfers_and_the_whole_run_are_timed(mixed: Mixed) -> None:
    mixed.dag.load_weights({"w": W})
    profile = mixed.dag.profile([X], runs=2, warmup=0)
    assert [s.step for s in profile.steps] == mixed.plan.steps and len(profile.whole) == profile.runs == 2
    transfers = [s for s in profile.steps if isinstance(s.step, TransferOp)]
    assert len(transfers) == 2 and all((s.end >= s.begin).all() for s in transfers)
    kernels = [s.marks[:, 1:] for s in profile.steps if isinstance(s.step, Partition)]
    assert all(times.size and (times >= 0).all() for times in kernels)
    assert profile.seconds > 0 and (profile.whole > 0).all()


@pytest.mark.parametrize(
    "documented",
    """Partition.target Partition.partition_id Partition.input_names Partition.output_names TransferOp.direction
    TransferOp.tensor_names TransferCall plan.original_ir execute_cpu_partition(nodes,pool,weights)
    torch_ir.IRExecutor""".split(),
)
def test_names_that_differ_by_design(documented: str) -> None:
    row_of(documented.replace(",", ", ")).check()
