"""Pin the versions of what any extra installs: ``make lock``; ``make lock ARGS=--upgrade`` takes newer ones.

``uv`` resolves all extras together, for every platform and Python version. The result is written to
``constraints.txt``, which pip reads, and to ``[tool.uv]`` in ``pyproject.toml``, which ``uv sync`` and ``uv run`` read.
Unlike a ``uv.lock``, it names no package index, so it is valid with any mirror. PyTorch is pinned without a local
version, so that a CPU build that an index or a folder offers satisfies the pin.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "# begin: written by tools/lock.py", "# end: written by tools/lock.py"
_HEADER = "# Versions that the tests, the demo and the published figures were made with; written by `make lock`.\n"
_OPTIONS = "--all-extras --universal --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet"


def pins(compiled: str) -> list[str]:
    """The constraints in the output of ``uv pip compile``: a package has a marker only if versions depend on it."""
    found: dict[str, dict[str, str]] = {}
    for line in compiled.splitlines():
        requirement, _, marker = line.partition(" ; ")
        name, _, version = requirement.strip().partition("==")
        if version:
            found.setdefault(name, {})[version.partition("+")[0]] = marker
    lines = []
    for name, versions in sorted(found.items()):
        for version, marker in versions.items():
            lines.append(f"{name}=={version}" + (f" ; {marker}" if len(versions) > 1 else ""))
    return lines


def without_block(project: str) -> str:
    """``pyproject.toml`` without the pins."""
    return re.sub(f"\n{BEGIN}.*?{END}\n", "", project, flags=re.DOTALL)


def block(constraints: list[str]) -> str:
    """The part of ``pyproject.toml`` that holds the pins."""
    lines = "".join(f'    "{c}",\n' for c in constraints)
    return f"\n{BEGIN}\n[tool.uv]\nconstraint-dependencies = [\n{lines}]\n{END}\n"


def main() -> None:
    """Resolve all extras and write the lock files."""
    project, locked = ROOT / "pyproject.toml", ROOT / "constraints.txt"
    text = without_block(project.read_text())
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "pyproject.toml"), Path(folder, "constraints.txt")
        source.write_text(text)
        output.write_text(locked.read_text() if locked.exists() else "")  # uv keeps these versions where it can
        command = ["uv", "pip", "compile", str(source), "-o", str(output), *_OPTIONS.split(), *sys.argv[1:]]
        if status := subprocess.run(command).returncode:
            sys.exit(status)
        constraints = pins(output.read_text())
    locked.write_text(_HEADER + "".join(f"{c}\n" for c in constraints))
    project.write_text(text + block(constraints))
    print(f"{len(constraints)} pins in constraints.txt and pyproject.toml")


if __name__ == "__main__":
    main()
