"""Calls with prepared checks: whatever the size, kind and number of the arrays, they do what a bound run does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import npu_runtime
import npusim
from npu_compiler.support.errors import BackendError, InputError
from npu_runtime import CPUBackend, Executor
from npu_runtime.host_run import STAGED_BYTES, HostRun

from ..support import handmade

LARGE = STAGED_BYTES // 4 + 1  # float32 elements that are passed by address


class Mixed(torch.nn.Module):
    """Small and large inputs and outputs, an output that is an input, and one that is given twice."""

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = small.sum() + large.sum()
        grown = large * 2
        return total, grown, small.reshape(2, 2), grown, large + 1


@pytest.fixture(scope="module")
def mixed() -> tuple[npusim.Model, Executor]:
    model = npusim.build(Mixed().eval(), (torch.zeros(4), torch.zeros(LARGE)), threads=2, fixed_shapes=True)
    return model, next(iter(model.executor.executors.values()))


def _arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-8, 8, 4).astype(np.float32), rng.integers(-8, 8, LARGE).astype(np.float32)]


def _expected(small: np.ndarray, large: np.ndarray) -> list[np.ndarray]:
    return [small.sum() + large.sum(), large * 2, small.reshape(2, 2), large * 2, large + 1]


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "as it is": lambda a: a,
    "strided": lambda a: np.repeat(a, 2)[::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "not aligned": lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.float32),
    "read-only": lambda a: np.frombuffer(a.tobytes(), np.float32),
    "other byte order": lambda a: a.astype(">f4"),
    "narrower": lambda a: a.astype(np.float16),
    "bfloat16": lambda a: a.astype(ml_dtypes.bfloat16),
    "subclass": lambda a: a.view(np.recarray),
    "torch": torch.from_numpy,
    "torch, strided": lambda a: torch.from_numpy(np.repeat(a, 2))[::2],
    "torch, bfloat16": lambda a: torch.from_numpy(a).to(torch.bfloat16),
    "torch, lazily negated": lambda a: torch._neg_view(torch.from_numpy(-a)),
    "torch, with gradient": lambda a: torch.from_numpy(a).requires_grad_(),
    "device buffer": lambda a: CPUBackend(1).allocate_buffer(a),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_and_large_arrays_of_any_kind(mixed: tuple[npusim.Model, Executor], layout: str) -> None:
    model, executor = mixed
    assert isinstance(executor._host_run, HostRun)
    arrays = _arrays(3)
    given = [LAYOUTS[layout](a) for a in arrays]
    for outputs in (
        [*executor.run(given).values()],
        executor.run_ordered(given),
        [*model.executor.execute(given).values()],
    ):
        for found, wanted in zip(outputs, _expected(*arrays), strict=True):
            np.testing.assert_array_equal(found, wanted)
    called = model(*given)
    for found, wanted in zip(called, _expected(*arrays), strict=True):
        assert isinstance(found, torch.Tensor if layout.startswith("torch") else np.ndarray)
        np.testing.assert_array_equal(np.asarray(found), wanted)
    for kept, now in zip(_arrays(3), arrays, strict=True):
        np.testing.assert_array_equal(kept, now)


def test_results_are_the_callers_own(mixed: tuple[npusim.Model, Executor]) -> None:
    model, _ = mixed
    first, again = model(*_arrays(1)), model(*_arrays(2))
    for found, wanted in zip(first, _expected(*_arrays(1)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for array in (*first, *again):
        array[...] = 7  # neither the model's memory nor an input
    for found, wanted in zip(model(*_arrays(1)), _expected(*_arrays(1)), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, n: (s[:3], n), r"input 'small': shape \[3\], expected \[4\]"),
        (lambda s, n: (s, n.reshape(1, -1)), r"input 'large': shape \[1, \d+\], expected \[\d+\]"),
        (lambda s, n: (s.astype(np.float64), n), "input 'small': dtype float64, expected float32; convert it explicit"),
        (lambda s, n: (s, n.astype(np.int64)), "input 'large': dtype int64, expected float32; convert it explicitly"),
        (lambda s, n: (torch.zeros(5), n), r"input 'small': shape \[5\], expected \[4\]"),
        (lambda s, n: (s, torch.zeros(LARGE, device="meta")), "input 'large': a torch tensor without readable values"),
        (lambda s, n: (CPUBackend(1).allocate_buffer(s.astype(np.int32)), n), r"input 'small': got int32\[4\], exp"),
    ],
)
def test_refused_inputs(mixed: tuple[npusim.Model, Executor], change: Callable[..., Any], message: str) -> None:
    model, executor = mixed
    given = change(*_arrays(0))
    for call in (executor.run, executor.run_ordered, executor.run_device, lambda g: model(*g), model.executor.execute):
        with pytest.raises(InputError, match=message):
            call(given)
    for found, wanted in zip(model(*_arrays(4)), _expected(*_arrays(4)), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_lists_and_too_many_inputs_are_refused(mixed: tuple[npusim.Model, Executor]) -> None:
    _, executor = mixed
    small, large = _arrays(0)
    with pytest.raises(InputError, match="input 'small': list is neither a numpy array nor a torch tensor"):
        executor.run([small.tolist(), large])
    with pytest.raises(InputError, match="got 3 inputs, expected 2"):
        executor.run([small, large, large])
    with pytest.raises(InputError, match="missing large and unknown big"):
        executor.run({"small": small, "big": large})


def test_eight_threads_on_one_model(mixed: tuple[npusim.Model, Executor]) -> None:
    model, executor = mixed
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in range(60):
                arrays = _arrays(100 * seed + n)
                given = [torch.from_numpy(a) for a in arrays] if n % 3 == 0 else arrays
                outputs = model(*given) if n % 2 else executor.run_ordered(given)
                for found, wanted in zip(outputs, _expected(*arrays), strict=True):
                    np.testing.assert_array_equal(np.asarray(found), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Counter(torch.nn.Module):
    """Counts its calls, once in a small and once in a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("history", torch.zeros(LARGE))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(x)
        self.history.add_(x.sum())
        return self.calls * 1, self.history * 1


def test_every_call_of_a_stateful_model_counts_once() -> None:
    model = npusim.build(Counter().eval(), (torch.zeros(3),), threads=1)
    x, seen = np.array([1, 0, 2], np.float32), []

    def work() -> None:
        for _ in range(50):
            calls, history = model(x)
            seen.append((calls[0], calls[2], history[0], history[-1]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(n, 2 * n, 3 * n, 3 * n) for n in range(1, 401)]


class Divided(torch.nn.Module):
    """A counter that an op between two native partitions reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(x)
        self.calls.mul_(torch.special.bessel_j1(self.calls * 0) + 1)
        return self.calls * 1


def test_runs_of_a_divided_stateful_model_take_turns() -> None:
    model = npusim.build(Divided().eval(), (torch.zeros(4),), threads=1)
    assert len(model.plan.partitions) > 1 and model.plan.feeds
    seen: list[float] = []

    def work() -> None:
        for _ in range(50):
            seen.append(float(model(np.ones(4, np.float32))[0]))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 301))


def test_state_that_is_an_output_has_the_value_of_its_run() -> None:
    """The entry point `step`: outputs from a state, an input and the arena; one state becomes an output."""
    program = handmade.program()
    executor, bound = (Executor(program, handmade.weights(), CPUBackend(2), "step") for _ in range(2))
    assert isinstance(executor._host_run, HostRun) and bound.entry is executor.entry
    memory = [np.empty(o.shape, np.float32) for o in bound.outputs]
    for n in range(4):
        x = np.arange(4, dtype=np.float32) + n
        bound.run_into([x], memory)
        for found, wanted in zip(executor.run_ordered([x]), memory, strict=True):
            np.testing.assert_array_equal(found, wanted)
        for key, value in bound.state.snapshot().items():
            np.testing.assert_array_equal(executor.state.snapshot()[key], value)


def test_an_index_out_of_range_leaves_the_model_usable() -> None:
    model = npu_runtime.Model(handmade.program(), handmade.weights(), CPUBackend(1))
    given = handmade.inputs()
    for _ in range(2):
        with pytest.raises(InputError, match="an index is out of range in kernel 'gather', which computes"):
            model(given["x"], given["idx"] + 100)
        np.testing.assert_allclose(model(**given)[0], handmade.expected(given)["y"], rtol=2e-7, atol=1e-6)
    y, _ = model(torch.from_numpy(given["x"]), idx=given["idx"])
    assert isinstance(y, torch.Tensor)


def test_a_closed_model_does_not_run() -> None:
    with npu_runtime.Model(handmade.program(), handmade.weights(), CPUBackend(1)) as model:
        model(*handmade.inputs().values())
    with pytest.raises(BackendError, match="was closed"):
        model(*handmade.inputs().values())


def test_a_call_takes_few_steps() -> None:
    """A call on a tiny model costs what Python does around the native function: counted, because time depends on what
    else the machine does."""
    layer = torch.nn.Linear(8, 8).eval()
    model = npusim.build(layer, (torch.zeros(1, 8),), threads=1)
    runtime = npu_runtime.Model(model.programs[0], layer.state_dict(), CPUBackend(1))
    x = np.zeros((1, 8), np.float32)
    out = np.empty((1, 8), np.float32)
    bound = runtime.executor().bind([x], [out])

    def steps(call: Callable[[], Any]) -> int:
        """Functions called, in Python and in C: the fewest of some calls, because garbage may be collected in one."""
        counts = []
        for _ in range(4):
            seen: list[str] = []
            sys.setprofile(lambda frame, event, argument, seen=seen: seen.append(event))
            try:
                call()
            finally:
                sys.setprofile(None)
            counts.append(sum(event in ("call", "c_call") for event in seen))
        return min(counts)

    assert steps(bound) <= 10
    assert steps(lambda: runtime.executor().run([x])) <= 30
    assert steps(lambda: runtime(x)) <= 30
    assert steps(lambda: model(x)) <= 30
    assert steps(lambda: model(torch.from_numpy(x))) <= 50
