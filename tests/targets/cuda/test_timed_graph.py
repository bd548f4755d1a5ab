"""How kernels are timed on a GPU, with a driver that only notes its calls. On a GPU: ``test_gpu.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from npu_compiler.targets.simt.lang.program import Launch
from npu_runtime.backends.cpu import CPUBuffer
from npu_runtime.backends.cuda import entry as cuda_entry
from npu_runtime.backends.cuda.entry import CUDAEntry

from ...support import handmade


class NotingDriver:
    """Notes what is called. Events happen a millisecond apart in each run of the graph that records them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.graphs: dict[int, list[int]] = {}
        self.time: dict[int, float] = {}
        self.recording: list[int] = []

    def record(self, stream: int, what: str, launch_all: Callable[[], None]) -> int:
        self.recording = []
        launch_all()
        self.graphs[len(self.graphs) + 1] = self.recording
        self.calls.append(f"record {what}")
        return len(self.graphs)

    def record_event(self, event: int, stream: int) -> None:
        self.recording.append(event)
        self.calls.append("event")

    def launch(self, name: str, *rest: Any) -> None:
        overlap = rest[6]
        self.calls.append(f"launch {name.split()[0]}{' early' if overlap else ''}")

    def run_graph(self, graph: int, stream: int, what: str) -> None:
        self.calls.append("run")
        self.time |= {event: float(at) for at, event in enumerate(self.graphs[graph])}

    def destroy_graph(self, graph: int) -> None:
        self.calls.append("destroy")


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    made = NotingDriver()
    monkeypatch.setattr(cuda_entry, "driver", lambda: made)
    return made


def entry(driver: NotingDriver) -> CUDAEntry:
    numbers = itertools.count(1)
    events = SimpleNamespace(
        Event=lambda: SimpleNamespace(ptr=next(numbers)),
        get_elapsed_time=lambda first, then: driver.time[then.ptr] - driver.time[first.ptr],
    )
    backend: Any = SimpleNamespace(
        cupy=SimpleNamespace(cuda=events), stream=SimpleNamespace(ptr=7), enter=lambda: None, running="",
        synchronize=lambda: driver.calls.append("wait"),
        allocate_zeros=lambda shape, dtype: CPUBuffer(np.zeros(shape, dtype)), host_array=np.zeros,
    )  # fmt: skip
    program = handmade.program()
    main = program.entries["main"]
    launches = [Launch(f"f{n}", 1, 32, 0, (), False) for n in range(len(main.calls))]
    code: Any = SimpleNamespace(
        program=program, entries={main.symbol: launches}, functions={x.function: 1 for x in launches}
    )
    return CUDAEntry(backend, code, main, {})


def test_kernels_are_timed_by_events_in_a_graph_of_their_own(noting: NotingDriver) -> None:
    launch = entry(noting).bind({})
    kernels = ["scale", "bias_relu", "gather"]
    assert noting.calls[:3] == [f"launch {name} early" for name in kernels]
    noting.calls.clear()
    for repeat in range(2):
        times = np.zeros(4)
        launch(times)
        np.testing.assert_allclose(times, [0, 1e-3, 2e-3, 3e-3])
        made = ["event", *(x for name in kernels for x in (f"launch {name}", "event"))]
        recorded = [*made, "record the timed graph of 'main' of program 'handmade'"] if repeat == 0 else []
        assert noting.calls == [*recorded, "run", "wait"]
        noting.calls.clear()
    launch(None)
    assert noting.calls == ["run"]  # the graph without events
