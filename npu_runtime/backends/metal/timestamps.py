"""GPU times of kernels, from counter sample buffers.

Apple GPUs sample counters where an encoder begins and ends, not between dispatches: each timed kernel has an encoder of
its own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .device import frameworks

_INTERVAL = 0.05  # seconds: the least time over which the rate of the GPU's clock is measured
_READINGS = 5
MAX_KERNELS = 2048  # in one sample buffer: two samples of 8 bytes each, in the 32 KB that Metal permits


class Timestamps:
    """A sample buffer for ``MAX_KERNELS`` encoders, and the rate of the GPU's clock."""

    def __init__(self, device: Any, samples: Any):
        self._device, self._samples = device, samples
        self._begin = self._now()

    @classmethod
    def create(cls, device: Any) -> Timestamps | None:
        """Return one for ``device``; None if it does not sample its clock between encoders."""
        metal = frameworks()
        if not device.supportsCounterSampling_(metal.MTLCounterSamplingPointAtStageBoundary):
            return None
        clocks = [s for s in device.counterSets() or () if s.name() == metal.MTLCommonCounterSetTimestamp]
        if not clocks:
            return None
        descriptor = metal.MTLCounterSampleBufferDescriptor.alloc().init()
        descriptor.setCounterSet_(clocks[0])
        descriptor.setSampleCount_(2 * MAX_KERNELS)
        descriptor.setStorageMode_(metal.MTLStorageModeShared)
        samples, _ = device.newCounterSampleBufferWithDescriptor_error_(descriptor, None)
        return None if samples is None else cls(device, samples)

    def descriptor(self, number: int) -> Any:
        """Return the description of an encoder whose begin and end are samples 2 * number and the next one."""
        metal = frameworks()
        descriptor = metal.MTLComputePassDescriptor.computePassDescriptor()
        descriptor.setDispatchType_(metal.MTLDispatchTypeConcurrent)
        attachment = descriptor.sampleBufferAttachments().objectAtIndexedSubscript_(0)
        attachment.setSampleBuffer_(self._samples)
        attachment.setStartOfEncoderSampleIndex_(2 * number)
        attachment.setEndOfEncoderSampleIndex_(2 * number + 1)
        return descriptor

    def seconds(self, count: int) -> np.ndarray | None:
        """Return the seconds that the first ``count`` encoders took, float64 [count]; None if the GPU has lost a
        sample. Their command buffers must have finished."""
        data = self._samples.resolveCounterRange_((0, 2 * count))
        if data is None:
            return None
        ticks = np.frombuffer(bytes(data), np.uint64).reshape(count, 2)
        if (ticks == np.uint64(frameworks().MTLCounterErrorValue)).any() or (ticks[:, 1] < ticks[:, 0]).any():
            return None
        return (ticks[:, 1] - ticks[:, 0]) * self._seconds_per_tick()

    def _now(self) -> tuple[float, int]:
        """Return the same moment on the clocks of the host, in seconds, and of the GPU: the reading of several that
        took the least time, because the host may be interrupted between the two."""
        readings = []
        for _ in range(_READINGS):
            before = time.perf_counter()
            _, gpu = self._device.sampleTimestamps_gpuTimestamp_(None, None)
            after = time.perf_counter()
            readings.append((after - before, (before + after) / 2, gpu))
        return min(readings)[1:]

    def _seconds_per_tick(self) -> float:
        """The rate is measured since this object was made: Metal does not tell the unit of the GPU's clock."""
        begin, first = self._begin
        time.sleep(max(0.0, begin + _INTERVAL - time.perf_counter()))
        end, last = self._now()
        return (end - begin) / max(last - first, 1)
