"""Apple GPUs, through pyobjc-framework-Metal."""

from .backend import BACKEND, MetalBackend, missing_parts
from .buffers import MetalBuffer

__all__ = ["BACKEND", "MetalBackend", "MetalBuffer", "missing_parts"]
