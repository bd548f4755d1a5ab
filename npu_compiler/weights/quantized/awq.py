"""AWQ (https://arxiv.org/abs/2306.00978) in the layout 'gemm' of AutoAWQ.

A module has ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [groups, N / 8] and ``scales`` [groups, N]. A word holds 8
numbers of 4 bits, lowest bits first: those of columns 0, 2, 4, 6, 1, 3, 5, 7 of its 8.
"""

from __future__ import annotations

import numpy as np

from ...support.records import Field
from .matrix import Matrix
from .settings import group_size, one_of
from .tensors import FLOATS, Tensors

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns in a word
_PER_WORD = 8


def read(tensors: Tensors, config: dict[str, Field]) -> dict[str, Matrix]:
    """Return the quantised matrices by module."""
    one_of(config, "bits", (4,), 4)
    one_of(config, "zero_point", (True,), True)
    one_of(config, "version", ("gemm",), "gemm")
    size = group_size(config)
    return {module: _matrix(tensors, module, size) for module in tensors.modules("qweight")}


def _matrix(tensors: Tensors, module: str, size: int) -> Matrix:
    k, words = tensors.shape(module, "qweight", ("I32",), 2)
    groups, n = tensors.shape(module, "scales", FLOATS, 2)
    if n != words * _PER_WORD:
        raise tensors.error(module, "qweight", f"[{k}, {n} / {_PER_WORD}]")
    tensors.expect(module, "qzeros", (groups, words), ("I32",))

    def columns(leaf: str) -> np.ndarray:
        """Return the codes [N, rows] of words [rows, N / 8]."""
        packed = np.ascontiguousarray(tensors.raw(module, leaf).T)
        codes = np.empty((words, _PER_WORD, packed.shape[1]), np.uint8)
        for column, place in enumerate(_PLACES):
            codes[:, column] = packed >> 4 * place & 15
        return codes.reshape(n, -1)

    return Matrix(
        (n, k),
        "int4",
        tensors.group(module, "scales", k, groups, size),
        codes=lambda: columns("qweight"),
        scales=lambda: tensors.scales(module, "scales").T,
        zeros=lambda: columns("qzeros"),
    )
