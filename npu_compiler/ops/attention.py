"""Every overload of scaled dot-product attention: one primitive over [batch, heads, length, dim]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..graph.expr import fn, index, where
from ..graph.graph import Value, broadcast_shapes
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .reductions import softmax_of_visible
from .registry import lowers
from .samples import S, t

log = fn("log")


@dataclass
class Attention:
    """A call whose operands have four dims: q [B, H, L, E], k [B, HK, S, E], v [B, HK, S, Ev], where HK divides H; the
    mask broadcasts to [B, H, L, S]. ``shape`` has the result's dims before L."""

    q: Value
    k: Value
    v: Value
    mask: Value | None
    scale: float
    causal: bool
    shape: tuple[int, ...]

    def output(self) -> Value:
        """The result [*shape, L, Ev] in the dtype of q."""
        out = self.q.graph.attention(self.q, self.k, self.v, self.mask, self.scale, self.causal)
        return out.reshape(*self.shape, *out.shape[2:])

    def scores(self) -> Value:
        """Scaled and masked scores in float32, [B, H, L, S]."""
        s = self.q.matmul(grouped(self.k, self.q.shape[1]).transpose(-1, -2)) * self.scale
        mask = self.mask
        if self.causal:
            mask = s.graph.elementwise((1, 1, *s.shape[2:]), [], index(3) <= index(2))
        if mask is None:
            return s
        if mask.dtype != "bool":
            return s + mask.cast(s.dtype)
        return s.graph.pointwise(lambda m, x: where(m, x, -math.inf), mask, s, promote=False)

    def weights(self) -> tuple[Value, Value, Value]:
        """The softmax of the scores [B, H, L, S], its denominators and the largest scores [B, H, L, 1], in float32."""
        scores = self.scores()
        top = scores.amax([3])
        return *softmax_of_visible(scores, top, (3,)), top

    def weighted(self, weights: Value) -> Value:
        """The result, computed from the weights. A pass replaces both by the primitive if nothing else reads them."""
        v = grouped(self.v, self.q.shape[1])
        out = weights.matmul(v.cast(weights.dtype)).cast(self.q.dtype)
        return out.reshape(*self.shape, *out.shape[2:])


def refuse(rule: str, detail: str, fix: str = "") -> Unsupported:
    """Return the error for a call that the primitive cannot express."""
    return Unsupported(Reason(rule, detail, fix))


def grouped(x: Value, heads: int) -> Value:
    """[..., HK, S, E] -> [..., heads, S, E]: each head is repeated for a group of neighbouring query heads."""
    *batch, have, length, dim = x.shape
    if have == heads:
        return x
    if not have or heads % have:
        raise refuse("shape", f"{heads} query heads cannot share {have} key/value heads")
    return x.reshape(*batch, have, 1, length, dim).expand(*batch, have, heads // have, length, dim).reshape(
        *batch, heads, length, dim
    )  # fmt: skip


def attention(
    query: Value, key: Value, value: Value, mask: Value | None, dropout_p: float, causal: bool, scale: float | None,
    gqa: bool = False,
) -> Attention:  # fmt: skip
    """Check a call and reshape its operands to four dims. Batch dims broadcast; heads do unless ``gqa`` groups them."""
    if dropout_p:
        raise refuse("attribute", f"attention with dropout_p={dropout_p}", "export the model in eval mode")
    if causal and mask is not None:
        raise refuse("attribute", "attention with both a mask and is_causal", "put the causal mask into attn_mask")
    rank = max(query.rank, key.rank, value.rank)
    if min(query.rank, key.rank, value.rank) < 2 or not dt.is_float(query.dtype):
        raise refuse("shape", "attention needs floating operands of two dims or more")
    q, k, v = (x.reshape(*(1,) * (max(rank, 3) - x.rank), *x.shape) for x in (query, key, value))
    batch = broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    if gqa:
        heads, shared = q.shape[-3], k.shape[-3]
        if v.shape[-3] != shared or not shared or heads % shared:
            k, v = grouped(k, heads), grouped(v, heads)
            shared = heads
    else:
        (heads,) = (shared,) = broadcast_shapes(*(x.shape[-3:-2] for x in (q, k, v)))
    q, k, v = (
        x.expand(*batch, h, *x.shape[-2:]).reshape(math.prod(batch), h, *x.shape[-2:])
        for x, h in ((q, heads), (k, shared), (v, shared))
    )
    if mask is not None:
        mask = flat_mask(mask, (*batch, heads, q.shape[2], k.shape[2]))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return Attention(q, k, v, mask, factor, causal, (*batch, heads) if rank > 2 else ())


def flat_mask(mask: Value, scores: tuple[int, ...]) -> Value:
    """Reshape a mask that broadcasts to ``scores`` [..., H, L, S] to [B or 1, H or 1, L or 1, S or 1]."""
    if mask.dtype != "bool" and not dt.is_float(mask.dtype):
        raise refuse("dtype", f"an attention mask of {mask.dtype}", "use bool or a floating dtype")
    if broadcast_shapes(mask.shape, scores) != scores:
        raise ValueError(f"an attention mask of shape {list(mask.shape)} for scores of shape {list(scores)}")
    mask = mask.reshape(*(1,) * (len(scores) - mask.rank), *mask.shape)
    *batch, h, length, size = mask.shape
    if math.prod(batch) != 1:
        mask = mask.expand(*scores[:-3], h, length, size)
    return mask.reshape(math.prod(mask.shape[:-3]), h, length, size)


_Q, _KV = t(2, 4, 5, 8), t(2, 4, 6, 8)
_MASKS = (
    t(2, 4, 5, 6), t(5, 6), t(2, 1, 1, 6, dtype="bool"), t(1, 1, 5, 6, layout="transposed"), t(4, 1, 6),
    t(5, 6, dtype="bool", values=[[0] * 6, [1] * 6, [0, 1] * 3, [1, 0] * 3, [0] * 5 + [1]]),
)  # fmt: skip


@lowers(
    "aten.scaled_dot_product_attention.default",
    samples=(
        S(_Q, _KV, _KV), S(_Q, _KV, t(2, 4, 6, 3)), S(t(5, 8), t(6, 8), t(6, 8)), S(t(4, 5, 8), t(4, 6, 8), t(4, 6, 8)),
        S(t(2, 1, 4, 5, 8), t(2, 3, 4, 6, 8), t(1, 3, 4, 6, 8)), S(t(2, 4, 5, 8, layout="transposed"), _Q, _Q),
        *(S(_Q, _KV, _KV, m) for m in _MASKS),
        S(_Q, _Q, _Q, None, 0.0, True), S(_Q, _KV, _KV, is_causal=True, scale=0.3),
        S(t(2, 4, 7, 8), _Q, _Q, None, 0.0, True),
        S(_Q, t(2, 2, 6, 8), t(2, 2, 6, 8), enable_gqa=True),
        S(_Q, t(1, 1, 6, 8), t(2, 1, 6, 8), t(5, 6), enable_gqa=True),
        S(t(1, 6, 5, 4), t(1, 3, 6, 4), t(1, 2, 6, 4), enable_gqa=True), S(_Q, t(2, 1, 6, 8), t(2, 1, 6, 8)),
        S(t(2, 2, 3, 4, 8), t(2, 2, 3, 6, 8), t(2, 2, 3, 6, 8), t(2, 1, 1, 4, 6)),
        S(t(1, 2, 40, 16), t(1, 2, 70, 16), t(1, 2, 70, 16), t(40, 70)), S(_Q, _KV, _KV, scale=1.5, dropout_p=0.0),
    ),
)  # fmt: skip
def scaled_dot_product_attention(
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """softmax(query key^T * scale + mask) value; a row whose mask allows nothing gives zeros."""
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).output()


@lowers(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    samples=(
        S(_Q, _KV, _KV), S(_Q, _KV, _KV, 0.0, True), S(_Q, _KV, _KV, attn_mask=t(5, 6)), S(_Q, _Q, _Q, scale=0.7),
        S(_Q, _KV, _KV, attn_mask=t(2, 1, 5, 6)),
    ),
)  # fmt: skip
def flash_attention_for_cpu(
    query: Value,
    key: Value,
    value: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value]:
    """Attention, and the log of the softmax denominators [B, H, L] in float32."""
    call = attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    weights, total, top = call.weights()
    denominators = top.graph.pointwise(lambda n, m: where(fn("eq")(m, -math.inf), 0.0, log(n) + m), total, top)
    return call.weighted(weights), denominators.reshape(*call.shape, query.shape[-2])


@lowers(
    "aten._scaled_dot_product_attention_math.default",
    samples=(
        S(_Q, _KV, _KV), S(_Q, _KV, _KV, _MASKS[-1]), S(_Q, _Q, _Q, None, 0.0, True),
        S(_Q, _KV, _KV, _MASKS[1], scale=2.0),
        S(_Q, t(2, 2, 6, 8), t(2, 2, 6, 8), enable_gqa=True),
    ),
)  # fmt: skip
def attention_math(
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Value | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Value, Value]:
    """Attention, and its weights [..., L, S]."""
    if dropout_mask is not None:
        raise refuse("attribute", "attention with a dropout mask", "export the model in eval mode")
    if attn_mask is not None:  # PyTorch adds a bool mask here as 0 and 1
        attn_mask = attn_mask.cast(dt.promote(attn_mask.dtype, query.dtype))
    call = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    weights, _, _ = call.weights()
    return call.weighted(weights), weights.reshape(*call.shape, *weights.shape[2:])
