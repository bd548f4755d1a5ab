"""What a GPU has to do in both encodings. On Linux the stand-in does it; on a Mac the GPU itself does it, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend, missing_parts
from npu_runtime.backends.metal.entry import MetalEntry

from ...support import metal_api
from .conftest import FLOAT, Model

MAC = pytest.param("this Mac", marks=pytest.mark.skipif(bool(missing_parts()), reason="needs a Mac with an Apple GPU"))


@pytest.fixture(params=["stand-in", MAC])
def gpu(request: pytest.FixtureRequest) -> Iterator[MetalBackend]:
    if request.param == "stand-in":
        with metal_api.installed(metal_api.Device()):
            yield MetalBackend()
    else:
        yield MetalBackend()


@pytest.fixture(params=["indirect", "list"])
def executor(
    request: pytest.FixtureRequest, gpu: MetalBackend, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> Executor:
    monkeypatch.setenv("NPU_METAL_INDIRECT", str(int(request.param == "indirect")))
    executor = Executor(convnet.program, convnet.weights, gpu)
    assert isinstance(executor._loaded, MetalEntry)
    assert (executor._loaded.obstacle is None) == (request.param == "indirect")
    return executor


def test_runs_copies_and_bindings(executor: Executor, convnet: Model) -> None:
    """Runs without a wait between them, the second of which reads what a copy on the GPU brings after the first."""
    backend = executor.backend
    zeros = np.zeros_like(convnet.x)
    (of_zeros,) = executor.run([zeros]).values()
    x, spare = backend.allocate_buffer(convnet.x), backend.allocate_buffer(zeros)
    outputs = [backend.allocate_zeros((2, 5), FLOAT) for _ in range(2)]
    for _ in range(3):
        backend.copy(x, convnet.x)
        runs = [executor.bind([x], [y]) for y in outputs]
        runs[0]()
        backend.copy(x, spare)
        runs[1]()
        runs[1].finish()
        convnet.check(outputs[0].to_numpy())
        np.testing.assert_array_equal(outputs[1].to_numpy(), of_zeros)


def test_many_runs_give_the_same_bits(executor: Executor, convnet: Model) -> None:
    first, *others = (executor.run([convnet.x])[executor.outputs[0].name] for _ in range(20))
    convnet.check(first)
    assert all(np.array_equal(first, other) for other in others)


def test_times(executor: Executor, convnet: Model) -> None:
    backend = executor.backend
    assert isinstance(backend, MetalBackend)
    profile = executor.profile([convnet.x], runs=3, warmup=1)
    assert backend.timestamps is not None
    assert (profile.spans >= 0).all() and (profile.times[:, -1] > 0).all() and (profile.times[:, -1] < 10).all()
