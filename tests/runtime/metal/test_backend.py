"""The contract of a backend, the memory that the CPU and the GPU share, and a small network."""

from __future__ import annotations

import copy
import gc
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.support.errors import BackendError, InputError
from npu_runtime import Executor, get_backend, load_weights
from npu_runtime.backends.metal import MetalBackend, MetalBuffer
from npu_runtime.backends.metal.buffers import memory_of

from ...support import metal_api
from .conftest import FLOAT, Model


def test_a_network_runs_as_one_command_buffer(device: metal_api.Device, convnet: Model) -> None:
    backend = get_backend("metal")
    assert isinstance(backend, MetalBackend) and backend.machine == "Emulated Apple GPU"
    executor = Executor(convnet.program, convnet.weights, backend)
    before = backend.commands.queue.committed
    (result,) = executor.run([convnet.x]).values()
    convnet.check(result)
    assert backend.commands.queue.committed == before + 1
    kinds = [kind for kind, *_ in device.log]
    assert kinds.count("encoder") == kinds.count("blit") == 1 and kinds[-1] == "blit"


def test_results_do_not_depend_on_the_order_that_barriers_leave_open(convnet: Model) -> None:
    results = []
    for order, seed in (("reversed", 0), ("random", 1), ("random", 2)):
        with metal_api.installed(metal_api.Device(order=order, seed=seed)):
            (result,) = Executor(convnet.program, convnet.weights, MetalBackend()).run([convnet.x]).values()
        results.append(result)
    convnet.check(results[0])
    assert all(np.array_equal(results[0], r) for r in results)


def test_a_missing_barrier_is_caught(device: metal_api.Device, convnet: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule without barriers gives other numbers, and the stand-in names the two kernels."""
    monkeypatch.setattr("npu_runtime.backends.metal.entry.barriers", lambda accesses: [False for _ in accesses])
    device.order = "reversed"
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    with pytest.raises(metal_api.APIMisuse, match="no barrier between"):
        executor.run([convnet.x])
    monkeypatch.setattr(metal_api.CommandBuffer, "_check_hazards", lambda self, segment: None)
    (result,) = executor.run([convnet.x]).values()
    assert not np.allclose(result, convnet.expected, rtol=1e-2, atol=1e-2)


def test_barriers_stand_only_where_the_schedule_has_a_dependency(device: metal_api.Device, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, MetalBackend())
    executor.run([convnet.x])
    kinds = [kind for kind, *_ in device.log]
    launches, waits = kinds.count("dispatch"), kinds.count("barrier")
    assert launches == len(convnet.program.entries["main"].calls) and 0 < waits < launches - 1


def test_buffers(backend: MetalBackend) -> None:
    padded = backend.allocate_zeros((2, 3), FLOAT, (2, 4))
    assert (padded.shape, padded.alloc_shape, padded.size_bytes) == ((2, 3), (2, 4), 32)
    assert padded.native_handle.length() == 32 and not padded.to_numpy().any()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    backend.copy(padded, values)
    np.testing.assert_array_equal(padded.to_numpy(), values)
    assert not padded.whole[:, 3].any()
    other = copy.deepcopy(backend.allocate_buffer(values))
    assert isinstance(other, MetalBuffer) and not other.shares_memory(padded) and padded.shares_memory(padded)
    backend.copy(other, padded)
    np.testing.assert_array_equal(other.to_numpy(), values)
    view = other.to_numpy(copy=False)
    del other
    gc.collect()
    np.testing.assert_array_equal(view, values)  # the array keeps the memory alive
    with pytest.raises(BackendError, match="cannot hold"):
        backend.allocate_empty((2, 3), FLOAT, (2, 2))
    with pytest.raises(BackendError, match="not in Metal memory"):
        backend.copy(get_backend("cpu").allocate_zeros((2, 3), FLOAT), values)


def test_copies_come_after_the_work_that_was_launched_before(
    device: metal_api.Device, backend: MetalBackend, convnet: Model
) -> None:
    executor = Executor(convnet.program, convnet.weights, backend)
    x, y = backend.allocate_buffer(convnet.x), backend.allocate_zeros(convnet.expected.shape, FLOAT)
    run, read = executor.bind([x], [y]), backend.host_array(y.shape, FLOAT)
    run()
    backend.start_read(read, y)
    backend.start_copy(x, np.zeros_like(convnet.x))  # the host's memory: it waits for the run
    convnet.check(read)
    backend.copy(x, convnet.x)
    zeros = backend.host_array(x.shape, FLOAT)
    run()
    encoders = len(device.log)
    backend.start_copy(x, zeros)
    backend.copy(x, backend.wrap(backend.host_array(x.shape, FLOAT)))
    done = backend.mark()
    assert device.log[encoders:] == [("blit",)]  # for both copies
    assert x.view.any()  # nothing has run yet
    done()
    assert not x.view.any()
    convnet.check(y.to_numpy())


def test_memory_in_the_right_place_is_not_copied(
    backend: MetalBackend, device: metal_api.Device, tmp_path: Path
) -> None:
    array = backend.host_array((4, 5), FLOAT)
    wrapped = backend.wrap(array[1:])
    array[1] = 7
    assert memory_of(array) is wrapped.memory and (wrapped.view[0] == 7).all()
    weights = np.arange(3 * mmap.PAGESIZE // 4, dtype=np.float32)
    (tmp_path / "weights").write_bytes(weights.tobytes())
    with (tmp_path / "weights").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)
    tensor = backend.wrap(mapped[16:2000])
    assert device.no_copies == 1 and not tensor.writeable
    np.testing.assert_array_equal(tensor.to_numpy(), weights[16:2000])
    assert tensor.to_numpy(copy=False).ctypes.data == mapped[16:].ctypes.data
    backend.wrap(weights[16:2000])
    assert device.no_copies == 1


def test_inputs_between_vectors_are_copied(backend: MetalBackend, convnet: Model) -> None:
    """Kernels load vectors of 16 bytes; a part of an earlier result may begin anywhere."""
    executor = Executor(convnet.program, convnet.weights, backend)
    x = backend.host_array((convnet.x.size + 1,), FLOAT)[1:].reshape(convnet.x.shape)
    x[...] = convnet.x
    (result,) = executor.run([x]).values()
    convnet.check(result)
    with pytest.raises(InputError, match="not at a multiple of 16 bytes; bind a copy of it"):
        executor.bind([backend.wrap(x)], [backend.allocate_empty(convnet.expected.shape, FLOAT)])


def test_a_mapped_file_lives_until_its_copy_has_run(backend: MetalBackend, convnet: Model, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(convnet.x.tobytes().ljust(mmap.PAGESIZE * 2, b"\0"))
    with (tmp_path / "x").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)[: convnet.x.size]
    executor = Executor(convnet.program, convnet.weights, backend)
    x, y = backend.allocate_zeros(convnet.x.shape, FLOAT), backend.allocate_zeros((2, 5), FLOAT)
    run = executor.bind([x], [y])
    run()
    backend.copy(x, backend.wrap(mapped.reshape(x.shape)))
    del mapped
    run()
    run.finish()
    convnet.check(y.to_numpy())


def test_arrays_of_the_host_cannot_be_bound(backend: MetalBackend, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, backend)
    with pytest.raises(InputError, match="where the metal device does not compute"):
        executor.bind([convnet.x], [np.zeros_like(convnet.expected)])


def test_a_second_load_finds_its_machine_code(device: metal_api.Device, convnet: Model, tmp_path: Path) -> None:
    Executor(convnet.program, convnet.weights, MetalBackend())
    compiled = device.compiled
    assert compiled > 1
    Executor(convnet.program, convnet.weights, MetalBackend())
    assert device.compiled == compiled
    (archive,) = tmp_path.glob("*.metalarchive")
    archive.write_text("damaged")
    Executor(convnet.program, convnet.weights, MetalBackend())
    assert device.compiled == 2 * compiled and archive.read_text().startswith("archive")


def test_nothing_leaks(backend: MetalBackend, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, backend)
    executor.run([convnet.x])
    gc.collect()
    before = len(metal_api.Buffer.live), len(metal_api.CommandBuffer.live)
    for _ in range(5):
        executor.run([convnet.x])
    assert (len(metal_api.Buffer.live), len(metal_api.CommandBuffer.live)) == before
    del executor
    backend.synchronize()
    gc.collect()
    assert not metal_api.CommandBuffer.live and not backend._codes


def test_memory_stays_resident_as_long_as_an_entry_point_uses_it(backend: MetalBackend, convnet: Model) -> None:
    (residency,) = backend.commands.queue.sets
    store = load_weights(convnet.program, convnet.weights, backend)
    first, second = (Executor(convnet.program, store, backend) for _ in range(2))
    memories = {b.memory.buffer for b in store.values() if isinstance(b, MetalBuffer)}
    assert memories < residency.resident and len(residency.resident) == len(memories) + 4
    first.run([convnet.x])
    del first
    gc.collect()
    assert memories < residency.resident and len(residency.resident) == len(memories) + 2
    del second
    gc.collect()
    assert not residency.resident and not backend.residency._uses


def test_a_macos_without_residency_sets(convnet: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metal_api.Device, "newResidencySetWithDescriptor_error_")
    with metal_api.installed(metal_api.Device()):
        backend = MetalBackend()
        (result,) = Executor(convnet.program, convnet.weights, backend).run([convnet.x]).values()
    convnet.check(result)
    assert not backend.commands.queue.sets


def test_many_launches_without_a_wait(backend: MetalBackend, convnet: Model) -> None:
    executor = Executor(convnet.program, convnet.weights, backend)
    run = executor.bind([backend.allocate_buffer(convnet.x)], [y := backend.allocate_zeros((2, 5), FLOAT)])
    for _ in range(70):
        run()
    run.finish()
    convnet.check(y.to_numpy())


def test_several_threads_run_at_the_same_time(backend: MetalBackend, convnet: Model) -> None:
    """Each on its own entry point, with one command queue."""
    executors = [Executor(convnet.program, convnet.weights, backend) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda n: executors[n % 3].run([convnet.x]), range(12)))
    for result in results:
        convnet.check(*result.values())
