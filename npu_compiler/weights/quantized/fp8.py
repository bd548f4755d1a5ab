"""'fp8' of transformers, as DeepSeek-V3 and Qwen3 are published: numbers in float8_e4m3fn beside their scales.

A module has ``weight`` and either ``weight_scale_inv`` for blocks of ``weight_block_size``, or ``weight_scale`` for the
whole matrix or its rows. Both are factors, despite the name of the first. Activations keep their precision here, so
their scales (``input_scale``) are not needed.
"""

from __future__ import annotations

from ...support.records import Field
from . import scaled
from .matrix import Matrix
from .settings import one_of
from .tensors import Tensors

_SCALES = ("weight_scale_inv", "weight_scale")


def read(tensors: Tensors, config: dict[str, Field]) -> dict[str, Matrix]:
    """Return the quantised matrices by module."""
    one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    field, blocks = config.get("weight_block_size"), []
    if field is not None and field.value is not None:
        rows, columns = (f.integer(1, 2**31 - 1) for f in field.row(2))
        blocks = [(rows, columns)]
    leaves = {module: leaf for leaf in _SCALES for module in tensors.modules(leaf)}
    return {module: scaled.matrix(tensors, module, leaf, blocks) for module, leaf in leaves.items()}
