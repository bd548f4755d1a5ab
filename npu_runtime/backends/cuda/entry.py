"""Entry points on a GPU: a run launches one graph, which is recorded for each set of inputs and outputs."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import EntryPoint
from npu_compiler.support import dtypes, env
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.simt.lang import program as simt

from ...gpu_entry import STEPWISE, GPUEntry
from ..base import DeviceBuffer, Launch, status_of
from .buffers import Borrowed, CUDABuffer
from .code import Code
from .driver import driver

if TYPE_CHECKING:
    from .backend import CUDABackend

_GRAPHS = 16  # the most graphs that an entry point keeps, one for each set of addresses


class CUDAEntry(GPUEntry["CUDABackend"]):
    """An entry point with its arena, and a graph for each set of inputs and outputs that it was bound to."""

    def __init__(self, backend: CUDABackend, code: Code, entry: EntryPoint, fixed: Mapping[int, DeviceBuffer]):
        super().__init__(backend, code.program, code.entries, entry, fixed)
        self._code = code
        try:
            self._arena = backend.allocate_zeros((max(entry.arena_bytes, 1),), np.dtype(np.uint8))
        except BackendError as error:
            raise BackendError(f"{self._arena_name}: {error}") from None
        self._bad = backend.host_array((max(len(self._launches), 1), 2), np.dtype(np.int32))
        self._maps: dict[int, tuple[tuple[int, ...], list[Any]]] = {}
        self._graphs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._timer: _Timer | None = None  # of the last profile

    def bind(self, buffers: Mapping[int, DeviceBuffer]) -> Launch:
        for id, buffer in buffers.items():
            if not self._backend.aligned(buffer):
                raise BackendError(f"{self._specs[id].name!r}: its memory is not at a multiple of 16 bytes")
        key = tuple(buffers[id].native_handle for id in sorted(buffers))
        address = {id: b.native_handle for id, b in {**self._fixed, **buffers}.items()}
        address[simt.ARENA] = self._arena.native_handle
        held = self._graph(key, address), tuple(buffers.values())
        graph, backend, what, run = held[0].handle, self._backend, self._what, driver().run_graph
        stream, stepwise = backend.stream.ptr, env.debug() >= STEPWISE

        def launch(times: np.ndarray | None, _keep_alive: Any = held) -> int:
            backend.enter()
            backend.running = what
            if times is not None:
                self._timed(key, address, times)
            elif stepwise:
                self._one_by_one(address)
            else:
                run(graph, stream, what)
            return 0

        return launch

    def _graph(self, key: tuple[int, ...], address: Mapping[int, int]) -> _Graph:
        found = self._graphs.get(key)
        if found is None:
            self._backend.enter()

            def launch_all() -> None:
                for number in range(len(self._launches)):
                    self._launch(number, address, overlap=True)

            what = f"the graph of {self._entry.name!r} of program {self._code.program.name!r}"
            found = self._graphs[key] = _Graph(driver().record(self._backend.stream.ptr, what, launch_all))
            while len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return found

    def _launch(self, number: int, address: Mapping[int, int], overlap: bool) -> None:
        x = self._launches[number]
        if not x.workgroups:
            return
        values = [address[id] + at for id, at in x.arguments]
        if x.checks:
            values.append(self._bad.ctypes.data + 8 * number)  # pinned host memory has the same address on the GPU
        function, stream = self._code.functions[x.function], self._backend.stream.ptr
        name = self._name(number)
        maps = self._tile_maps(number, address) if x.maps else ()
        driver().launch(name, function, x.workgroups, x.threads, x.shared, stream, values, overlap, maps)

    def _tile_maps(self, number: int, address: Mapping[int, int]) -> list[Any]:
        """Return the tensor maps of a launch. They are kept for the next launch at the same addresses, because encoding
        them takes longer than a small kernel."""
        maps = self._launches[number].maps
        places = tuple(address[id] + at for id, at, _ in maps)
        kept = self._maps.get(number)
        if kept is None or kept[0] != places:
            made = [driver().tile_map(self._name(number), p, m[2]) for p, m in zip(places, maps, strict=True)]
            kept = self._maps[number] = (places, made)
        return kept[1]

    def _name(self, number: int) -> str:
        """Return a kernel's name in the program's description, and that of its function."""
        call = self._entry.calls[number]
        return f"{call.name} ({self._launches[number].function}) of program {self._code.program.name!r}"

    def _one_by_one(self, address: Mapping[int, int]) -> None:
        for number in range(len(self._launches)):
            self._launch(number, address, overlap=False)
            driver().synchronize(self._backend.stream.ptr, f"kernel {self._name(number)}")

    def _timed(self, key: tuple[int, ...], address: Mapping[int, int], times: np.ndarray) -> None:
        """Run the kernels one by one, and store the time after each in seconds; times[0] is 0."""
        cuda, stream = self._backend.cupy.cuda, self._backend.stream.ptr
        if self._timer is None or self._timer.key != key:
            self._timer = self._record_timed(key, address)
        driver().run_graph(self._timer.graph.handle, stream, self._what)
        self._backend.synchronize()
        first, *_ = events = self._timer.events
        times[:] = [cuda.get_elapsed_time(first, event) * 1e-3 for event in events]

    def _record_timed(self, key: tuple[int, ...], address: Mapping[int, int]) -> _Timer:
        """Record a graph of the kernels with an event after each, in which kernels do not overlap. If small kernels
        were launched one by one, the events would measure the launches."""
        events = [self._backend.cupy.cuda.Event() for _ in range(len(self._launches) + 1)]
        stream = self._backend.stream.ptr

        def launch_all() -> None:
            driver().record_event(events[0].ptr, stream)
            for number in range(len(self._launches)):
                self._launch(number, address, overlap=False)
                driver().record_event(events[number + 1].ptr, stream)

        what = f"the timed graph of {self._entry.name!r} of program {self._code.program.name!r}"
        return _Timer(key, _Graph(driver().record(stream, what, launch_all)), events)

    def failed(self) -> int:
        return status_of(self._bad)

    def arena_buffer(self, id: int) -> CUDABuffer:
        spec = self._specs[id]
        dtype = dtypes.numpy_dtype(spec.dtype)
        place = Borrowed(self._arena, self._arena.native_handle + spec.offset)
        return CUDABuffer(self._backend, place, spec.shape, spec.shape, dtype)


@dataclass
class _Timer:
    """A graph that times its kernels, and the addresses it is for."""

    key: tuple[int, ...]
    graph: _Graph
    events: list[Any]


class _Graph:
    def __init__(self, handle: int):
        self.handle = handle
        self._destroy = weakref.finalize(self, driver().destroy_graph, handle)
        self._destroy.atexit = False
