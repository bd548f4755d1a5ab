"""A matrix of quantised numbers as a checkpoint stores it, and the weight format whose blocks hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..bytes import ByteFormat, e4m3_numbers
from ..format import known_formats, weight_format
from ..groups import Int4

Array = Callable[[], np.ndarray]
_UNITS = (128, 64, 32)  # elements of the groups that weight formats have


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K]: an element is (code - zero) * scale.

    Attributes:
        shape: (N, K).
        kind: 'int4' or 'int8', whose codes are 0 to 15 and 0 to 255; 'fp8': codes are the bytes of e4m3 numbers.
        group: the columns that share a scale; the last group of a row may have fewer.
        codes: returns uint8 [N, K].
        scales: returns float32 [N, groups].
        zeros: returns uint8 [N, groups]; None: the middle code (there is none for 'fp8').
        order: returns the group of each column, int [K]; None: groups are runs of columns.
    """

    shape: tuple[int, int]
    kind: str
    group: int
    codes: Array
    scales: Array
    zeros: Array | None = None
    order: Array | None = None

    @property
    def middle(self) -> int:
        """The code of zero without a zero point."""
        return {"int4": 8, "int8": 128, "fp8": 0}[self.kind]

    @cached_property
    def format(self) -> Int4 | ByteFormat | None:
        """The weight format whose blocks hold exactly these numbers; None: none does."""
        k = self.shape[1]
        unit = next((n for n in _UNITS if self.group % n == 0 and k % n == 0), 0)
        whole_row = self.group >= k and self.kind != "int4"
        if self.order is not None or not (unit or whole_row):
            return None
        has_zeros = self.zeros is not None and bool((self.zeros() != self.middle).any())
        wanted = self.kind, 0 if whole_row else unit, has_zeros
        formats = (f for name in known_formats() if isinstance(f := weight_format(name), Int4 | ByteFormat))
        found = next((f for f in formats if (f.code_kind, f.block, f.has_zeros) == wanted), None)
        holds = found is not None and found.row_bytes(k) is not None and found.holds_scales(self.scales())
        return found if holds else None

    @cached_property
    def permutation(self) -> np.ndarray | None:
        """The order of the columns in which groups are runs, int64 [K]; None: they are, or no order makes them so."""
        if self.order is None:
            return None
        order = self.order()
        found = np.argsort(order, kind="stable").astype(np.int64)
        return found if np.array_equal(order[found], np.arange(self.shape[1]) // self.group) else None

    def permuted(self) -> Matrix:
        """Return the matrix with its columns in the order of :attr:`permutation`."""
        columns = self.permutation
        assert columns is not None
        return replace(self, codes=lambda: self.codes()[:, columns], order=None)

    def blocks(self) -> np.ndarray:
        """Return the matrix in the blocks of :attr:`format`, uint8 [N, bytes of a row]."""
        format, (_, k) = self.format, self.shape
        assert format is not None
        count = k // (format.block or k)

        def spread(x: np.ndarray) -> np.ndarray:
            """Return [N, groups] as [N, blocks]."""
            return np.repeat(x, -(-count // x.shape[1]), 1)[:, :count]

        zeros = self.zeros() if format.has_zeros and self.zeros is not None else None
        return format.assemble(self.codes(), spread(self.scales()), None if zeros is None else spread(zeros))

    def elements(self) -> np.ndarray:
        """Return the elements, float32 [N, K]."""
        k = self.shape[1]
        order = np.arange(k) // self.group if self.order is None else self.order()
        codes = self.codes()
        if self.kind == "fp8":
            numbers = e4m3_numbers(codes)
        else:
            numbers = codes.astype(np.float32)
            numbers -= self.zeros()[:, order] if self.zeros is not None else np.float32(self.middle)
        with np.errstate(all="ignore"):
            numbers *= self.scales()[:, order]
        return numbers


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of 4 or 8 bits, uint8 [..., n * 32 / bits], of int32 words [..., n], lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    pairs = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], -1)
    return pairs.reshape(*raw.shape[:-1], -1)
