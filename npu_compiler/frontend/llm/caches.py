"""KV caches of the decoder: buffers of a fixed length, which the graph writes in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...support.dtypes import KV_CACHES
from ...support.errors import ConfigError
from .config import LLMConfig

__all__ = ["Cache", "LayerCache", "ScaledCache", "make_cache"]


@dataclass(frozen=True)
class Rows:
    """Keys or values of one layer: ``held`` [1, heads, max_len, head_dim]."""

    held: Tensor

    def store(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Write ``rows`` [1, heads, N, head_dim] at ``positions`` [N]; returns all rows."""
        return self.held.index_copy_(2, positions, rows)


@dataclass(frozen=True)
class ScaledRows:
    """Rows of 8-bit numbers and the scale of each, ``scales`` float32[1, heads, max_len, 1]. The largest magnitude of a
    row becomes ``top``."""

    held: Tensor
    scales: Tensor
    top: int

    def store(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Write ``rows`` [1, heads, N, head_dim] at ``positions`` [N]; returns all rows, decoded."""
        wide = rows.float()
        largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * 128)
        codes = wide * (self.top / largest)
        codes = (codes if self.held.is_floating_point() else codes.round()).to(self.held.dtype)
        held = self.held.index_copy_(2, positions, codes)
        scales = self.scales.index_copy_(2, positions, largest / self.top)
        return (held.float() * scales).to(rows.dtype)


LayerCache = tuple[Rows | ScaledRows, Rows | ScaledRows]  # keys and values


class Cache(nn.Module):
    """Keys or values of all layers, [1, heads, max_len, head_dim] each, as buffers '0', '1' …"""

    def __init__(self, config: LLMConfig, max_len: int, dtype: torch.dtype):
        super().__init__()
        for i in range(config.num_layers):
            self.register_buffer(str(i), torch.zeros(1, config.num_kv_heads, max_len, config.head_dim, dtype=dtype))

    def layer(self, i: int) -> Rows:
        """Return the rows of layer ``i``."""
        return Rows(self.get_buffer(str(i)))


class ScaledCache(nn.Module):
    """A cache of 8-bit numbers, each row with a scale: buffers '0', '1' … and '0_scale' …, float32 [1, heads, max_len,
    1]. The largest magnitude of a row becomes the largest number of ``dtype``: 127 of int8, 448 of float8_e4m3fn."""

    def __init__(self, config: LLMConfig, max_len: int, dtype: torch.dtype):
        super().__init__()
        self.top = 448 if dtype.is_floating_point else 127
        for i in range(config.num_layers):
            shape = (1, config.num_kv_heads, max_len)
            self.register_buffer(str(i), torch.zeros(*shape, config.head_dim, dtype=dtype))
            self.register_buffer(f"{i}_scale", torch.zeros(*shape, 1, dtype=torch.float32))

    def layer(self, i: int) -> ScaledRows:
        """Return the rows of layer ``i``."""
        return ScaledRows(self.get_buffer(str(i)), self.get_buffer(f"{i}_scale"), self.top)


def make_cache(config: LLMConfig, max_len: int, dtype: torch.dtype, kind: str | None) -> Cache | ScaledCache:
    """Return a cache whose elements are of ``kind``, one of ``KV_CACHES``; None: of ``dtype``. Raises
    ``ConfigError`` for other kinds."""
    if kind is None:
        return Cache(config, max_len, dtype)
    if kind not in KV_CACHES:
        raise ConfigError(f"kv_cache = {kind!r}: known are {', '.join(KV_CACHES)}")
    return ScaledCache(config, max_len, getattr(torch, KV_CACHES[kind]))
