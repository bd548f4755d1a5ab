"""Apple GPUs. Programs for them compile on every machine but run only on a Mac."""

from __future__ import annotations

import sys
from typing import Any

from npu_compiler.support.errors import BackendError

from .base import Backend


class MetalBackend(Backend):
    """The backend of Apple GPUs. It cannot run programs yet: making one raises ``BackendError`` with the reason."""

    name = "metal"

    def __new__(cls, **options: Any) -> MetalBackend:
        if sys.platform != "darwin":
            raise BackendError(
                f"Metal needs a Mac with an Apple GPU, and this is {sys.platform}; compile for cpu to run here"
            )
        raise BackendError("this build writes Metal programs and cannot run them yet; compile for cpu to run here")


BACKEND = MetalBackend
