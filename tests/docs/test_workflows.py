"""The workflows run commands that the project has and documents, on a Mac and on Linux."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .snippets import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML, which mkdocs needs, is not installed")
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
COMMANDS = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in JOBS.items()}


def test_linux_and_a_mac_with_apple_silicon_run_the_tests() -> None:
    systems = {job["runs-on"].split("-")[0]: name for name, job in JOBS.items()}
    assert set(systems) == {"ubuntu", "macos"}
    assert all("make test" in commands for commands in COMMANDS.values())
    assert any(c.startswith("make test-metal") for c in COMMANDS[systems["macos"]])


@pytest.mark.parametrize("command", sorted({c for commands in COMMANDS.values() for c in commands}))
def test_a_command_exists_and_is_documented(command: str) -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md")]
    documented = command.removeprefix(".venv/bin/").split(" ARGS=")[0]
    assert any(documented in page for page in pages)
    if command.startswith("make "):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(documented.split()[1])}:", makefile, re.MULTILINE)
