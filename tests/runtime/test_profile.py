"""Times of kernels, host ops and transfers: what they add up to, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npusim
from npu_compiler.partitioning.plan import TransferOp
from npu_compiler.support.errors import ConfigError
from npu_runtime import DAGExecutor


class Mixed(torch.nn.Module):
    """A matrix product, an op that the NPU lacks, a product, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(torch.special.bessel_j1(self.first(x).clamp(0, 3))) + self.calls


@pytest.fixture(scope="module")
def model() -> npusim.Model:
    return npusim.build(Mixed(), (torch.randn(4, 32),))


@pytest.fixture(scope="module")
def executor(model: npusim.Model) -> DAGExecutor:
    return model.executor


X = np.ones((4, 32), np.float32)


def test_every_step_of_a_mixed_model_has_its_time(executor: DAGExecutor) -> None:
    profile = executor.profile([X], runs=4, warmup=1)
    assert [s.step for s in profile.steps] == executor.plan.steps and profile.runs == 4
    assert any(isinstance(s.step, TransferOp) for s in profile.steps)
    host = [s for s in profile.steps if not isinstance(s.step, TransferOp) and s.step.device == "host"]
    assert host and all(s.marks.shape == (4, len(s.step.nodes) + 1) for s in host if not isinstance(s.step, TransferOp))
    for before, after in zip(profile.steps, profile.steps[1:], strict=False):
        assert (before.end <= after.begin).all()
    for step in profile.steps:
        assert (np.diff(step.marks, axis=1) >= 0).all() and (step.marks[:, 0] == 0).all()
        assert (step.marks[:, -1] <= step.end - step.begin).all()
    assert 0 < profile.seconds < 10 and (profile.whole > 0).all()


def test_profiling_leaves_buffers_alone(model: npusim.Model, executor: DAGExecutor) -> None:
    before = model(X)
    executor.profile([X], runs=3, warmup=2)
    np.testing.assert_allclose(model(X) - before, 1, rtol=1e-5)


def test_numbers_of_runs_are_checked(executor: DAGExecutor) -> None:
    with pytest.raises(ConfigError, match="runs >= 1 and warmup >= 0, not 0 and 3"):
        executor.profile([X], runs=0)
