"""Programs for aarch64, compiled by zig and run under qemu-user: conformance cases, and weights in a format.

By default a sample of the cases runs on the row of the device table that has each code path;
``NPU_CONFORMANCE=full`` runs the cases of the native CPU target on every row.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.pipeline import compile_graph
from npu_compiler.targets.cpu import target
from npu_compiler.targets.cpu.devices import DEVICES
from npu_compiler.weights.format import BlockFormat, weight_format
from npu_runtime import Executor, load_weights

from ...conformance.cases import PROGRAM, Case, all_cases, cases_for, check, compile_cases, to_numpy
from ...support.aarch64_backend import EmulatedAarch64, obstacle
from ...support.sweeps import FULL

# The rows of the device table, and the emulated CPU with these features and no later ones that the compiler would use.
CPUS = {"neon": "cortex-a53", "armv8.2": "neoverse-n1", "armv8.6": "max"}

# Kernels of each kind. bfloat16 products have instructions of their own in Armv8.6; float16 conversions use NEON.
ANCHORS = ("mm.default", "scaled_dot_product_attention.default")
LOOPS = (
    *("add.Tensor", "where.self", "exp.default", "sin.default", "tanh.default", "erf.default", "log1p.default"),
    *("round.default", "rsqrt.default", "pow.Tensor_Tensor", "_softmax.default", "native_layer_norm.default"),
    *("atan2.default", "acos.default", "acosh.default", "tan.default", "fmod.Tensor", "floor_divide.default"),
    *("sum.dim_IntList", "amax.default", "cumsum.default", "sort.default", "max_pool2d.default", "embedding.default"),
)
SAMPLE = {"neon": LOOPS, "armv8.2": ("relu.default",), "armv8.6": ANCHORS}


def _cases(device: str) -> list[Case]:
    if FULL:
        return cases_for("cpu")
    names = {f"aten.{name}" for name in SAMPLE[device]}
    return [c for c in all_cases() if c.op_type in names and c.number == 0 and c.dtype != "float64"]


def _run(device: str, cases: list[Case]) -> list[str]:
    """Run cases as one program; return what is wrong, a message per case."""
    batch = compile_cases(cases)
    program = compile_graph(batch.graph, f"cpu:{device}")
    backend = EmulatedAarch64(CPUS[device])
    executor = Executor(program, load_weights(program, {}, backend), backend)
    results = executor.run({k: np.array(v, order="C") for k, v in batch.inputs.items()})
    messages = [f"{case}: {error}" for case, error in batch.failed.items()]
    for case, names in batch.outputs.items():
        try:
            check(case, [np.asarray(results[n]) for n in names], batch.summing[case])
        except AssertionError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module", autouse=True)
def emulator() -> None:
    """Skip the tests where the emulator or the compiler is missing; with an empty cache, finding out takes seconds."""
    if reason := obstacle():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_is_short", lambda schedule, costs: False)


def test_every_row_for_aarch64_has_a_cpu() -> None:
    assert [d.name for d in DEVICES if d.machine == "aarch64" and not d.system] == [*CPUS][::-1]


@pytest.mark.parametrize("device", CPUS)
def test_conformance(device: str) -> None:
    cases, messages = _cases(device), []
    assert len(cases) >= len(SAMPLE[device])
    if not FULL:
        messages = _run(device, cases)
    else:
        for _, family in groupby(sorted(cases, key=lambda c: c.family), key=lambda c: c.family):
            group = list(family)
            for at in range(0, len(group), PROGRAM):
                messages += _run(device, group[at : at + PROGRAM])
    assert not messages, f"{len(messages)} of {len(cases)} cases failed\n" + "\n".join(messages)


@pytest.mark.parametrize(
    ("name", "device"),
    [("bf16c12", "neon"), ("q8_0", "armv8.6"), ("fp8_e4m3", "neon"), ("q5_k", "armv8.6"), ("mxfp4", "neon")],
)
def test_products_with_weights_in_a_format(name: str, device: str) -> None:
    torch.manual_seed(5)
    layer, x = torch.nn.Linear(256, 64, bias=False).bfloat16().eval(), torch.randn(2, 256).bfloat16()
    program = npu_compiler.compile(capture(layer, (x,)), target=f"cpu:{device}", weights=name)
    assert any(b.format.startswith(name) for b in program.buffers)
    backend, w = EmulatedAarch64(CPUS[device]), to_numpy(layer.weight)
    (y,) = Executor(program, {"weight": w}, backend).run([to_numpy(x)]).values()
    format = weight_format(name)
    stored = format.decode(format.encode(w), 256) if isinstance(format, BlockFormat) else w
    exact = x.double().numpy() @ stored.astype(np.float64).T
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0, atol=2**-8 * np.abs(exact).max())


def test_convolution() -> None:
    """Conformance samples of convolutions are so small that loops compute them; this one has a kernel."""
    dtype, device = torch.bfloat16, "armv8.6"
    torch.manual_seed(6)
    conv, x = torch.nn.Conv2d(16, 40, 3, 2, bias=False).to(dtype).eval(), torch.randn(1, 16, 25, 25).to(dtype)
    program = npu_compiler.compile(capture(conv, (x,)), target=f"cpu:{device}")
    assert "conv2d" in {call.kind for call in program.entries["main"].calls}
    backend = EmulatedAarch64(CPUS[device])
    (y,) = Executor(program, {"weight": to_numpy(conv.weight)}, backend).run([to_numpy(x)]).values()
    exact = conv.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0, atol=torch.finfo(dtype).eps * np.abs(exact).max())
