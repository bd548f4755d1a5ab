"""Apple GPUs. Programs for them compile on every machine; running one takes a Mac."""

from __future__ import annotations

import sys
from typing import Any

from npu_compiler.support.errors import BackendError

from .base import Backend


class MetalBackend(Backend):
    """Raises ``BackendError`` in one line that says what is missing."""

    name = "metal"

    def __new__(cls, **options: Any) -> MetalBackend:
        if sys.platform != "darwin":
            raise BackendError(
                f"Metal needs a Mac with an Apple GPU, and this is {sys.platform}; compile for cpu to run here"
            )
        raise BackendError("this build writes Metal programs and cannot run them yet; compile for cpu to run here")


BACKEND = MetalBackend
