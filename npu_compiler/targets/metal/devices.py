"""Apple's GPUs by family, as in Apple's Metal Feature Set Tables, which also say how large threadgroup memory is.

A family comes with 7 to 80 GPU cores; a row has those of its middle size, the "Pro" chip. Apple publishes neither the
registers nor the bandwidths inside of a GPU core.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ..simt.lang.device import GPU, GPU_CONFIG

CONFIG = replace(GPU_CONFIG, name="metal", dtypes=GPU_CONFIG.dtypes - {"float64"})


@dataclass(frozen=True)
class AppleGPU(GPU):
    """A row of the table."""

    target: ClassVar[str] = "metal"


DEVICES = (
    AppleGPU("apple7", "M1", units=16, shared_bytes=32 << 10),
    AppleGPU("apple8", "M2", units=19, shared_bytes=32 << 10),
    AppleGPU("apple9", "M3, M4", units=18, shared_bytes=32 << 10),
)


def device_for(chip: str) -> AppleGPU:
    """The row of a chip that calls itself 'Apple M3 Max'. Programs for the first family run on all later ones."""
    words = chip.split()
    return next((d for d in DEVICES if set(d.chips.split(", ")) & set(words)), DEVICES[0])


@cache
def device_at_hand() -> AppleGPU:
    """The family of this Mac's GPU, else the oldest."""
    if sys.platform != "darwin":
        return DEVICES[0]
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return device_for(subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout)
