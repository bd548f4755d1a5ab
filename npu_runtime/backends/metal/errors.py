"""Errors of command buffers in words: what went wrong, in which kernel, and the remedy."""

from __future__ import annotations

from typing import Any

from .device import frameworks


def reason(error: Any) -> str:
    """Return what went wrong in a command buffer, and the remedy."""
    if error is None:
        return "the GPU stopped without an error"
    metal = frameworks()
    remedies = {
        metal.MTLCommandBufferErrorOutOfMemory: "close other programs, or compile a smaller batch or context",
        metal.MTLCommandBufferErrorTimeout: "a kernel took too long; compile a smaller batch",
        metal.MTLCommandBufferErrorPageFault: "a kernel accessed memory out of bounds; report this",
        metal.MTLCommandBufferErrorDeviceRemoved: "the GPU was lost; start the program again",
        metal.MTLCommandBufferErrorAccessRevoked: "the GPU was lost; start the program again",
    }
    remedy = remedies.get(error.code(), f"error {error.code()} of Metal; report this")
    return f"{error.localizedDescription()} ({remedy})"


def repeatable(error: Any) -> bool:
    """Whether the GPU still runs kernels after this error, and one kernel is its cause."""
    metal = frameworks()
    return error is None or error.code() in (
        metal.MTLCommandBufferErrorInternal,
        metal.MTLCommandBufferErrorTimeout,
        metal.MTLCommandBufferErrorPageFault,
        metal.MTLCommandBufferErrorInvalidResource,
        metal.MTLCommandBufferErrorStackOverflow,
    )


def faulted(error: Any) -> tuple[str, str] | None:
    """Return (label, last signpost or '') of the encoder that failed; None if Metal does not tell. An encoder that the
    failure only affected counts if none is named as its cause."""
    metal = frameworks()
    found = None if error is None else error.userInfo().objectForKey_(metal.MTLCommandBufferEncoderInfoErrorKey)
    infos = list(found or ())
    for state in (metal.MTLCommandEncoderErrorStateFaulted, metal.MTLCommandEncoderErrorStateAffected):
        for info in infos:
            if info.errorState() == state:
                signposts = list(info.debugSignposts())
                return str(info.label()), str(signposts[-1]) if signposts else ""
    return None
