"""Decompositions that PyTorch lacks: of ops in mixture-of-experts layers, and where images go into a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MAX_GATHERED", "OWN_DECOMPOSITIONS"]

# Limit of weight elements that a grouped product gathers row by row. PyTorch reads a group's weights once for all of
# its rows, but leaving the native partition takes time: as measured, both are equally fast at about 2 million elements.
MAX_GATHERED = 1 << 21
_MAX_COMPARISONS = 1 << 20


def grouped_mm(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Multiply each row of ``input`` [S, K] by the matrix of its group in ``weight`` [G, K, N]. Returns [S, N]. Group g
    ends before row ``offs[g]``; rows after the last group are zero."""
    if offs is None or input.dim() != 2 or weight.dim() != 3 or bias is not None or out_dtype is not None:
        return NotImplemented
    rows, groups = input.shape[0], weight.shape[0]
    if rows * weight[0].numel() > MAX_GATHERED:
        return NotImplemented
    group = (offs[None, :] <= torch.arange(rows)[:, None]).sum(1)
    chosen = weight.index_select(0, group.clamp(max=groups - 1))
    # Experts are stored transposed: two transpositions cancel, and rows are contiguous when they are gathered.
    product = torch.bmm(chosen.transpose(1, 2), input[:, :, None])[:, :, 0]
    return torch.where((group < groups)[:, None], product, 0.0)


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Count the elements in each of ``bins`` equal intervals, float32[bins]; the last interval includes ``max``."""
    if min >= max or self.dtype != torch.float32 or self.numel() * bins > _MAX_COMPARISONS:
        return NotImplemented
    x = self.flatten()
    place = ((x - min) * bins / (max - min)).to(torch.int64).clamp(max=bins - 1)
    inside = (x >= min) & (x <= max)
    return ((place[:, None] == torch.arange(bins)) & inside[:, None]).sum(0).to(self.dtype)


def masked_scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Replace the elements of ``self`` where ``mask`` is true, in order, by those of ``source``. Trailing dims in which
    all elements of the mask are one are moved as rows."""
    shape = torch.broadcast_shapes(self.shape, mask.shape)  # type: ignore[no-untyped-call]
    if self.dtype != source.dtype or 0 in shape or source.numel() == 0:
        return NotImplemented
    mask = mask.expand(shape)
    same = 0
    while same < len(shape) and (mask.stride()[-1 - same] == 0 or shape[-1 - same] == 1):
        same += 1
    row = math.prod(shape[len(shape) - same :])
    if source.numel() % row:
        same, row = 0, 1
    for _ in range(same):
        mask = mask.select(-1, 0)
    flags = mask.flatten()
    place = torch.where(flags, flags.to(torch.int64).cumsum(0) - 1, 0)
    values = source.reshape(-1, row).index_select(0, place)
    return torch.where(flags[:, None], values, self.expand(shape).reshape(-1, row)).reshape(shape)


OWN_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": grouped_mm,
    "aten.histc.default": histc,
    "aten.masked_scatter.default": masked_scatter,
    "transformers.grouped_mm_fallback.default": grouped_mm,
}
"""By op. A function returns ``NotImplemented`` for arguments for which the op should not be decomposed."""
