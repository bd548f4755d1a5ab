"""A stand-in for pyobjc's ``Metal``, ``Foundation`` and ``objc``, over the Metal emulator. For tests on Linux.

It has the methods that ``npu_runtime/backends/metal`` calls, under pyobjc's names and with its results: a method whose
last argument is an error returns a tuple. Work runs when it is waited for, so a missing wait shows as a stale result;
dispatches that no barrier separates run in any order; and a mistake that Apple's API validation would stop is an
``APIMisuse``.
"""

from .commands import CommandBuffer
from .device import Device, installed
from .encoders import ComputeEncoder
from .faults import APIMisuse, NSError
from .resources import Buffer
from .validation import MTLSize

__all__ = ["APIMisuse", "Buffer", "CommandBuffer", "ComputeEncoder", "Device", "MTLSize", "NSError", "installed"]
