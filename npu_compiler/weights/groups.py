"""Groups of 4-bit numbers with a float16 scale, with and without a zero point, as post-training quantisers make them.

A group of N elements is its scale (float16), with zero points a byte, then N / 2 bytes, each with an even element in
its low half and the next in its high half.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .blocks import CodeBlocks, Parts, divided, half, half_bytes, half_of, largest, no_head, rounded
from .format import Read, Real

_TOP, _MIDDLE = 15, 8


class Int4(CodeBlocks):
    """An element is (code - 8) * scale. Quantising puts the element of largest magnitude on code 0."""

    bits = 4
    code_kind: ClassVar[str] = "int4"  # see quantized.matrix
    has_zeros: ClassVar[bool] = False  # whether a group has a zero point
    scale_fields: tuple[int, ...] = (2,)
    error = 1 / _MIDDLE * (1 + 2**-6)  # that of an element with the largest magnitude and the other sign
    floor = 2**-20  # of subnormal scales

    def __init__(self, group: int, name: str):
        self.name, self.block, self.sub_block = name, group, group
        self.block_bytes = sum(self.scale_fields) + group // 2
        super().__init__()

    def holds_scales(self, scales: np.ndarray) -> bool:
        """Return True if float16 has all these scales exactly."""
        with np.errstate(over="ignore"):
            return np.array_equal(scales.astype(np.float16).astype(np.float32), scales)

    def assemble(self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
        """Return the blocks, uint8 [N, bytes of a row], of codes [N, K], scales float32 [N, groups] and zero points
        uint8 [N, groups] (None: the format has none)."""
        fields = half_bytes(scales) if zeros is None else np.concatenate([half_bytes(scales), zeros[..., None]], -1)
        groups = codes.reshape(*scales.shape, 1, self.block)
        parts = Parts(groups, np.empty((*scales.shape, 0), np.uint8), fields[..., None, :])
        return self.join(parts).reshape(len(codes), -1)

    def split(self, blocks: np.ndarray) -> Parts:
        lead, front = blocks.shape[:-1], sum(self.scale_fields)
        raw = np.ascontiguousarray(blocks[..., front:])
        codes = np.empty((*lead, self.block), np.uint8)
        codes[..., ::2], codes[..., 1::2] = raw & np.uint8(15), raw >> np.uint8(4)
        codes, scales = codes.reshape(*lead, 1, self.block), blocks[..., :front].reshape(*lead, 1, front)
        return Parts(codes, np.empty((*lead, 0), np.uint8), scales)

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes[..., 0, :]
        return np.concatenate([parts.scales[..., 0, :], codes[..., ::2] | codes[..., 1::2] << np.uint8(4)], -1)

    def elements(self, parts: Parts) -> np.ndarray:
        return (parts.codes.astype(np.float32) - np.float32(_MIDDLE)) * half(parts.scales)[..., None]

    def element(self, code: Any, head: Read, scale: Read, real: Real) -> Any:
        return half_of(scale(0), scale(1), real) * real(code - _MIDDLE)

    def quantize(self, w: np.ndarray) -> Parts:
        scales = half_bytes(largest(w) / np.float32(-_MIDDLE))
        codes = rounded(divided(w, half(scales)[..., None]) + np.float32(_MIDDLE), _TOP)
        return Parts(codes, no_head(w), scales)


class Int4Zero(Int4):
    """An element is (code - zero) * scale, with a whole number ``zero`` for each group."""

    has_zeros = True
    scale_fields = (2, 1)
    error = 1 / _TOP + 2**-8  # half a step, and the rounding of the scale

    def elements(self, parts: Parts) -> np.ndarray:
        zero = parts.scales[..., 2:].astype(np.float32)
        return (parts.codes.astype(np.float32) - zero) * half(parts.scales[..., :2])[..., None]

    def element(self, code: Any, head: Read, scale: Read, real: Real) -> Any:
        return half_of(scale(0), scale(1), real) * real(code - scale(2))

    def quantize(self, w: np.ndarray) -> Parts:
        low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        raw = half_bytes((high - low) / np.float32(_TOP))
        scale = half(raw)
        zero = rounded(divided(-low, scale), _TOP)
        codes = rounded(divided(w, scale[..., None]) + zero[..., None].astype(np.float32), _TOP)
        return Parts(codes, no_head(w), np.concatenate([raw, zero[..., None]], -1))
