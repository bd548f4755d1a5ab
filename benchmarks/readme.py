"""What the benchmarks share: the name of the machine, and the generated sections of the README."""

from __future__ import annotations

import os
import platform
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hardware() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} CPUs"
    return platform.processor()


def write_section(name: str, text: str) -> None:
    """Replace what stands between ``<!-- bench:name -->`` and the next ``<!-- /bench -->``."""
    path = ROOT / "README.md"
    start, end = f"<!-- bench:{name} -->\n", "<!-- /bench -->"
    head, rest = path.read_text().split(start)
    path.write_text(head + start + text + "\n" + end + rest.split(end, 1)[1])
