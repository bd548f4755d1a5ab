"""A weight format from outside of the package: rows of 8-bit numbers with one float32 scale each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npu_compiler.support.errors import IncompressibleError
from npu_compiler.weights.format import BlockFormat, Layout, Order, Shape

SCALE_BYTES, PANEL = 4, 32


class Panels(Layout):
    """Of 32 rows of the matrix: their scales, then a byte of each for every element of the reduced dim."""

    name = "rows8.panels"
    order = Order.PANELS
    panel = PANEL
    reader = Path(__file__).with_name("rows8.h")

    def packed_shape(self, n: int, c: int) -> Shape | None:
        return -(-n // PANEL), PANEL * c

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, c = stored.shape
        panels = np.zeros((-(-n // PANEL), PANEL, c), np.uint8)
        panels.reshape(-1, c)[:n] = stored
        scales = panels[:, :, :SCALE_BYTES].reshape(len(panels), -1)
        numbers = panels[:, :, SCALE_BYTES:].transpose(0, 2, 1).reshape(len(panels), -1)
        return np.concatenate([scales, numbers], 1)

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        scales = packed[:, : PANEL * SCALE_BYTES].reshape(-1, PANEL, SCALE_BYTES)
        numbers = packed[:, PANEL * SCALE_BYTES :].reshape(len(packed), -1, PANEL).transpose(0, 2, 1)
        return np.concatenate([scales, numbers], 2).reshape(-1, c)[:n]


class Rows8(BlockFormat):
    name = "rows8"
    dtypes = ("float32", "bfloat16")
    layouts = (Panels(),)
    error = 0.5 / 127 * 1.001  # half a step, and the rounding of the scale

    def row_bytes(self, k: int) -> int | None:
        return SCALE_BYTES + k if k % 2 == 0 else None

    def encode(self, w: np.ndarray) -> np.ndarray:
        wide = w.astype(np.float32)
        largest = np.abs(wide).max(1, keepdims=True)
        if not np.isfinite(largest).all():
            raise IncompressibleError("a row holds an infinity or NaN, which has no 8-bit form")
        scale = np.where(largest > 0, largest / np.float32(127), np.float32(1))
        numbers = np.rint(wide / scale).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], 1)

    def decode(self, blocks: np.ndarray, k: int) -> np.ndarray:
        scale = np.ascontiguousarray(blocks[:, :SCALE_BYTES]).view(np.float32)
        return blocks[:, SCALE_BYTES:].view(np.int8) * scale


FORMAT = Rows8()
