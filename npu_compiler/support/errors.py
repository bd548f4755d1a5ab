"""Every error a user can cause. Each says what is wrong, where, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NPUError(Exception):
    """Base class of all errors this project raises on purpose."""


class ConfigError(NPUError):
    """An environment variable or setting with an invalid value; the message names it."""


class IRError(NPUError):
    """Malformed IR; the message starts with the JSON path of the offending value."""


class CaptureError(NPUError):
    """A PyTorch model that cannot be exported as a static graph."""


class ArtifactError(NPUError):
    """A damaged or unusable ``.npubin``; the message carries the field or file offset."""


class WeightError(NPUError):
    """A missing, extra, mis-shaped or unreadable weight; the message names the tensor."""


class IncompressibleError(WeightError):
    """Weights whose values do not fit the weight format of a program."""


class InputError(NPUError):
    """A wrong input at run time; the message names the tensor and what was expected."""


class ToolchainError(NPUError):
    """No usable compiler, or a compiler that failed."""


class BackendError(NPUError):
    """A device that is missing or failed."""


@dataclass(frozen=True)
class Reason:
    """Why a node cannot run on the NPU: ``rule`` is a stable short name, ``detail`` a sentence, ``fix`` what to do."""

    rule: str
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.detail} [{self.rule}]" + (f"; {self.fix}" if self.fix else "")


class Unsupported(NPUError):
    """Raised by a lowering that cannot honour an attribute, dtype or shape exactly."""

    def __init__(self, reason: Reason | str):
        self.reason = reason if isinstance(reason, Reason) else Reason("unsupported", reason)
        super().__init__(str(self.reason))


class CompileError(NPUError):
    """Compilation refused; ``reasons`` holds (node name, op type, Reason) for every offending node."""

    def __init__(self, message: str, reasons: Sequence[tuple[str, str, Reason]] = ()):
        self.reasons = list(reasons)
        super().__init__(message)
