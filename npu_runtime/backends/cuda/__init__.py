"""NVIDIA GPUs: memory and streams through CuPy, cubins and graphs through the driver."""

from .backend import BACKEND, CUDABackend, missing_parts
from .buffers import CUDABuffer

__all__ = ["BACKEND", "CUDABackend", "CUDABuffer", "missing_parts"]
