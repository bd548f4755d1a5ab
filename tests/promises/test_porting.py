"""Porting: what a new execution backend needs, in the steps of the guide. A whole one is in tests/porting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import npu_compiler
from npu_compiler import CompileError, target_config, targets
from npu_compiler.schedule.kernel import Kernel, Loops
from npu_compiler.support.errors import ConfigError, Reason
from npu_compiler.targets.cpu.target import CPUTarget
from npu_runtime import Backend, get_backend
from npu_runtime.registry import register_backend

from ..support.names_page import ROOT, row_of
from .compiled import Compiled


class LoopsOnly(CPUTarget):
    """A target at the start of its port: it has loops, and no other kernel yet."""

    name = "loops_only"
    config = replace(target_config.target_config("cpu"), name="loops_only", device=None)

    def supports(self, kernel: Kernel) -> Reason | None:
        return None if isinstance(kernel, Loops) else Reason("no_kernel", f"no {kernel.kind} kernel yet")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for table in (targets, target_config):
        monkeypatch.setattr(table, "_registered", {})
    targets.register_target(LoopsOnly())
    yield


def imports(package: str) -> set[str]:
    """The packages that the modules of ``package`` import, at the top or inside functions."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}


def test_the_runtime_depends_on_the_compiler_and_not_the_other_way_round() -> None:
    assert not imports("npu_compiler") & {"npu_runtime", "npusim"}
    runtime = imports("npu_runtime")
    assert "npu_compiler" in runtime and "npusim" not in runtime


@pytest.mark.parametrize("method", "allocate_buffer allocate_zeros execute create_executor synchronize".split())
def test_the_backend_has_the_documented_methods(method: str) -> None:
    assert callable(getattr(Backend, method))


def test_row_108_a_target_can_start_with_loops_alone(convnet: Compiled) -> None:
    """supports() refuses the rest; the partitioner leaves it to the host, and compile() says what is missing."""
    plan = npu_compiler.partition(convnet.ir, target="loops_only", minimise_transfers=False)
    ops = {n.name: n.op_type.split(".")[1] for n in plan.ir.nodes}
    assert {ops[name] for name in plan.reasons} == {"conv2d", "linear"}
    assert {str(r) for r in plan.reasons.values()} == {
        "no conv2d kernel yet [no_kernel]", "no gemm kernel yet [no_kernel]"
    }  # fmt: skip
    assert {p.device for p in plan.partitions} == {"npu", "host"}
    with pytest.raises(CompileError, match="no conv2d kernel yet") as caught:
        npu_compiler.compile(convnet.ir, "loops_only")
    assert {name: reason for name, _, reason in caught.value.reasons} == plan.reasons


def test_row_109_npu_target_takes_a_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_TARGET", "loops_only")
    assert target_config.default_target() == "loops_only"
    monkeypatch.setenv("NPU_TARGET", "loops")
    with pytest.raises(ConfigError, match="cpu, cuda, metal, loops_only"):
        target_config.default_target()


def test_a_backend_is_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LoopsBackend(type(get_backend("cpu"))):  # type: ignore[misc]
        name = "loops_only"

    monkeypatch.setattr("npu_runtime.registry._registered", {})
    register_backend("loops_only", LoopsBackend)
    assert isinstance(get_backend("loops_only"), LoopsBackend)


def test_wiring_it_up_as_the_guide_says(convnet: Compiled) -> None:
    """compile(path, target=object), create_executor(program), run(inputs, weights)."""
    program = npu_compiler.compile(convnet.path, target=CPUTarget())
    backend = get_backend("cpu")
    executor = backend.create_executor(program)
    convnet.check(executor.run([convnet.x], convnet.weights))


def test_row_009_the_guide_walks_through_every_step() -> None:
    guide = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    for step in ("TargetConfig", "supports", "emit", "Backend", "DeviceBuffer", "register_target", "register_backend"):
        assert step in guide, f"the guide explains {step}"
    assert (ROOT / "tests" / "porting" / "test_porting.py").exists()


@pytest.mark.parametrize(
    "documented",
    """CudaCodegenTarget MetalCodegenTarget CudaBuffer CudaExecutor CudaBackend MetalDispatchStrategy _PARAM_SPECS
    CUDAProgram KernelCall""".split(),
)
def test_names_that_differ_by_design(documented: str) -> None:
    row_of(documented).check()


def test_a_target_has_a_protocol_instead_of_a_method_for_each_kernel(convnet: Compiled) -> None:
    contract: Any = targets.CodegenTarget
    assert {"supports", "winograd", "in_limbs", "rewrites", "emit"} <= set(vars(contract))
    for documented in ("elementwise_kernel", "matmul_kernel", "fused_kernel", "shader_source"):
        assert not hasattr(contract, documented)
    assert "instead of a method for each kind of kernel" in row_of("CodegenTarget").differs
