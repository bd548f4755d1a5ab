"""Block formats of one byte an element: an element is a number of 8 bits times the scale of its block.

A block is its *fields* (the scale, perhaps a zero point), then a byte for each element; a row is a sequence of blocks,
or a single one.

The layout of panels has, for 32 columns, the bytes of all columns for every element of the reduced dim, then for every
block its fields, each with the bytes of all columns. The readers are ``targets/cpu/kernels/bytes.h`` and the files
named after the formats.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ..support.dtypes import FLOAT8
from ..support.errors import IncompressibleError
from .block_rows import BlockRows, Parts
from .blocks import by_column, by_field, divided, half_of, times_power
from .format import PANEL, BlockFormat, Layout, Order, Read, Real, Shape

_CHUNK = 2**24  # elements that are packed at a time
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_TOP = np.float32(448)


class ByteFormat(BlockFormat):
    """A format of one byte an element.

    ``fields``: the bytes of the fields of a block. ``scale_dtype``: the type of the first field, the scale.
    """

    dtypes = ("float32", "float16", "bfloat16")
    fields: tuple[int, ...] = (4,)
    scale_dtype: ClassVar[type[np.floating[Any]]] = np.float32
    flip: ClassVar[np.uint8] = np.uint8(0)

    def __init__(self, name: str, block: int):
        self.name, self.block = name, block
        self.layouts = (BytePanels(self), BlockRows(self))

    bits: ClassVar[int] = 8
    head_fields: ClassVar[tuple[int, ...]] = ()
    is_arithmetic: ClassVar[bool] = True
    code_kind: ClassVar[str] = ""  # see quantized.matrix
    has_zeros: ClassVar[bool] = False  # whether a block has a zero point

    @property
    def sub_block(self) -> int:
        """The elements that share a scale, 0 for a whole row."""
        return self.block

    @property
    def scale_fields(self) -> tuple[int, ...]:
        """The fields, as those of a sub-block's scales."""
        return self.fields

    @property
    def front(self) -> int:
        """The bytes of the fields of a block."""
        return sum(self.fields)

    def row_bytes(self, k: int) -> int | None:
        block = self.block or k
        return None if k % block or k % 2 else k // block * (self.front + block)

    @abstractmethod
    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """Return the numbers float32 [...] of bytes [...]."""

    @abstractmethod
    def number(self, code: Any, real: Real) -> Any:
        """Return the number of a byte, see ``Layout.element``."""

    @abstractmethod
    def quantize(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes [N, blocks, block] and the fields [N, blocks, front] of finite elements float32
        [N, blocks, block]."""

    def split(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes [..., blocks, block] and fields [..., blocks, front] of rows uint8 [..., row_bytes]."""
        blocks = rows.reshape(*rows.shape[:-1], -1, self.block + self.front if self.block else rows.shape[-1])
        return blocks[..., self.front :], blocks[..., : self.front]

    def join(self, codes: np.ndarray, fields: np.ndarray) -> np.ndarray:
        """Return rows: the inverse of :meth:`split`."""
        rows = np.concatenate([fields, codes], -1)
        return rows.reshape(*rows.shape[:-2], -1)

    def columns(self, c: int) -> int:
        """Return the elements of a row of ``c`` bytes."""
        return c // (self.block + self.front) * self.block if self.block else c - self.front

    def parts_of(self, rows: np.ndarray) -> Parts:
        """Return the parts [..., blocks, ...] of rows uint8 [..., bytes of a row], each block a sub-block."""
        codes, fields = self.split(rows)
        self.check(codes)
        return Parts(codes[..., None, :], np.empty((*codes.shape[:-1], 0), np.uint8), fields[..., None, :])

    def rows_of(self, parts: Parts) -> np.ndarray:
        """Return the rows of their parts: the inverse of :meth:`parts_of`."""
        return self.join(parts.codes[..., 0, :], parts.scales[..., 0, :])

    def holds_scales(self, scales: np.ndarray) -> bool:
        """Return True if the format has all these scales, float32, exactly."""
        return np.array_equal(self.scales(self.scale_bytes(scales)), scales)

    def assemble(self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
        """Return the blocks, uint8 [N, bytes of a row], of scales float32 [N, blocks] and of codes [N, K] and zero
        points [N, blocks] (None: the format has none), whose sign bits are flipped if the numbers are integers."""
        fields = [self.scale_bytes(scales), *([] if zeros is None else [zeros[..., None] ^ self.flip])]
        return self.join(codes.reshape(*scales.shape, -1) ^ self.flip, np.concatenate(fields, -1))

    def check(self, codes: np.ndarray) -> None:
        """Raise ``IncompressibleError`` for bytes that are not numbers. By default, all are."""
        return None

    def scales(self, fields: np.ndarray) -> np.ndarray:
        """Return the scales float32 [...] of fields [..., front]."""
        raw = np.ascontiguousarray(fields[..., : self.fields[0]])
        return raw.view(self.scale_dtype)[..., 0].astype(np.float32)

    def scale_bytes(self, scales: np.ndarray) -> np.ndarray:
        """Return scales [...] as fields [..., bytes]."""
        return np.ascontiguousarray(scales.astype(self.scale_dtype)[..., None]).view(np.uint8)

    def encode(self, w: np.ndarray) -> np.ndarray:
        wide = w.astype(np.float32).reshape(len(w), -1, self.block or w.shape[1])
        if not np.isfinite(wide).all():
            raise IncompressibleError("a block holds NaN or an infinity")
        with np.errstate(over="ignore"):
            codes, fields = self.quantize(wide)
        if not np.isfinite(self.scales(fields)).all():
            raise IncompressibleError(f"a block holds a number that needs a scale beyond {self.scale_dtype.__name__}")
        return self.join(codes, fields)

    def decode(self, blocks: np.ndarray, k: int) -> np.ndarray:
        codes, fields = self.split(blocks)
        with np.errstate(all="ignore"):
            return self.elements(codes, fields).reshape(len(blocks), k)

    def elements(self, codes: np.ndarray, fields: np.ndarray) -> np.ndarray:
        """Return the elements float32 [..., blocks, block] of bytes and fields."""
        return self.numbers(codes) * self.scales(fields)[..., None]

    def element(self, code: Any, head: Read, field: Read, real: Real) -> Any:
        """Return an element's value from its byte and those of its block's fields, see ``Layout.element``. There is no
        head."""
        return self.number(code, real) * self.scale_of(field, real)

    def scale_of(self, field: Read, real: Real) -> Any:
        """Return the scale from the bytes of its field, see ``Layout.element``."""
        return float_of([field(i) for i in range(4)], real)


class BytePanels(Layout):
    """The layout of panels of a format of bytes; see the module."""

    order = Order.PANELS
    panel = PANEL

    def __init__(self, format: ByteFormat):
        self.format, self.name = format, f"{format.name}.panels"

    def packed_shape(self, n: int, c: int) -> Shape | None:
        return -(-n // PANEL), -(-PANEL * c // self.alignment) * self.alignment

    def pack(self, stored: np.ndarray) -> np.ndarray:
        n, c = stored.shape
        shape = self.packed_shape(n, c)
        assert shape is not None
        out = np.zeros(shape, np.uint8)
        step = max(1, _CHUNK // (PANEL * c))
        for begin in range(0, shape[0], step):
            rows = stored[begin * PANEL : (begin + step) * PANEL]
            count = -(-len(rows) // PANEL)
            if len(rows) % PANEL:
                rows = np.concatenate([rows, np.zeros((count * PANEL - len(rows), c), np.uint8)])
            codes, fields = self.format.split(rows.reshape(count, PANEL, c))
            self.format.check(codes)
            numbers = codes.reshape(count, PANEL, -1).transpose(0, 2, 1).reshape(count, -1)
            out[begin : begin + count, : numbers.shape[1]] = numbers
            behind = by_field(fields.transpose(0, 2, 1, 3), self.format.fields).reshape(count, -1)
            out[begin : begin + count, numbers.shape[1] : PANEL * c] = behind
        return out

    def unpack(self, packed: np.ndarray, n: int, c: int) -> np.ndarray:
        k, f = self.format.columns(c), self.format
        count = k // (f.block or k)
        codes = packed[:, : PANEL * k].reshape(-1, count, k // count, PANEL).transpose(0, 3, 1, 2)
        fields = packed[:, PANEL * k : PANEL * c].reshape(-1, count, PANEL * f.front)
        return f.join(codes, by_column(fields, f.fields).transpose(0, 2, 1, 3)).reshape(-1, c)[:n]

    def looks_up(self, n: int, k: int) -> bool:
        return n % PANEL == 0 and self.packed_shape(n, c := self.format.row_bytes(k) or 0) == (n // PANEL, PANEL * c)

    def element(self, read: Read, real: Real, row: Any, column: Any, nbytes: int) -> Any:
        f, lane = self.format, row & PANEL - 1
        begin: Any = PANEL * self.format.columns(nbytes // PANEL)
        if f.block:
            begin = begin + (column >> f.block.bit_length() - 1) * (PANEL * f.front)
        places = [(PANEL * sum(f.fields[:n]) + i, size) for n, size in enumerate(f.fields) for i in range(size)]
        field = [read(begin + at + lane * size) for at, size in places]
        byte = field.__getitem__
        return f.element(read(column * PANEL + lane), byte, byte, real)


def float_of(raw: list[Any], real: Real) -> Any:
    """Return the value of a float32 number from its four bytes, by exact arithmetic only (see ``Layout.element``)."""
    fraction = raw[0] + (raw[1] << 8) + ((raw[2] & 127) << 16)
    exponent = ((raw[3] & 127) << 1) + (raw[2] >> 7)
    normal, special = exponent + 255 >> 8, exponent + 1 >> 8  # 0 or 1: not subnormal; infinite or NaN
    value = times_power(real(fraction + (normal << 23)) * 2.0**-23 * 2.0**-126, exponent - normal, 8, real)
    nan = special & (fraction + (1 << 23) - 1 >> 23)
    return value * real(1 - (raw[3] >> 7) * 2) * real(1 - nan) / real(1 - special)


class Int8(ByteFormat):
    """Signed integers: an element is q * scale."""

    code_kind = "int8"
    flip = np.uint8(128)
    top = 127
    error = 0.5 / top * (1 + 2**-10)
    floor = 2**-148  # of subnormal scales

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(codes).view(np.int8).astype(np.float32)

    def number(self, code: Any, real: Real) -> Any:
        return real((code ^ 128) - 128)

    def rounded_scales(self, exact: np.ndarray) -> np.ndarray:
        """Return scales [...] in the format's type."""
        return exact

    def quantize(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fields = self.scale_bytes(self.rounded_scales(np.abs(w).max(-1) / np.float32(self.top)))
        q = np.clip(np.rint(divided(w, self.scales(fields)[..., None])), -self.top, self.top)
        return q.astype(np.int8).view(np.uint8), fields


class Int8Zero(Int8):
    """An element is (q - zero) * scale, with a signed byte ``zero`` for each block."""

    has_zeros = True
    fields = (4, 1)
    error = 1 / 255 * (1 + 2**-10)  # half a step

    def elements(self, codes: np.ndarray, fields: np.ndarray) -> np.ndarray:
        return (self.numbers(codes) - self.numbers(fields[..., 4:])) * self.scales(fields)[..., None]

    def element(self, code: Any, head: Read, field: Read, real: Real) -> Any:
        return (self.number(code, real) - self.number(field(4), real)) * self.scale_of(field, real)

    def quantize(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        raw = self.scale_bytes((high - low) / np.float32(255))
        scale = self.scales(raw)[..., None]
        zero = np.clip(np.rint(divided(-low[..., None], scale)), 0, 255) - np.float32(128)
        q = np.clip(np.rint(divided(w, scale) + zero), -128, 127)
        return q.astype(np.int8).view(np.uint8), np.concatenate([raw, zero.astype(np.int8).view(np.uint8)], -1)


def e4m3_numbers(codes: np.ndarray) -> np.ndarray:
    """Return the numbers float32 [...] whose float8_e4m3fn bytes are uint8 [...]."""
    return np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)[codes]


class FP8(ByteFormat):
    """8-bit floating point numbers, e4m3 without infinities (``float8_e4m3fn``), times a scale.

    ``rows``: the rows whose blocks share a scale; each of them stores it. ``error`` then refers to the largest
    magnitude of all these rows.
    """

    code_kind = "fp8"
    activations = "fp8"
    error = 1 / 17 * (1 + 2**-10)  # relative to the element itself, if it is not subnormal
    floor = 2**-130

    def __init__(self, name: str, block: int, rows: int = 1):
        self.rows = rows
        self.code_dtype = None if block else FLOAT8
        super().__init__(name, block)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return e4m3_numbers(codes)

    def number(self, code: Any, real: Real) -> Any:
        exponent = code >> 3 & 15
        normal = exponent + 15 >> 4
        fraction = real((code & 7) + (normal << 3)) * 2.0**-9
        return times_power(fraction, exponent - normal, 4, real) * real(1 - (code >> 7) * 2)

    def quantize(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        largest = np.abs(w).max(-1)
        shared = np.maximum.reduceat(largest, np.arange(0, len(w), self.rows), 0)
        fields = self.scale_bytes(np.repeat(shared, self.rows, 0)[: len(w)] / _FP8_TOP)
        q = np.clip(divided(w, self.scales(fields)[..., None]), -_FP8_TOP, _FP8_TOP)
        return q.astype(_FP8).view(np.uint8), fields

    def check(self, codes: np.ndarray) -> None:
        if ((codes & np.uint8(127)) == 127).any():
            raise IncompressibleError("a block holds NaN")


class Half8(Int8):
    """:class:`Int8` with float16 scales, which are rounded up so that no q overflows."""

    code_kind = ""  # a checkpoint's scales are float32
    fields = (2,)
    scale_dtype = np.float16
    floor = 2**-25  # half a step of the smallest scale

    def rounded_scales(self, exact: np.ndarray) -> np.ndarray:
        scale = exact.astype(np.float16)
        return np.where(scale < exact, np.nextafter(scale, np.float16(np.inf)), scale)

    def scale_of(self, field: Read, real: Real) -> Any:
        return half_of(field(0), field(1), real)
