"""What is installed: versions are pinned for every extra, and the wheel holds all files of the packages."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("npu_compiler", "npu_runtime", "npusim")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def pinned() -> dict[str, list[Requirement]]:
    pins: dict[str, list[Requirement]] = {}
    for line in constraints():
        pins.setdefault(canonicalize_name(Requirement(line).name), []).append(Requirement(line))
    return pins


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """What any extra asks for, but for the project's own extras."""
    extras = project["project"]["optional-dependencies"]
    listed = map(Requirement, [*project["project"]["dependencies"], *(r for rs in extras.values() for r in rs)])
    return [r for r in listed if r.name != project["project"]["name"]]


def test_every_requirement_of_every_extra_has_a_pin_that_satisfies_it(project: dict[str, Any]) -> None:
    pins = pinned()
    for wanted in requirements(project):
        found = pins.get(canonicalize_name(wanted.name), [])
        assert found, f"{wanted}: run `make lock`"
        for pin in found:
            ((operator, version),) = [(s.operator, s.version) for s in pin.specifier]
            assert operator == "==" and wanted.specifier.contains(version), f"{pin} is not {wanted}"


def applies(wanted: Requirement, extras: set[str]) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def test_what_installed_requirements_need_is_pinned_as_well(project: dict[str, Any]) -> None:
    pins, seen = pinned(), set()
    waiting = [r for r in requirements(project) if applies(r, set())]
    while waiting:
        wanted = waiting.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        assert key[0] in pins, f"{wanted.name} has no pin: run `make lock`"
        try:
            needed = map(Requirement, metadata.requires(wanted.name) or [])
        except metadata.PackageNotFoundError:  # of an extra that this environment leaves out
            continue
        waiting += [r for r in needed if applies(r, wanted.extras)]
    assert len(seen) >= 30


def test_uv_and_pip_have_the_same_pins_and_they_name_no_index(project: dict[str, Any]) -> None:
    assert project["tool"]["uv"]["constraint-dependencies"] == constraints()
    assert "://" not in "".join(constraints())
    torch = [line for line in constraints() if line.startswith("torch==")]
    assert len(torch) == 1 and "+" not in torch[0]  # a CPU build satisfies it
    assert "uv.lock" in (ROOT / ".gitignore").read_text().splitlines()


def test_dev_brings_what_make_test_installs(project: dict[str, Any]) -> None:
    (own,) = (r for e in project["project"]["optional-dependencies"]["dev"] if (r := Requirement(e)).name == "npusim")
    (needed,) = re.findall(r"test\.stamp: EXTRAS := ([\w,-]+)", (ROOT / "Makefile").read_text())
    assert set(needed.split(",")) <= own.extras


def tracked() -> set[str]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()}


# setuptools is asked for the files, in a process of its own, since it replaces the distutils that others imported.
_FILES = """
import setuptools
distribution = setuptools.dist.Distribution({"include_package_data": False, "script_name": "setup.py"})
distribution.parse_config_files()
distribution.set_defaults()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print(*(path for *_, path in command.find_all_modules()), sep="\\n")
print(*(f"{folder}/{name}" for _, folder, _, names in command.data_files for name in names), sep="\\n")
"""


def test_a_wheel_holds_every_tracked_file_of_the_packages() -> None:
    """No wheel is built here: `make wheel` builds, installs and runs one."""
    found = [d.version for d in metadata.distributions(name="setuptools")]
    if not found or int(found[0].split(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer is not installed")
    done = subprocess.run([sys.executable, "-c", _FILES], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {Path(line) for line in done.stdout.splitlines()}
    assert tracked() <= {str(path.relative_to(ROOT) if path.is_absolute() else path) for path in listed}


def test_what_a_wheel_is_tried_with_passes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make wheel` runs it in an environment that has the wheel and its dependencies alone."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    runpy.run_path(str(ROOT / "tools" / "smoke.py"))["check_program"](tmp_path)


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert releases[0] == ("Unreleased", "") and all(date for _, date in releases[1:])
    sections = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_is_the_installed_one() -> None:
    import npu_compiler
    import npusim

    assert npusim.__version__ == npu_compiler.__version__
    try:
        assert npusim.__version__ == metadata.version("npusim")
    except metadata.PackageNotFoundError:
        assert npusim.__version__ == "0+unknown"
