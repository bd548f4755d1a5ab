"""Attention kernels in numpy: whole, in parts that share the keys, and the combination of parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph import interp
from ..graph.graph import Graph
from ..support import dtypes
from .anchors import Attention

Array = np.ndarray[Any, Any]


def attention(k: Attention, inputs: list[Array]) -> Array:
    """Return the values [B, H, SQ, D] of an unsplit kernel, whose rows of q, k and v must be dense."""
    for op in k.inputs[:3]:
        if op.shape[-1] != 1 and op.strides[-1] != 1:
            raise ValueError(f"kernel {k.name}: rows of q, k and v are not dense")
    return attend(inputs[:3], _mask(k, inputs), k.scale, k.causal)


def decoded(k: Attention, inputs: list[Array]) -> list[Array]:
    """Return the inputs with keys and values in the dtype of the queries, instead of 8-bit numbers and their scales."""
    if not k.scaled:
        return inputs
    q, keys, values, *rest, key_scales, value_scales = inputs
    wide = [x.astype(np.float32) * scales for x, scales in ((keys, key_scales), (values, value_scales))]
    return [q, *(x.astype(q.dtype) for x in wide), *rest]


def _mask(k: Attention, inputs: list[Array]) -> Array | None:
    if k.by_position:
        return up_to(inputs[3], inputs[1].shape[2])
    return inputs[3] if len(inputs) > 3 else None


def up_to(positions: Array, keys: int) -> Array:
    """Return the mask bool [1, 1, SQ, SK] of keys up to each query's position."""
    return (np.arange(keys) <= positions[:, None])[None, None]


def attend(qkv: list[Array], mask: Array | None, scale: float, causal: bool) -> Array:
    """Return the attention of q, k and v as the op of the graph computes it."""
    graph = Graph("attention")
    arrays = [*qkv, *([mask] if mask is not None else [])]
    q, keys, values, *rest = (graph.input(str(i), a.shape, dtypes.name_of(a.dtype)) for i, a in enumerate(arrays))
    y = graph.attention(q, keys, values, rest[0] if rest else None, scale, causal)
    return interp.evaluate_node(y.node, arrays)[0]


def attention_parts(k: Attention, inputs: list[Array]) -> Array:
    """Return float32 [splits, B, H, SQ, D + 2]: values, maximum and sum of exponentials over a share of the keys."""
    q, keys, values = (x.astype(np.float32) for x in inputs[:3])
    share = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, share, axis=1), np.repeat(values, share, axis=1)
    scores = q @ keys.swapaxes(-1, -2) * np.float32(k.scale)
    if k.causal:
        scores = np.where(np.tri(scores.shape[-2], scores.shape[-1], dtype=np.bool_), scores, -np.inf)
    mask = _mask(k, inputs)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask.astype(np.float32)
    parts = []
    for some in np.array_split(np.arange(keys.shape[2]), k.splits):
        s = scores[..., some]
        top = s.max(-1, keepdims=True, initial=-np.inf)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        parts.append(np.concatenate([e @ values[:, :, some], top, e.sum(-1, keepdims=True)], -1))
    return np.stack(parts).astype(np.float32)


def combine(parts: Array) -> Array:
    """Return the attention whose parts, as of ``attention_parts``, are given; 0 where no key is visible."""
    values, top, total = parts[..., :-2], parts[..., -2:-1], parts[..., -1:]
    most = top.max(0)
    weight = np.exp(top - np.where(np.isfinite(most), most, 0))
    whole = (weight * total).sum(0)
    return np.where(whole > 0, (weight * values).sum(0) / np.where(whole == 0, 1, whole), 0)
