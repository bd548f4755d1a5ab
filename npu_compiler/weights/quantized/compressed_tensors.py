"""compressed-tensors, the format of llm-compressor and vLLM: its layouts for integers and float8_e4m3fn.

'pack-quantized': ``weight_packed`` int32 [N, ceil(K * bits / 32)] holds numbers plus 2^(bits - 1), lowest bits first;
``weight_scale`` [N, groups], ``weight_shape`` [N, K], perhaps ``weight_zero_point``, which is packed along N in the
same way, and ``weight_g_idx`` [K], the group of each column. All other layouts are those of :mod:`scaled`. Activations
are quantised only if each row gets its own scale at run time, so scales of activations are not needed.
"""

from __future__ import annotations

import numpy as np

from ...support.errors import ConfigError
from ...support.records import Field
from . import scaled
from .matrix import Matrix, unpacked
from .settings import one_of
from .tensors import FLOATS, Tensors

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


def read(tensors: Tensors, config: dict[str, Field]) -> dict[str, Matrix]:
    """Return the quantised matrices by module."""
    one_of(config, "format", _FORMATS, "dense")
    groups = [f.mapping() for f in config["config_groups"].mapping().values()] if "config_groups" in config else []
    for group in groups:
        one_of(group, "format", _FORMATS, "dense")
    for key in ("sparsity_config", "transform_config"):
        setting = config.get(key)
        if setting is not None and setting.value and _format_of(setting) != "dense":
            raise ConfigError(f"{setting.path} is not supported: weights are neither sparse nor transformed here")
    blocks = [b for group in groups if (b := _block(group)) is not None]
    found = {module: _packed(tensors, module) for module in tensors.modules("weight_packed")}
    for module in tensors.modules("weight_scale"):
        if module not in found:
            found[module] = scaled.matrix(tensors, module, "weight_scale", blocks)
    return found


def activations(config: dict[str, Field]) -> str | None:
    """Return 'fp8' if the config says that all matrices multiply activations in float8_e4m3fn with a scale for each
    row, which is computed at run time; else None."""
    groups = [f.mapping() for f in config["config_groups"].mapping().values()] if "config_groups" in config else []
    said = [group["input_activations"].value if "input_activations" in group else None for group in groups]
    wanted = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    fits = [isinstance(x, dict) and all(x.get(key) == value for key, value in wanted.items()) for x in said]
    return "fp8" if fits and all(fits) else None


def _format_of(field: Field) -> object:
    return field.value.get("format") if isinstance(field.value, dict) else None


def _block(group: dict[str, Field]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in the matrices of a group of the config, if it has blocks."""
    weights = group.get("weights")
    said = weights.mapping().get("block_structure") if weights is not None and weights.value is not None else None
    if said is None or said.value is None:
        return None
    if isinstance(said.value, str):  # older files have '128x128'
        said = Field([int(n) if n.isdecimal() else n for n in said.value.split("x")], said.path, ConfigError)
    rows, columns = (f.integer(1, 2**31 - 1) for f in said.row(2))
    return rows, columns


def _packed(tensors: Tensors, module: str) -> Matrix:
    n, words = tensors.shape(module, "weight_packed", ("I32",), 2)
    tensors.expect(module, "weight_shape", (2,), ("I64", "I32"))
    rows, k = map(int, tensors.raw(module, "weight_shape"))
    bits = next((b for b in (4, 8) if k > 0 and words == -(-k * b // 32)), None)
    if rows != n or bits is None:
        raise tensors.error(module, "weight_packed", f"numbers of 4 or 8 bits of a matrix {[rows, k]}")
    groups = tensors.shape(module, "weight_scale", FLOATS, 2)[1]
    tensors.expect(module, "weight_scale", (n, groups), FLOATS)
    group = tensors.group(module, "weight_scale", k, groups, None)
    order = tensors.order(module, "weight_g_idx", k, groups, group)
    has_zeros = tensors.has(module, "weight_zero_point")
    if has_zeros:
        tensors.expect(module, "weight_zero_point", (-(-n * bits // 32), groups), ("I32",))

    def zeros() -> np.ndarray:
        return unpacked(tensors.raw(module, "weight_zero_point").T, bits)[:, :n].T

    return Matrix(
        (n, k),
        f"int{bits}",
        group,
        codes=lambda: unpacked(tensors.raw(module, "weight_packed"), bits)[:, :k],
        scales=lambda: tensors.scales(module, "weight_scale"),
        zeros=zeros if has_zeros else None,
        order=None if order is None else lambda: order,
    )
