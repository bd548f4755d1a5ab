"""Apple's constants, from the vendored table; a string constant's value is its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).parents[2] / "data" / "metal_api.json"

CONSTANTS: dict[str, Any] = {
    name: name if value is None else value
    for name, value in json.loads(_TABLE.read_text(encoding="utf-8"))["constants"].items()
}
SHARED = CONSTANTS["MTLResourceStorageModeShared"]
CONCURRENT = CONSTANTS["MTLDispatchTypeConcurrent"]
MAX_BUFFERS = 31
