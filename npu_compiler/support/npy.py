"""Arrays in numpy's ``.npy`` format. The header is checked before memory for the data is allocated.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import math
from typing import IO, Any, NamedTuple

import numpy as np

_CHUNK = 1 << 20


class Header(NamedTuple):
    """Shape, dtype and element order of the array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of data after the header."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(stream: IO[bytes]) -> Header:
    """Read the header up to the data. Raises ``ValueError`` if it is malformed or describes Python objects."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not supported")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header = Header(*read(stream))
    except (OSError, EOFError):
        raise
    except Exception as error:  # numpy lets the errors of Python's parser through: SyntaxError, TokenError, MemoryError
        raise ValueError(f"its header is damaged: {str(error)[:200] or type(error).__name__}") from None
    if header.dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded")
    if len(header.shape) > 32 or any(n < 0 or n >= 2**48 for n in header.shape):
        raise ValueError(f"its header announces the shape {list(header.shape)[:40]}")
    return header


def read_data(stream: IO[bytes], header: Header, available: int) -> np.ndarray:
    """Read the array after ``header``; ``available`` bytes follow, None if unknown. Raises ``ValueError``."""
    if header.nbytes > available:
        raise ValueError(f"its header announces {header.nbytes} bytes of data, but {available} follow")
    try:
        data = np.empty(header.nbytes, np.uint8)
    except (MemoryError, ValueError):
        raise ValueError(f"there is no memory for its {header.nbytes} bytes") from None
    at = 0
    while at < data.size:
        chunk = np.frombuffer(stream.read(min(_CHUNK, data.size - at)), np.uint8)
        if not chunk.size:
            raise ValueError(f"it ends after {at} of {data.size} bytes of data")
        data[at : at + chunk.size] = chunk
        at += chunk.size
    if header.dtype == bool:  # a byte other than 0 and 1 is true, but not a valid bool
        data = (data != 0).view(np.uint8)
    array = data.view(header.dtype) if header.dtype.itemsize else np.zeros(math.prod(header.shape), header.dtype)
    return array.reshape(header.shape, order="F" if header.fortran_order else "C")
