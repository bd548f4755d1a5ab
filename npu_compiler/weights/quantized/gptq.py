"""GPTQ (https://arxiv.org/abs/2210.17323) in the layouts of AutoGPTQ ('gptq') and GPTQModel ('gptq', 'gptq_v2').

A module has ``qweight`` int32 [K * bits / 32, N], whose words hold numbers of consecutive rows, lowest bits first,
``qzeros`` int32 [groups, N * bits / 32], ``scales`` [groups, N] and perhaps ``g_idx`` int32 [K], the group of each
row. 'gptq' stores zero points less 1.
"""

from __future__ import annotations

import numpy as np

from ...support.records import Field
from .matrix import Matrix, unpacked
from .settings import group_size, one_of
from .tensors import FLOATS, Tensors

_FORMATS = ("gptq", "gptq_v2")


def read(tensors: Tensors, config: dict[str, Field]) -> dict[str, Matrix]:
    """Return the quantised matrices by module."""
    bits = one_of(config, "bits", (4, 8))
    one_of(config, "pack_dtype", ("int32",), "int32")
    one_of(config, "is_marlin_format", (False,), False)
    key = "checkpoint_format" if "checkpoint_format" in config else "format"
    shift = 1 if one_of(config, key, _FORMATS, "gptq") == "gptq" else 0
    size = group_size(config)
    return {module: _matrix(tensors, module, bits, size, shift) for module in tensors.modules("qweight")}


def _matrix(tensors: Tensors, module: str, bits: int, size: int, shift: int) -> Matrix:
    per_word = 32 // bits
    words, n = tensors.shape(module, "qweight", ("I32",), 2)
    k = words * per_word
    groups, _ = tensors.shape(module, "scales", FLOATS, 2)
    tensors.expect(module, "scales", (groups, n), FLOATS)
    if n % per_word:
        raise tensors.error(module, "qweight", f"of a multiple of {per_word} columns")
    tensors.expect(module, "qzeros", (groups, n // per_word), ("I32",))
    group = tensors.group(module, "scales", k, groups, size)
    order = tensors.order(module, "g_idx", k, groups, group)

    def zeros() -> np.ndarray:
        stored = unpacked(tensors.raw(module, "qzeros"), bits)
        return (stored + np.uint8(shift) & np.uint8((1 << bits) - 1)).T

    return Matrix(
        (n, k),
        f"int{bits}",
        group,
        codes=lambda: unpacked(tensors.raw(module, "qweight").T, bits),
        scales=lambda: tensors.scales(module, "scales").T,
        zeros=zeros,
        order=None if order is None else lambda: order,
    )
