"""q8_0: blocks of 32 elements as 8-bit numbers with one float16 scale, as in GGUF's type of that name.

A block is 34 bytes: the scale d, then 32 signed bytes q; an element is d * q. Scales are rounded up, so that no q
overflows. Rows consist of whole blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...support.errors import IncompressibleError
from ..blocks import half_of
from ..format import PANELS, BlockFormat, Layout, Read, Real, Shape

BLOCK, SCALE_BYTES, PANEL = 32, 2, 32
BLOCK_BYTES = SCALE_BYTES + BLOCK
_TOP = 127


class Panels(Layout):
    """The layout 'q8_0.panels': 32 output columns together. For every element of the reduced dim a panel has one byte
    per column, then for every block the float16 scales of the columns."""

    name = "q8_0.panels"
    order = PANELS
    panel = PANEL

    def packed_shape(self, n: int, c: int) -> Shape | None:
        return -(-n // PANEL), PANEL * c

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, c = stored.shape
        panels = np.zeros((-(-n // PANEL), PANEL, c), np.uint8)
        panels.reshape(-1, c)[:n] = stored
        blocks = panels.reshape(len(panels), PANEL, c // BLOCK_BYTES, BLOCK_BYTES)
        numbers = blocks[..., SCALE_BYTES:].transpose(0, 2, 3, 1)
        scales = blocks[..., :SCALE_BYTES].transpose(0, 2, 1, 3)
        return np.concatenate([part.reshape(len(panels), -1) for part in (numbers, scales)], 1)

    def looks_up(self, n: int, k: int) -> bool:
        return n % PANEL == 0

    def element(self, read: Read, real: Real, row: Any, column: Any, nbytes: int) -> Any:
        numbers, lane = nbytes // BLOCK_BYTES * BLOCK, row & PANEL - 1
        scale = numbers + (column >> 5) * (PANEL * SCALE_BYTES) + lane * SCALE_BYTES
        number = (read(column * PANEL + lane) ^ 128) - 128
        return real(number) * half_of(read(scale), read(scale + 1), real)

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        count = c // BLOCK_BYTES
        split = PANEL * BLOCK * count
        numbers = packed[:, :split].reshape(-1, count, BLOCK, PANEL).transpose(0, 3, 1, 2)
        scales = packed[:, split:].reshape(-1, count, PANEL, SCALE_BYTES).transpose(0, 2, 1, 3)
        return np.concatenate([scales, numbers], 3).reshape(-1, c)[:n]


class Q8_0(BlockFormat):
    """The format q8_0; see the module."""

    name = "q8_0"
    dtypes = ("float32", "float16", "bfloat16")
    layouts = (Panels(),)
    block = BLOCK
    error = 0.5 / _TOP * (1 + 2**-10)
    floor = 2**-25  # half a step of the smallest scale
    gguf_type = 8

    def row_bytes(self, k: int) -> int | None:
        return k // BLOCK * BLOCK_BYTES if k % BLOCK == 0 else None

    def encode(self, w: np.ndarray) -> np.ndarray:
        wide = w.astype(np.float32).reshape(len(w), -1, BLOCK)
        exact = np.abs(wide).max(2, keepdims=True) / np.float32(_TOP)
        scale = exact.astype(np.float16)
        scale = np.where(scale < exact, np.nextafter(scale, np.float16(np.inf)), scale)
        if not np.isfinite(scale).all():
            raise IncompressibleError(f"a block holds NaN or a number beyond {_TOP} times the largest float16")
        step = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
        numbers = np.rint(wide / step).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], 2).reshape(len(w), -1)

    def decode(self, blocks: np.ndarray, k: int) -> np.ndarray:
        parts = blocks.reshape(len(blocks), k // BLOCK, BLOCK_BYTES)
        scale = np.ascontiguousarray(parts[..., :SCALE_BYTES]).view(np.float16).astype(np.float32)
        return (parts[..., SCALE_BYTES:].view(np.int8) * scale).reshape(len(blocks), k)


FORMAT = Q8_0()
