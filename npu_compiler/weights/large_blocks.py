"""Block formats of 256 small codes: GGUF's K types, whose sub-blocks have scales of 4 to 8 bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from .blocks import CodeBlocks, Parts, Read, Real, divided, half, half_bytes, half_of, largest, rounded


class LargeBlocks(CodeBlocks):
    """Blocks of 256, whose sub-blocks have scales of 4 to 8 bits: multiples of the block's float16 numbers."""

    block = 256


class LargeFrom(LargeBlocks):
    """An element is code * scale - minimum: whole numbers of at most ``top_scale`` times the two float16 numbers of the
    head. The scales of a sub-block are a byte for the scale and one for the minimum."""

    head_fields = (2, 2)
    scale_fields: tuple[int, ...] = (1, 1)
    top_scale: ClassVar[int] = 63
    floor = 2**-13  # of subnormal scales, times scale and code

    def pair(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers [...] of scale and minimum of scales [..., bytes]."""
        return scales[..., 0], scales[..., 1]

    def paired(self, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        """Return the scales [..., bytes] of the numbers of :meth:`pair`."""
        return np.stack([scale, minimum], -1)

    def elements(self, parts: Parts) -> np.ndarray:
        d, dmin = half(parts.head[..., :2])[..., None], half(parts.head[..., 2:])[..., None]
        numbers = self.pair(parts.scales)
        scale, minimum = d * numbers[0].astype(np.float32), dmin * numbers[1].astype(np.float32)
        return scale[..., None] * parts.codes.astype(np.float32) - minimum[..., None]

    def element(self, code: Any, head: Read, scale: Read, real: Real) -> Any:
        numbers = self.pair_of(scale)
        scaled = half_of(head(0), head(1), real) * real(numbers[0]) * real(code)
        return scaled - half_of(head(2), head(3), real) * real(numbers[1])

    def pair_of(self, scale: Read) -> tuple[Any, Any]:
        """Return the whole numbers of scale and minimum; ``scale`` reads a byte of the scales."""
        return scale(0), scale(1)

    def quantize(self, w: np.ndarray) -> Parts:
        top = (1 << self.bits) - 1
        low = np.minimum(w.min(-1), 0)
        scale, unit = (w.max(-1) - low) / np.float32(top), np.float32(self.top_scale)
        head = np.concatenate([half_bytes(scale.max(-1) / unit), half_bytes(-low.min(-1) / unit)], -1)
        d, dmin = half(head[..., :2])[..., None], half(head[..., 2:])[..., None]
        numbers = [rounded(divided(x, y), self.top_scale) for x, y in ((scale, d), (-low, dmin))]
        steps = (d * numbers[0].astype(np.float32))[..., None]
        minimum = (dmin * numbers[1].astype(np.float32))[..., None]
        return Parts(rounded(divided(w + minimum, steps), top), head, self.paired(*numbers))


class LargeScaled(LargeBlocks):
    """An element is (code - 2^(bits - 1)) * scale, and a scale a signed number times the float16 number of the head."""

    head_fields = (2,)
    scale_fields = (1,)
    floor = 2**-12

    @abstractmethod
    def signed(self, scales: np.ndarray) -> np.ndarray:
        """Return the signed numbers float32 [...] of scales [..., 1]."""

    @abstractmethod
    def stored(self, numbers: np.ndarray) -> np.ndarray:
        """Return the scales [..., 1] of whole float32 numbers [...], bounded by those that are stored."""

    @property
    @abstractmethod
    def top_scale(self) -> int:
        """The largest signed number."""

    def elements(self, parts: Parts) -> np.ndarray:
        scale = half(parts.head)[..., None] * self.signed(parts.scales)
        return scale[..., None] * (parts.codes.astype(np.float32) - np.float32(1 << self.bits - 1))

    def element(self, code: Any, head: Read, scale: Read, real: Real) -> Any:
        return half_of(head(0), head(1), real) * real(self.signed_of(scale(0))) * real(code - (1 << self.bits - 1))

    @abstractmethod
    def signed_of(self, byte: Any) -> Any:
        """Return the signed number of a byte of the scales, which may be an expression."""

    def quantize(self, w: np.ndarray) -> Parts:
        middle = 1 << self.bits - 1
        scale = largest(w) / np.float32(-middle)
        head = half_bytes(np.abs(scale).max(-1) / np.float32(self.top_scale))
        d = half(head)[..., None]
        scales = self.stored(np.rint(divided(scale, d)))
        steps = (d * self.signed(scales))[..., None]
        return Parts(rounded(divided(w, steps) + np.float32(middle), 2 * middle - 1), head, scales)


def crumbs(raw: np.ndarray) -> np.ndarray:
    """Return 256 numbers of 2 bits of 64 bytes [..., 64]: a byte has elements i, i + 32, i + 64, i + 96 of 128."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    parts = raw.reshape(*raw.shape[:-1], 2, 1, 32) >> shifts & np.uint8(3)
    return parts.reshape(*raw.shape[:-1], 256)


def crumb_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the bytes [..., 64] of :func:`crumbs`."""
    parts = numbers.reshape(*numbers.shape[:-1], 2, 4, 32)
    out = parts[..., 0, :].copy()
    for i in range(1, 4):
        out |= parts[..., i, :] << np.uint8(2 * i)
    return out.reshape(*numbers.shape[:-1], 64)


def nibbles(raw: np.ndarray, run: int) -> np.ndarray:
    """Return 256 numbers of 4 bits of 128 bytes [..., 128]: of ``run`` bytes the low halves, then the high halves."""
    parts = raw.reshape(*raw.shape[:-1], -1, 1, run) >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    return parts.reshape(*raw.shape[:-1], 256)


def nibble_bytes(numbers: np.ndarray, run: int) -> np.ndarray:
    """Return the bytes [..., 128] of :func:`nibbles`."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 2, run)
    return (parts[..., 0, :] | parts[..., 1, :] << np.uint8(4)).reshape(*numbers.shape[:-1], 128)


def top_bits(raw: np.ndarray) -> np.ndarray:
    """Return 256 bits of 32 bytes [..., 32]: bit j of byte i is element 32 j + i."""
    bits = raw[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return bits.reshape(*raw.shape[:-1], 256)


def top_bit_bytes(bits: np.ndarray) -> np.ndarray:
    """Return the bytes [..., 32] of :func:`top_bits`."""
    planes = bits.reshape(*bits.shape[:-1], 8, 32)
    return np.packbits(planes, axis=-2, bitorder="little")[..., 0, :]
