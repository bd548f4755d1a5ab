"""Apple's GPUs by family. Source of families and threadgroup memory: Apple's Metal Feature Set Tables.

Chips of a family have 7 to 80 GPU cores; a row has those of the "Pro" chip. Apple does not publish the registers and
the bandwidths of a GPU core.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ..simt.lang.device import GPU, GPU_CONFIG

COHERENT_MACOS = 15  # the first macOS with Metal 3.2
CONFIG = replace(GPU_CONFIG, name="metal", dtypes=GPU_CONFIG.dtypes - {"float64"}, asynchronous=True)


@dataclass(frozen=True)
class AppleGPU(GPU):
    """A row of the table. ``coherent``: whether its macOS has Metal 3.2, where workgroups read what others wrote."""

    target: ClassVar[str] = "metal"
    coherent: bool = True


DEVICES = (
    AppleGPU("apple7", "M1", compute_units=16, shared_bytes=32 << 10),
    AppleGPU("apple8", "M2", compute_units=19, shared_bytes=32 << 10),
    AppleGPU("apple9", "M3, M4", compute_units=18, shared_bytes=32 << 10),
)


def device_for(chip: str) -> AppleGPU:
    """Return the row of a chip, whose name is such as 'Apple M3 Max'; the first row, whose programs run on all later
    families, if the chip is unknown."""
    words = chip.split()
    return next((d for d in DEVICES if set(d.chips.split(", ")) & set(words)), DEVICES[0])


@cache
def device_at_hand() -> AppleGPU:
    """Return the family of this Mac's GPU, or the oldest on other machines."""
    if sys.platform != "darwin":
        return DEVICES[0]
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    device = device_for(subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout)
    return replace(device, coherent=int(platform.mac_ver()[0].split(".")[0]) >= COHERENT_MACOS)
