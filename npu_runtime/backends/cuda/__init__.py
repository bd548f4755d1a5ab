"""NVIDIA GPUs: CuPy manages memory and streams; the driver runs cubins and graphs."""

from .backend import BACKEND, CUDABackend, missing_parts
from .buffers import CUDABuffer

__all__ = ["BACKEND", "CUDABackend", "CUDABuffer", "missing_parts"]
