"""Shared by the benchmarks: files of results, the machine's name, real-time priority, the generated sections of the
README and the pages about performance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from korean import korean

ROOT = Path(__file__).resolve().parent.parent


def hardware() -> str:
    """Return the name of the CPU; on a Mac, of the chip."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} CPUs"
    return platform.processor()


def results_path(kind: str, machine: str) -> Path:
    """Return the file for results of a ``kind`` of benchmark on a machine."""
    words = "".join(c if c.isalnum() else " " for c in machine.lower()).split()
    return ROOT / "benchmarks" / "results" / f"{'_'.join([kind, *words])}.json"


def without_files(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the arguments that say what is measured: all but ``options``, which name files, and their values."""
    kept, given = list[str](), iter(arguments)
    for argument in given:
        if argument in options:
            next(given, None)
        elif argument.partition("=")[0] not in options:
            kept.append(argument)
    return kept


def real_time(on: bool) -> None:
    """Turn real-time priority on or off for all threads of this process. Does nothing unless the user may do that."""
    if os.geteuid():
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), os.SCHED_RR if on else os.SCHED_OTHER, os.sched_param(4 if on else 0))
        except ProcessLookupError:
            continue  # a thread that has just ended
        except PermissionError:
            return  # root of a container


def publish(results: dict[str, Any], path: Path | None) -> None:
    """Write ``results`` to ``path``. None, for a shortened run, writes nothing."""
    if path is None:
        print("a shortened run: nothing was written")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")


def write_section(name: str, text: str, readme: bool = True, short: str | None = None) -> None:
    """Replace what is between ``<!-- bench:name -->`` and ``<!-- /bench -->`` on the pages about performance, of which
    the Korean one gets ``text`` in Korean, and with ``readme`` in the README, which gets ``short`` if there is one."""
    start, end = f"<!-- bench:{name} -->\n", "<!-- /bench -->"
    pages = {"docs/performance.md": text, "docs/performance.ko.md": korean(text)}
    if readme:
        pages["README.md"] = text if short is None else short
    for page, section in pages.items():
        path = ROOT / page
        head, rest = path.read_text(encoding="utf-8").split(start)
        path.write_text(head + start + section + "\n" + end + rest.split(end, 1)[1], encoding="utf-8")
