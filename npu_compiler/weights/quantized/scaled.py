"""Matrices of 8-bit numbers beside a tensor of scales: the layout of 'fp8' and of parts of compressed-tensors.

A module has ``weight`` [N, K] in float8_e4m3fn or int8. Its scales are one number, [N, 1], [N, groups], or
[ceil(N / rows), ceil(K / columns)] for blocks; the element is the number times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .matrix import Matrix
from .tensors import FLOATS, Tensors

_KINDS = {"F8_E4M3": "fp8", "I8": "int8"}


def matrix(tensors: Tensors, module: str, leaf: str, blocks: Sequence[tuple[int, int]]) -> Matrix:
    """Return the matrix of a module, whose scales are its tensor ``leaf``. ``blocks``: rows and columns that may share
    a scale, by the config."""
    n, k = tensors.shape(module, "weight", tuple(_KINDS), 2)
    kind = _KINDS[tensors.dtype(module, "weight")]
    shape = tensors.shape(module, leaf, FLOATS)
    rows, group = _block(tensors, module, leaf, (n, k), shape, blocks)

    def table(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.reshape(-1, -(-k // group)), rows, 0)[:n]

    has_zeros = tensors.has(module, "weight_zero_point") and kind == "int8"
    if has_zeros:
        tensors.expect(module, "weight_zero_point", shape, ("I8",))

    def zeros() -> np.ndarray:
        return table(tensors.raw(module, "weight_zero_point").view(np.uint8) ^ flip)

    flip = np.uint8(128 if kind == "int8" else 0)
    return Matrix(
        (n, k),
        kind,
        group,
        codes=lambda: tensors.raw(module, "weight").view(np.uint8) ^ flip,
        scales=lambda: table(tensors.scales(module, leaf)),
        zeros=zeros if has_zeros else None,
    )


def _block(
    tensors: Tensors,
    module: str,
    leaf: str,
    matrix: tuple[int, int],
    scales: tuple[int, ...],
    blocks: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """Return the rows and the columns that share a scale."""
    n, k = matrix
    for rows, columns in blocks:
        if scales == (-(-n // rows), -(-k // columns)):
            return rows, min(columns, k)
    if scales in ((), (1,), (1, 1)):
        return n, k
    if scales == (n,):
        return 1, k
    if len(scales) == 2 and scales[0] == n and scales[1] <= k:
        return 1, tensors.group(module, leaf, k, scales[1], None)
    allowed = ["one number", "a number for each row or group", *(f"for blocks of {r} × {c}" for r, c in blocks)]
    raise tensors.error(module, leaf, f"{', '.join(allowed)} of {[n, k]}")
