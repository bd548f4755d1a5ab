"""Decompositions that PyTorch lacks: of ops in mixture-of-experts layers and recommenders, of bilinear layers and
distances, and where images go into a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .gradient_decompositions import GRADIENT_DECOMPOSITIONS

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


def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input1`` [..., I] times each matrix of ``weight`` [O, I, J] times ``input2`` [..., J]. Returns [..., O]."""
    outputs, rows, columns = weight.shape
    left = input1 @ weight.transpose(0, 1).reshape(rows, outputs * columns)
    left = left.reshape(*input1.shape[:-1], outputs, columns)
    product = (left @ input2[..., None])[..., 0]
    return product if bias is None else product + bias


def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """The ``p``-norms of the differences of all rows of ``x1`` [..., P, M] and ``x2`` [..., R, M]. Returns [..., P, R].
    Differences lose less than the product of matrices by which PyTorch computes large ones."""
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if difference.numel() == 0 or difference.numel() > _MAX_COMPARISONS:
        return NotImplemented
    return torch.linalg.vector_norm(difference, p, -1)


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Reduce the rows ``indices`` [N] of ``weight`` [V, D] in bags, of which bag b starts at ``offsets[b]``: mode 0 is
    the sum, 1 the mean, 2 the maximum. Rows ``padding_idx`` do not count; empty bags are zero. Returns [B, D], and None
    for the three results that are for the gradient only."""
    bags = offsets.shape[0] - include_last_offset
    if weight.dtype != torch.float32 or bags == 0 or indices.shape[0] == 0:
        return NotImplemented  # PyTorch sums half precision in float32
    counts = (indices != (-1 if padding_idx is None else padding_idx))[:, None]
    bag = torch.bucketize(torch.arange(indices.shape[0]), offsets[:bags].to(torch.int64), right=True) - 1
    rows = weight.index_select(0, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    size = rows.new_zeros(bags, 1).index_add(0, bag, counts.to(rows.dtype))
    if mode == 2:
        start, place = rows.new_full((bags, rows.shape[1]), -math.inf), bag[:, None].expand_as(rows)
        best = start.scatter_reduce(0, place, torch.where(counts, rows, -math.inf), "amax")
        return torch.where(size > 0, best, 0.0), None, None, None
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, torch.where(counts, rows, 0.0))
    return (total / size.clamp(min=1) if mode == 1 else total), None, None, None


OWN_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": grouped_mm,
    "aten.bilinear.default": bilinear,
    "aten.cdist.default": cdist,
    "aten.embedding_bag.default": embedding_bag,
    "aten.embedding_bag.padding_idx": embedding_bag,
    "aten.histc.default": histc,
    "aten.masked_scatter.default": masked_scatter,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    **GRADIENT_DECOMPOSITIONS,
}
"""By op. A function returns ``NotImplemented`` for arguments for which the op should not be decomposed, and None among
several results for one that it does not compute: the op is not decomposed if that is used."""
