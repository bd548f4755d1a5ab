"""The set-up of a Mac: macOS, the Python that runs, pyobjc and the GPU."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata

from npu_compiler.support.errors import BackendError
from npu_compiler.targets.metal.target import LANGUAGE
from npu_runtime.backends.metal import device

PYOBJC = "pyobjc-framework-Metal"
# The major version of macOS that brought Metal 3.1, the language of all programs. Source: Apple's documentation of
# MTLLanguageVersion.
MIN_MACOS = 14


@dataclass(frozen=True)
class MacReport:
    """What a Mac has.

    Attributes:
        macos: the version of macOS, such as '15.1'.
        pyobjc: the version of pyobjc-framework-Metal; None: it is not installed.
        gpu: the name of the GPU; None: programs cannot run on it.
        family: of the GPU, such as 'apple9'; None if there is no ``gpu``.
        problems: what keeps programs from running, or limits them, each with its remedy.
    """

    macos: str
    pyobjc: str | None
    gpu: str | None
    family: str | None
    problems: tuple[str, ...]

    @property
    def text(self) -> str:
        """The report in one line, without the problems."""
        gpu = f"{self.gpu} ({self.family})" if self.gpu else "no usable GPU"
        return f"macOS {self.macos}, {gpu}, {PYOBJC} {self.pyobjc or 'is not installed'}"


def mac_report() -> MacReport | None:
    """Return the report of this Mac, or None on other systems."""
    macos = platform.mac_ver()[0]
    if not macos:
        return None
    problems = _system_problems(macos)
    name = family = pyobjc = None
    try:
        pyobjc = metadata.version(PYOBJC)
    except metadata.PackageNotFoundError:
        problems.append(f"{PYOBJC} is not installed: pip install 'npusim[metal]'")
    try:
        gpu = device.default_device()
        name, family = str(gpu.name()), f"apple{device.family(gpu)}"
        if not device.has_bfloat16(gpu):
            problems.append(f"{name} has no bfloat16: compile with dtype float16")
    except BackendError as error:
        if pyobjc is not None:
            problems.append(str(error))
    return MacReport(macos, pyobjc, name, family, tuple(problems))


def _system_problems(macos: str) -> list[str]:
    problems = []
    if int(macos.split(".")[0]) < MIN_MACOS:
        problems.append(f"macOS {macos} does not compile {LANGUAGE}, the language of programs: update to {MIN_MACOS}")
    if platform.machine() == "x86_64" and _translated():
        problems.append("this Python is made for Intel and runs translated: install one for arm64")
    return problems


def _translated() -> bool:
    """Whether this process runs through Rosetta."""
    command = ["sysctl", "-in", "sysctl.proc_translated"]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() == "1"
