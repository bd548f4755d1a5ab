"""The GPU of a Mac and what it can run. Only this package imports pyobjc, and only when a backend is made."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import BackendError
from npu_compiler.targets.metal.devices import DEVICES

_FAMILY = 1000  # MTLGPUFamilyApple<n> is 1000 + n
_OLDEST = int(DEVICES[0].name.removeprefix("apple"))
_NEWEST = 99  # families are asked for up to this number


def frameworks() -> Any:
    """Return pyobjc's module ``Metal``. Raises ``BackendError`` with the remedy if it is missing."""
    try:
        return importlib.import_module("Metal")
    except ImportError as error:
        if sys.platform != "darwin":
            raise BackendError(
                f"Metal needs a Mac with an Apple GPU, and this is {sys.platform}; compile for cpu to run here"
            ) from None
        broken = "" if error.name == "Metal" else f" ({error})"
        raise BackendError(f"pyobjc-framework-Metal is needed{broken}: pip install 'npusim[metal]'") from None


def file_url(path: Path) -> Any:
    """Return the ``NSURL`` of a file."""
    return importlib.import_module("Foundation").NSURL.fileURLWithPath_(str(path))


def autorelease_pool() -> AbstractContextManager[Any]:
    """Return a context at whose end the temporary objects of Apple's frameworks are freed; a thread of Python has no
    other end."""
    return importlib.import_module("objc").autorelease_pool()


def default_device() -> Any:
    """Return this machine's ``MTLDevice``. Raises ``BackendError`` if there is none, or if programs cannot run on
    it."""
    device = frameworks().MTLCreateSystemDefaultDevice()
    if device is None:
        raise BackendError("this Mac has no GPU that Metal can use; compile for cpu to run here")
    if family(device) < _OLDEST:
        raise BackendError(
            f"{device.name()} is too old or not made by Apple: programs need the family {DEVICES[0].name} "
            f"({DEVICES[0].chips}) or a later one; compile for cpu to run here"
        )
    return device


def family(device: Any) -> int:
    """Return the latest family Apple<n> that a device belongs to; 0: none."""
    return next((n for n in range(_NEWEST, 0, -1) if device.supportsFamily_(_FAMILY + n)), 0)


def check_program(program: CompiledProgram, device: Any) -> None:
    """Raise ``BackendError`` if ``program`` is for a later family, or for a dtype that the device does not have."""
    wanted, have = re.search(r":apple(\d+)$", program.device or ""), family(device)
    if wanted is not None and int(wanted[1]) > have:
        raise BackendError(
            f"program {program.name!r} was compiled for {program.device}, this GPU ({device.name()}) is apple{have}; "
            f"compile it again: npusim compile MODEL --target metal:{DEVICES[0].name}"
        )
    if any(b.dtype == "bfloat16" for b in program.buffers) and not has_bfloat16(device):
        raise BackendError(
            f"program {program.name!r} computes in bfloat16, which {device.name()} does not have; compile the model "
            "with dtype float16"
        )


def has_bfloat16(device: Any) -> bool:
    """Whether the device has the type ``bfloat``. Source: Apple's Metal Feature Set Tables."""
    metal = frameworks()
    return bool(device.supportsFamily_(metal.MTLGPUFamilyMetal3) or device.supportsFamily_(metal.MTLGPUFamilyApple6))
