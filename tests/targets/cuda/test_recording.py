"""Recording a graph ends the capture whatever happens: a stream in capture mode would refuse everything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu_compiler.support.errors import BackendError
from npu_runtime.backends.cuda.driver import Driver


class FakeLibrary:
    """Driver functions that only note their names; the one called ``broken`` fails."""

    def __init__(self, broken: str = ""):
        self.broken, self.called = broken, list[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def called(*arguments: object) -> int:
            self.called.append(name)
            return 1 if name == self.broken else 0

        return called


def driver_of(library: FakeLibrary) -> Driver:
    driver = object.__new__(Driver)
    driver._library = library  # type: ignore[assignment]
    return driver


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError, BackendError])
def test_an_interrupted_recording_ends_the_capture(error: type[BaseException]) -> None:
    def launch_all() -> None:
        raise error("stop")

    library = FakeLibrary()
    with pytest.raises(error, match="stop"):
        driver_of(library).record(0, "a graph", launch_all)
    assert library.called == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]


def test_a_graph_that_cannot_be_uploaded_is_destroyed() -> None:
    library = FakeLibrary("cuGraphUpload")
    with pytest.raises(BackendError, match="uploading a graph failed"):
        driver_of(library).record(0, "a graph", lambda: None)
    assert library.called[-1] == "cuGraphExecDestroy" and "cuGraphDestroy" in library.called
