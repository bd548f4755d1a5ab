"""Memory that programs hold: only what they use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_runtime.arrays import ALIGNMENT, aligned_zeros

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes of this process in memory."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not say how much memory is resident")
def test_zeros_take_memory_when_they_are_written() -> None:
    """Also if the C library has freed memory to take them from, which it would have to clear."""
    for size in range(1, 30, 7):
        np.empty(size << 20, np.uint8).fill(1)

    before = resident()
    arrays = [aligned_zeros((1 << 10, 1 << 8), np.dtype(np.float32)) for _ in range(64)]
    assert resident() - before < 8 << 20
    assert all(a.ctypes.data % ALIGNMENT == 0 for a in arrays)
    arrays[3][:] = 1
    assert arrays[3].sum() == 1 << 18 and not any(a.any() for a in (*arrays[:3], *arrays[4:]))
