"""``cpu:amx-model``: the CPU of this machine, with AMX computed by the model in ``amx_model.h``.

The generated programs are those for a CPU with AMX, so conformance cases and models test them on any machine.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

from npu_compiler.targets.cpu.devices import DEVICES, CPUDevice, device_at_hand
from npu_compiler.targets.cpu.host import host_cpu

MODEL = Path(__file__).with_name("amx_model.h")
# The macro makes cached objects depend on the text of the model.
FLAGS = ("-include", str(MODEL), f"-DAMX_MODEL_DIGEST={zlib.crc32(MODEL.read_bytes())}")
TILES = frozenset(f for d in DEVICES for f in d.features if f.startswith("amx_"))
HAS_AMX = not host_cpu().missing(TILES)


def amx_model() -> CPUDevice:
    """Return the row of the device ``cpu:amx-model``."""
    here, row = device_at_hand(), next(d for d in DEVICES if d.name == "amx")
    features = tuple(sorted(TILES.union(here.features)))
    return replace(here, name="amx-model", chips="tests", features=features, costs=row.costs, flags=FLAGS)
