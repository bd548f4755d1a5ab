"""Block formats whose elements are small codes: GGUF's types of 2 to 6 bits.

``block`` codes share a scale and perhaps a minimum; ``blocks_per_unit`` blocks share the *head* of a super-block. A
file stores them in the order of GGUF; a format splits its bytes into codes, head and scales (:class:`Parts`).

The layout of panels has, for 32 columns and each super-block, the fields of the head, then for each block the codes and
the fields of its scales; a field has the bytes of all columns. Codes are grouped by 4 elements of the reduced dim. A
group has a *plane* of the codes' low bits (4 of them, or 2) and one of the remaining bits. A plane of b bits has for
each column c < 16 a little-endian number of 8 * b bits; its field 4 * (k % 2) + 2 * (k // 2) + h has the bits of
element k of column c + 16 * h. So one load serves several registers, and a shift selects the register's codes.
The readers are ``targets/cpu/kernels/blocks.h`` and the files named after the formats.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from ..support.errors import IncompressibleError
from .format import PANELS, BlockFormat, Layout, Shape

PANEL = 32
_GROUP, _LANES, _HALVES = 4, 16, 2
_CHUNK = 2**24  # codes that are packed at a time: temporary arrays have several bytes a code


class Parts(NamedTuple):
    """Super-blocks in parts: codes uint8 [..., blocks, block], head uint8 [..., bytes], and the scales of the blocks
    uint8 [..., blocks, bytes]."""

    codes: np.ndarray
    head: np.ndarray
    scales: np.ndarray


class CodeBlocks(BlockFormat):
    """A format of small codes.

    ``bits``: of a code. ``unit_bytes``: of a super-block of ``blocks_per_unit`` blocks. ``head_fields`` and
    ``scale_fields``: the bytes of the fields of a head and of a block's scales.
    """

    dtypes = ("float32", "float16", "bfloat16")
    bits: ClassVar[int]
    unit_bytes: ClassVar[int]
    blocks_per_unit: ClassVar[int] = 1
    head_fields: ClassVar[tuple[int, ...]] = ()
    scale_fields: ClassVar[tuple[int, ...]]

    def __init__(self) -> None:
        self.layouts = (BlockPanels(self),)

    @property
    def unit(self) -> int:
        """The elements of a super-block."""
        return self.block * self.blocks_per_unit

    def row_bytes(self, k: int) -> int | None:
        return k // self.unit * self.unit_bytes if k % self.unit == 0 else None

    @abstractmethod
    def split(self, units: np.ndarray) -> Parts:
        """Return the parts of super-blocks uint8 [..., unit_bytes]."""

    @abstractmethod
    def join(self, parts: Parts) -> np.ndarray:
        """Return the super-blocks uint8 [..., unit_bytes] of their parts: the inverse of :meth:`split`."""

    @abstractmethod
    def elements(self, parts: Parts) -> np.ndarray:
        """Return the elements float32 [..., blocks, block], computed in the order in which GGUF defines them."""

    @abstractmethod
    def quantize(self, w: np.ndarray) -> Parts:
        """Return the parts of super-blocks of elements float32 [..., blocks, block], all of them finite. Scales that
        float16 cannot hold may be infinite."""

    def encode(self, w: np.ndarray) -> np.ndarray:
        wide = w.astype(np.float32).reshape(len(w), -1, self.blocks_per_unit, self.block)
        if not np.isfinite(wide).all():
            raise IncompressibleError("a block holds NaN or an infinity")
        with np.errstate(all="ignore"):
            parts = self.quantize(wide)
            back = self.elements(parts)
        if not np.isfinite(back).all():
            raise IncompressibleError("a block holds a number that needs a scale beyond the largest float16")
        return self.join(parts).reshape(len(w), -1)

    def decode(self, blocks: np.ndarray, k: int) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.elements(self.split(blocks.reshape(len(blocks), -1, self.unit_bytes))).reshape(len(blocks), k)


class BlockPanels(Layout):
    """The layout of panels of a format of small codes; see the module."""

    order = PANELS
    panel = PANEL

    def __init__(self, format: CodeBlocks):
        self.format, self.name = format, f"{format.name}.panels"
        self._low = 4 if format.bits >= 4 else 2
        self._planes = tuple(b for b in (self._low, format.bits - self._low) if b)
        self._head = PANEL * sum(format.head_fields)
        self._codes = format.block // 8 * format.bits * PANEL
        self._block = self._codes + PANEL * sum(format.scale_fields)
        self._unit = self._head + format.blocks_per_unit * self._block

    def packed_shape(self, n: int, c: int) -> Shape | None:
        size = c // self.format.unit_bytes * self._unit
        return -(-n // PANEL), -(-size // self.alignment) * self.alignment

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, c = stored.shape
        shape = self.packed_shape(n, c)
        assert shape is not None
        out = np.zeros(shape, np.uint8)
        panels = max(1, _CHUNK // (PANEL * self.format.unit * max(1, c // self.format.unit_bytes)))
        for begin in range(0, shape[0], panels):
            rows = stored[begin * PANEL : (begin + panels) * PANEL]
            count = -(-len(rows) // PANEL)
            padded = rows
            if len(rows) % PANEL:
                padded = np.zeros((count * PANEL, c), np.uint8)
                padded[: len(rows)] = rows
            units = padded.reshape(count, PANEL, -1, self.format.unit_bytes).transpose(0, 2, 1, 3)
            made = self._packed_units(self.format.split(units)).reshape(count, -1)
            out[begin : begin + count, : made.shape[1]] = made
        return out

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        count = c // self.format.unit_bytes
        units = packed[:, : count * self._unit].reshape(len(packed), count, self._unit)
        blocks = self.format.join(self._parts(units))  # [panels, units, columns, bytes]
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(-1, c)[:n]

    def _packed_units(self, parts: Parts) -> np.ndarray:
        """Return uint8 [panels, units, bytes] of parts [panels, units, 32, ...]."""
        codes, head, scales = parts
        lead, blocks = codes.shape[:2], codes.shape[3]
        # [..., half, column, block, group, element of a pair's u, p] -> [..., block, group, column, p, u, half]
        grouped = codes.reshape(*lead, _HALVES, _LANES, blocks, -1, 2, 2).transpose(0, 1, 4, 5, 3, 7, 6, 2)
        fields = np.ascontiguousarray(grouped).reshape(*grouped.shape[:5], 8)
        planes, shift = [], 0
        for bits in self._planes:
            part = fields >> np.uint8(shift) & np.uint8((1 << bits) - 1)
            per_byte = 8 // bits
            part = part.reshape(*part.shape[:-1], bits, per_byte)
            made = part[..., 0].copy()
            for i in range(1, per_byte):
                made |= part[..., i] << np.uint8(i * bits)
            planes.append(made.reshape(*made.shape[:4], _LANES * bits))
            shift += bits
        packed = np.concatenate(planes, -1).reshape(*lead, blocks, self._codes)
        scale = _by_field(scales.transpose(0, 1, 3, 2, 4), self.format.scale_fields)
        body = np.concatenate([packed, scale], -1).reshape(*lead, -1)
        return np.concatenate([_by_field(head, self.format.head_fields), body], -1)

    def _parts(self, units: np.ndarray) -> Parts:
        """Return the parts [panels, units, 32, ...] of uint8 [panels, units, bytes]."""
        f, lead = self.format, units.shape[:2]
        head = _by_column(units[..., : self._head], f.head_fields)
        body = units[..., self._head :].reshape(*lead, f.blocks_per_unit, self._block)
        scales = _by_column(body[..., self._codes :], f.scale_fields).transpose(0, 1, 3, 2, 4)
        groups = body[..., : self._codes].reshape(*lead, f.blocks_per_unit, f.block // _GROUP, _LANES * f.bits)
        fields, at, shift = np.zeros((*groups.shape[:-1], _LANES, 8), np.uint8), 0, 0
        for bits in self._planes:
            plane = groups[..., at : at + _LANES * bits].reshape(*groups.shape[:-1], _LANES, bits, 1)
            part = plane >> (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)) & np.uint8((1 << bits) - 1)
            fields |= part.reshape(fields.shape) << np.uint8(shift)
            at, shift = at + _LANES * bits, shift + bits
        grouped = fields.reshape(*fields.shape[:-1], 2, 2, _HALVES)  # [..., block, group, column, p, u, half]
        codes = grouped.transpose(0, 1, 7, 4, 2, 3, 6, 5)
        return Parts(np.ascontiguousarray(codes).reshape(*lead, PANEL, f.blocks_per_unit, f.block), head, scales)


def _by_field(rows: np.ndarray, fields: tuple[int, ...]) -> np.ndarray:
    """Return [..., columns, bytes] as [..., bytes of all columns]: field by field, column by column."""
    parts, at = [np.empty((*rows.shape[:-2], 0), np.uint8)], 0
    for size in fields:
        parts.append(rows[..., at : at + size].reshape(*rows.shape[:-2], -1))
        at += size
    return np.concatenate(parts, -1)


def _by_column(packed: np.ndarray, fields: tuple[int, ...]) -> np.ndarray:
    """Return [..., columns, bytes] of the result of :func:`_by_field`."""
    parts, at = [np.empty((*packed.shape[:-1], PANEL, 0), np.uint8)], 0
    for size in fields:
        parts.append(packed[..., at : at + PANEL * size].reshape(*packed.shape[:-1], PANEL, size))
        at += PANEL * size
    return np.concatenate(parts, -1)


# -- blocks of 32 with a float16 scale --------------------------------------------------------------------------------
def half(raw: np.ndarray) -> np.ndarray:
    """Return float16 numbers in float32, [...], of their bytes [..., 2]."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def half_bytes(x: np.ndarray) -> np.ndarray:
    """Return the bytes [..., 2] of numbers rounded to float16."""
    return np.ascontiguousarray(x.astype(np.float16)[..., None]).view(np.uint8)


def divided(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return x / step, 0 where the step is 0."""
    return np.divide(x, step, out=np.zeros_like(x), where=np.broadcast_to(step != 0, x.shape))


def rounded(x: np.ndarray, top: int) -> np.ndarray:
    """Return the nearest codes from 0 to ``top``."""
    return np.clip(np.rint(x), 0, top).astype(np.uint8)


class SmallBlocks(CodeBlocks):
    """Blocks of 32: a float16 scale, perhaps a float16 minimum, for codes of 5 bits 4 bytes of their top bits, and 16
    bytes of their low bits: those of element i, and in the high half of the byte those of element i + 16."""

    block = 32

    def split(self, units: np.ndarray) -> Parts:
        lead, front = units.shape[:-1], sum(self.scale_fields)
        low = units[..., -16:]
        codes = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], -1)
        if self.bits == 5:
            codes |= np.unpackbits(units[..., front : front + 4], axis=-1, bitorder="little") << np.uint8(4)
        scales = units[..., :front].reshape(*lead, 1, front)
        return Parts(codes.reshape(*lead, 1, 32), np.empty((*lead, 0), np.uint8), scales)

    def join(self, parts: Parts) -> np.ndarray:
        codes = parts.codes[..., 0, :]
        fields = [parts.scales[..., 0, :]]
        if self.bits == 5:
            fields.append(np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little"))
        low = codes & np.uint8(15)
        fields.append(low[..., :16] | low[..., 16:] << np.uint8(4))
        return np.concatenate(fields, -1)


class Scaled(SmallBlocks):
    """An element is (code - 2^(bits - 1)) * scale. Quantising puts the element of largest magnitude on code 0."""

    scale_fields = (2,)
    floor = 2**-20  # of subnormal scales

    def __init__(self) -> None:
        super().__init__()
        self.middle = 1 << self.bits - 1
        self.error = 1 / self.middle * (1 + 2**-6)  # that of an element with the largest magnitude and the other sign

    def elements(self, parts: Parts) -> np.ndarray:
        return (parts.codes.astype(np.float32) - np.float32(self.middle)) * half(parts.scales)[..., None]

    def quantize(self, w: np.ndarray) -> Parts:
        largest = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)
        scales = half_bytes(largest[..., 0] / np.float32(-self.middle))
        codes = rounded(divided(w, half(scales)[..., None]) + np.float32(self.middle), 2 * self.middle - 1)
        return Parts(codes, np.empty((*w.shape[:-2], 0), np.uint8), scales)


class ScaledFrom(SmallBlocks):
    """An element is code * scale + minimum."""

    scale_fields = (2, 2)
    floor = 2**-19

    def __init__(self) -> None:
        super().__init__()
        self.top = (1 << self.bits) - 1
        self.error = 1 / self.top + 2**-9  # half a step, and the rounding of scale and minimum

    def elements(self, parts: Parts) -> np.ndarray:
        scale, minimum = half(parts.scales[..., :2]), half(parts.scales[..., 2:])
        return parts.codes.astype(np.float32) * scale[..., None] + minimum[..., None]

    def quantize(self, w: np.ndarray) -> Parts:
        low, high = w.min(-1), w.max(-1)
        scales = np.concatenate([half_bytes((high - low) / np.float32(self.top)), half_bytes(low)], -1)
        scale, minimum = half(scales[..., :2])[..., None], half(scales[..., 2:])[..., None]
        return Parts(rounded(divided(w - minimum, scale), self.top), np.empty((*w.shape[:-2], 0), np.uint8), scales)
