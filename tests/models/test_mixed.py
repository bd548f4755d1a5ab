"""A model with ops that the NPU lacks in two interleaved branches: fewest partitions, PyTorch's result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npu_compiler
import npu_runtime
import npusim
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.partitioning.plan import HOST, NPU, PartitionPlan
from npu_compiler.support.errors import CompileError
from npu_runtime import DAGExecutor

from ..support.sweeps import IN_FULL
from .random_models import images, randomise

DECODER = Path(__file__).parents[1] / "data" / "ir" / "qwen2_decode.json"
UNSUPPORTED = {"aten.polygamma.default"}


class Branches(nn.Module):
    """Two towers of convolutions; each leaves the NPU once, at a different depth; their sum goes on there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._block(3, 16)
        self.left = nn.ModuleList(self._block(16, 16) for _ in range(3))
        self.right = nn.ModuleList(self._block(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    @staticmethod
    def _block(channels: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        left = self.left[0](x)
        left = torch.polygamma(2, left.clamp(0, 3) + 1)
        right = self.right[1](self.right[0](x))
        right = torch.polygamma(3, right.abs() + 1)
        left = self.left[2](self.left[1](left))
        right = self.right[2](right)
        pooled = F.adaptive_avg_pool2d(left + right, 1).flatten(1)
        return self.head(pooled), pooled


def model() -> nn.Module:
    torch.manual_seed(0)
    return randomise(Branches(), images(8, 16))


def fewest(ir: IRGraph, plan: PartitionPlan) -> int:
    """Fewest alternating runs that any order of the nodes allows, given each node's device: the longest chain of
    changes of device along a path, over both devices that may come first."""
    device = {name: p.device for p in plan.partitions for name in p.nodes}
    best = len(device)
    for first in (NPU, HOST):
        run: dict[str, int] = {}
        for node in ir.nodes:
            if node.name not in device:
                continue
            before = [run[t.producer[0]] for t in node.inputs if t.producer and t.producer[0] in run]
            at = max(before, default=0)
            run[node.name] = at + (at % 2 != (device[node.name] != first))
        best = min(best, max(run.values()) + 1)
    return best


def test_partitions_are_minimal() -> None:
    ir = capture(model(), images(2, 16))
    plan = npu_compiler.partition(ir)
    devices = [p.device for p in plan.partitions]
    assert devices == [NPU, HOST, NPU]  # both branches leave together and come back together
    assert len(devices) == fewest(plan.ir, plan)
    on_cpu = {n.op_type for p in plan.partitions if p.device == HOST for n in p.ir.nodes}
    assert on_cpu == UNSUPPORTED  # nothing that the NPU could have done went along
    assert len(plan.transfers) == 4  # one value a branch, there and back


@pytest.mark.parametrize(
    ("batch", "dtype"), [*(pytest.param(n, "float32", marks=IN_FULL) for n in (1, 3)), (2, "float32"), (2, "float16")]
)
def test_results_are_pytorchs(batch: int, dtype: str) -> None:
    net = model().to(getattr(torch, dtype))
    x = images(batch, 16).to(getattr(torch, dtype))
    executor = DAGExecutor(npu_compiler.partition(capture(net, x)), weights=state_dict_numpy(net))
    with torch.no_grad():
        wanted = net(x)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for found, want in zip(executor.execute([x]).values(), wanted, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, want.numpy(), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def built() -> npusim.Model:
    return npusim.build(model(), images(2, 16))


def test_build_gives_the_models_own_structure(built: npusim.Model) -> None:
    net, x = model(), images(2, 16)
    with torch.no_grad():
        wanted = net(x)
    found = built(x)
    assert isinstance(found, tuple) and len(found) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [p.device for p in built.plan.partitions] == [NPU, HOST, NPU]
    with pytest.raises(CompileError, match=r"polygamma .*order 2 [\s\S]*polygamma_1 .*order 3"):
        npusim.build(net, x, fallback=False)


def test_what_is_saved_gives_the_same_numbers(built: npusim.Model, tmp_path: Path) -> None:
    loaded, x = npusim.load(built.save(tmp_path / "branches")[0]), images(2, 16)
    assert isinstance(loaded, npu_runtime.MixedModel) and loaded.program.host_ops == sorted(UNSUPPORTED)
    for ours, theirs in zip(loaded(x), built(x), strict=True):
        assert torch.equal(ours, theirs)
    assert loaded.program.describe().startswith("mixed model Branches: compiled for cpu")


def test_only_what_is_excluded_moves() -> None:
    net = nn.Sequential(nn.ReLU(), nn.GELU(), nn.Sigmoid())
    x = torch.randn(4, 8)
    built = npusim.build(net, x, force_cpu=["aten.gelu.default"], minimise_transfers=False)
    assert [(p.device, len(p.nodes)) for p in built.plan.partitions] == [(NPU, 1), (HOST, 1), (NPU, 1)]
    torch.testing.assert_close(built(x), net(x))


class Counting(nn.Module):
    """Counts in a buffer, with an op that the NPU lacks, so that the host keeps the buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.copy_(torch.special.bessel_j1(self.count) + 1)
        return x @ x.T, self.count * 2


def test_a_buffer_on_the_host_is_one_for_all_shapes(tmp_path: Path) -> None:
    net, reference = Counting(), Counting()
    built = npusim.build(net, torch.rand(2, 4))
    for rows in (2, 3, 2, 3):
        x = torch.rand(rows, 4)
        for ours, theirs in zip(built(x), reference(x), strict=True):
            torch.testing.assert_close(ours, theirs)
    loaded = npu_runtime.load(built.save(tmp_path / "counting")[0])
    fresh = Counting()
    for _ in range(2):
        x = torch.rand(2, 4)
        torch.testing.assert_close(loaded(x)[1], fresh(x)[1])


def test_shapes_of_results_that_nothing_reads_are_not_compared() -> None:
    """PyTorch states a wrong size for one of embedding_bag's results, which its module drops. In half precision the op
    runs on the host."""
    bags = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True).half()
    tokens, offsets = torch.tensor([1, 2, 9, 0, 3]), torch.tensor([0, 2, 5])
    torch.testing.assert_close(npusim.build(bags, (tokens, offsets))(tokens, offsets), bags(tokens, offsets))


def test_private_ops_that_an_export_makes_run_on_the_host() -> None:
    class Factors(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            left, right = x + 1, x * 2
            torch._foreach_mul_([left, right], 0.5)
            return *torch.lu(left), *torch._foreach_add([left, right], [x, left])

    x = torch.randn(3, 3)
    for ours, theirs in zip(npusim.build(Factors(), (x,))(x), Factors()(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_decoder_step_keeps_its_caches(tmp_path: Path) -> None:
    """The activation of its MLPs runs on the host; the caches of keys and values stay on the NPU."""
    ir = npu_compiler.as_state(npu_compiler.load_ir(DECODER))
    plan = npu_compiler.partition(ir, force_cpu=["aten.silu.default"], minimise_transfers=False)
    assert [p.device for p in plan.partitions] == [NPU, HOST, NPU, HOST, NPU] and not plan.feeds
    npu_compiler.compile_plan(plan).save(tmp_path / "step.npubin")
    rng, state = np.random.default_rng(0), {u.key: u.value for u in ir.state}
    weights = {
        w.name: np.zeros(w.shape, w.dtype) if w.name in state else rng.uniform(-0.1, 0.1, w.shape).astype(w.dtype)
        for w in ir.weights
    }
    step, reference = npu_runtime.load(tmp_path / "step.npubin", weights), {k: v.copy() for k, v in weights.items()}
    for position, token in enumerate((3, 7, 1)):
        inputs = {t.name: np.full(t.shape, position, t.dtype) for t in step.inputs}
        inputs |= {"input_ids": np.array([[token]]), "attention_mask": np.zeros((1, 1, 1, 32), np.float32)}
        wanted = npu_runtime.execute_cpu_partition(ir, inputs, reference)
        for name, found in step.run(inputs).items():
            np.testing.assert_allclose(found, wanted[name], rtol=1e-4, atol=1e-5)
    assert any(reference[key].any() for key in state), "the caches were written"
