"""What the GPU uses: memory, compiled kernels, fences, and samples of its clock."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...metal_emulator import Library
from .faults import require
from .names import CONSTANTS

if TYPE_CHECKING:
    from .descriptors import NSURL, MTLComputePipelineDescriptor
    from .device import Device

live = threading.RLock()  # of the sets of living objects


class _Contents:
    """What pyobjc returns for a pointer of unknown length. It does not keep the memory alive."""

    def __init__(self, address: int, length: int):
        self._address, self._length = address, length

    def as_buffer(self, count: int) -> memoryview:
        require(count <= self._length, f"{count} bytes of a buffer of {self._length}")
        return memoryview((ctypes.c_uint8 * count).from_address(self._address))


class Buffer:
    live: ClassVar[weakref.WeakSet[Buffer]] = weakref.WeakSet()

    def __init__(self, memory: np.ndarray, owner: np.ndarray | None = None):
        """``owner``: whose memory it is, if not Metal's. Metal does not keep that alive."""
        self._memory, self._owner = memory, None if owner is None else weakref.ref(owner)
        with live:
            Buffer.live.add(self)

    @property
    def memory(self) -> np.ndarray:
        require(self._owner is None or self._owner() is not None, "the memory of a buffer was freed")
        return self._memory

    def contents(self) -> _Contents:
        return _Contents(self.memory.ctypes.data, self.memory.nbytes)

    def length(self) -> int:
        return self._memory.nbytes


class ResidencySet:
    """``resident``: what the last commit left in the set."""

    def __init__(self) -> None:
        self._allocations: set[Buffer] = set()
        self.resident: frozenset[Buffer] = frozenset()

    def addAllocation_(self, buffer: Buffer) -> None:
        self._allocations.add(buffer)

    def removeAllocation_(self, buffer: Buffer) -> None:
        self._allocations.remove(buffer)

    def commit(self) -> None:
        self.resident = frozenset(self._allocations)

    def requestResidency(self) -> None:
        require(self.resident == self._allocations, "the residency set is not committed")


class Fence:
    """Encoders wait for it and update it."""


class CompiledLibrary:
    def __init__(self, library: Library):
        self._library = library

    def newFunctionWithName_(self, name: str) -> Any:
        return self._library.functions.get(name)


class Pipeline:
    def __init__(self, device: Device, descriptor: MTLComputePipelineDescriptor):
        self.device, self.function, self.label = device, descriptor.function, descriptor.label
        self._indirect = descriptor.indirect

    def maxTotalThreadsPerThreadgroup(self) -> int:
        limits = [self.device.max_threads, self.function.signature.max_threads]
        return min(limits + [self.device.indirect_threads] * self._indirect)

    def staticThreadgroupMemoryLength(self) -> int:
        return self.device.static_shared

    def supportIndirectCommandBuffers(self) -> bool:
        return self._indirect


class Archive:
    def __init__(self, names: set[str]):
        self.names = names

    def addComputePipelineFunctionsWithDescriptor_error_(
        self, descriptor: MTLComputePipelineDescriptor, error: None
    ) -> tuple[bool, Any]:
        self.names.add(descriptor.key)
        return True, None

    def serializeToURL_error_(self, url: NSURL, error: None) -> tuple[bool, Any]:
        url.path.write_text("archive " + " ".join(sorted(self.names)))
        return True, None


class CounterSet:
    def __init__(self, name: str):
        self._name = name

    def name(self) -> str:
        return self._name


class CounterSampleBuffer:
    """``lost``: samples that the GPU does not take."""

    def __init__(self, device: Device, count: int):
        self._device, self.values = device, np.zeros(count, np.uint64)

    def sample(self, index: int) -> None:
        require(0 <= index < len(self.values), f"sample {index} of {len(self.values)}")
        error = CONSTANTS["MTLCounterErrorValue"]
        self.values[index] = error if index in self._device.lost_samples else self._device.ticks()

    def resolveCounterRange_(self, where: tuple[int, int]) -> bytes:
        begin, count = where
        require(begin >= 0 and 0 < count <= len(self.values) - begin, f"samples {where} of {len(self.values)}")
        return self.values[begin : begin + count].tobytes()
