"""The commands that a run encodes are those that ``npusim describe --counts`` counts in the program."""

from __future__ import annotations

from collections import Counter

import pytest

from npu_runtime import Executor, load_weights
from npu_runtime.backends.metal import MetalBackend
from npusim.launch_counts import launch_counts

from ...support.metal_api import ComputeEncoder
from .conftest import Model

COUNTED = ("dispatchThreadgroups_threadsPerThreadgroup_", "memoryBarrierWithScope_")


def test_encoded_dispatches_and_barriers(
    backend: MetalBackend, convnet: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: Counter[str] = Counter()
    for name in COUNTED:
        real = getattr(ComputeEncoder, name)

        def counting(self: ComputeEncoder, *args: object, name: str = name, real: object = real) -> None:
            encoded[name] += 1
            real(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(ComputeEncoder, name, counting)
    executor = Executor(convnet.program, load_weights(convnet.program, convnet.weights, backend), backend)
    convnet.check(executor.run([convnet.x])[convnet.program.outputs[0].name])
    counts = launch_counts(convnet.program)["main"]
    assert tuple(encoded[name] for name in COUNTED) == (counts.launches, counts.barriers)
    assert counts.launches > counts.barriers > 0
