"""Shared by the benchmarks: files of results, the machine's name, real-time priority, the generated sections of the
README and the pages about performance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from korean import korean

ROOT = Path(__file__).resolve().parent.parent
README_MACHINE = "AMD EPYC (Zen 5), 2 CPUs"  # the README has its tables, the pages about performance those of all


def hardware() -> str:
    """Return the name of the CPU; on a Mac, of the chip. Virtual machines call all of AMD's servers "AMD EPYC", so the
    generation is added."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.processor()
    generation = f" ({_zen(found)})" if found.get("vendor_id") == "AuthenticAMD" else ""
    return f"{found['model name']}{generation}, {os.cpu_count()} CPUs"


def _zen(cpuinfo: dict[str, str]) -> str:
    """Return the generation of an AMD CPU. Zen 3 and Zen 4 share a family, but only Zen 4 has AVX-512."""
    family = cpuinfo["cpu family"]
    if family == "25":
        return "Zen 4" if "avx512f" in cpuinfo["flags"].split() else "Zen 3"
    return {"23": "Zen 2 or older", "26": "Zen 5"}.get(family, f"family {family}")


def results_path(kind: str, machine: str) -> Path:
    """Return the file for results of a ``kind`` of benchmark on a machine."""
    words = "".join(c if c.isalnum() else " " for c in machine.lower()).split()
    return ROOT / "benchmarks" / "results" / f"{'_'.join([kind, *words])}.json"


def stored(kind: str) -> list[dict[str, Any]]:
    """Return the results of a kind of benchmark on all machines, in the order of their names."""
    folder = results_path(kind, "").parent
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{kind}_*.json"))]


def merged(
    results: dict[str, Any], part: dict[str, Any], rows: str, key: Callable[[dict[str, Any]], Hashable]
) -> dict[str, Any]:
    """Return ``results`` with the elements of the list ``rows`` in ``part`` in place of those with the same key. Raises
    ``ValueError`` if the two were measured on different kinds of CPUs or with different versions of a package."""
    old, new = results["versions"], part["versions"]
    if results["hardware"] != part["hardware"]:
        raise ValueError(f"the results are those of {results['hardware']}, the part is from {part['hardware']}")
    if differ := [p for p in old if p in new and old[p] != new[p]]:
        raise ValueError(f"the part was measured with other versions of {', '.join(differ)}")
    chosen = {key(r): r for r in (*results[rows], *part[rows])}
    return results | {"date": part["date"], "versions": old | new, rows: list(chosen.values())}


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


def write_tables(name: str, kind: str, table: Callable[[dict[str, Any]], str], readme: bool = True) -> None:
    """Write the ``table`` of a kind of results for each machine into the pages about performance, and with ``readme``
    that of one of them into the README."""
    machines = stored(kind)
    write_section(name, "\n\n".join(map(table, machines)), readme, short=table(of_readme(machines)))


def of_readme(machines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of README_MACHINE, or else the first ones."""
    return next((results for results in machines if results.get("hardware") == README_MACHINE), machines[0])


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
