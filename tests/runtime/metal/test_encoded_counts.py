"""The commands that a run encodes are those that ``npusim describe --counts`` counts in the program."""

from __future__ import annotations

import pytest

from npu_runtime import Executor, load_weights
from npu_runtime.backends.metal import MetalBackend
from npusim.launch_counts import launch_counts

from ...support import metal_api
from .conftest import Model


@pytest.mark.parametrize("indirect", [True, False], ids=["indirect", "list"])
def test_encoded_dispatches_and_barriers(
    device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch, indirect: bool
) -> None:
    monkeypatch.setenv("NPU_METAL_INDIRECT", str(int(indirect)))
    backend = MetalBackend()
    executor = Executor(convnet.program, load_weights(convnet.program, convnet.weights, backend), backend)
    convnet.check(executor.run([convnet.x])[convnet.program.outputs[0].name])
    encoded = [kind for kind, *_ in device.log]
    counts = launch_counts(convnet.program)["main"]
    assert (encoded.count("dispatch"), encoded.count("barrier")) == (counts.launches, counts.barriers)
    assert counts.launches > counts.barriers > 0 and bool(device.indirect) == indirect
