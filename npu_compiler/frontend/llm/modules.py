"""The decoder in PyTorch: one definition for all families, for export.

Its KV caches are buffers of a fixed length that ``forward`` writes in place. A query at position p reads the keys of
positions up to p, or the latest of them, so the contents of later positions do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...support.errors import ConfigError
from ..tensors import numpy_to_tensor
from .blocks import BLOCKS
from .caches import LayerCache, make_cache
from .checkpoint import Checkpoint
from .config import LLMConfig
from .ordered_linear import use_column_orders
from .rope import Rope

__all__ = ["Decoder", "inverse_frequencies", "load_decoder"]

_RotaryTable = tuple[Tensor, Tensor]  # cos and sin


@dataclass(frozen=True)
class _Context:
    """The position-dependent part of attention for rows at N positions.

    Attributes:
        positions: int64[N].
        rotary: cos and sin float32[N, rope.dim]; None: the rows do not rotate.
        mask: bool[N, max_len], True for the keys that a row attends to.
    """

    positions: Tensor
    rotary: _RotaryTable | None
    mask: Tensor


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def inverse_frequencies(rope: Rope, max_len: int) -> Tensor:
    """Radians per position of each pair, float32 [dim / 2], for a cache of ``max_len`` positions.

    Sources: linear, Chen et al. 2023 (https://arxiv.org/abs/2306.15595); yarn, Peng et al. 2023
    (https://arxiv.org/abs/2309.00071); longrope, Ding et al. 2024 (https://arxiv.org/abs/2402.13753); llama3, the Llama
    3.1 release. All arithmetic is float32, because models were trained with frequencies of that precision.
    """
    with torch.device("cpu"):
        wavelengths = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
        if rope.kind == "longrope":
            factors = rope.short_factor if max_len <= rope.original_positions else rope.long_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        plain = 1.0 / wavelengths
        if rope.kind == "linear":
            return plain / rope.factor
        if rope.kind == "llama3":
            turns = rope.original_positions * plain / (2 * math.pi)
            keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
            return (1 - keep) * plain / rope.factor + keep * plain
        if rope.kind == "yarn":
            keep = 1 - _yarn_ramp(rope)
            return (1 - keep) / (rope.factor * wavelengths) + keep * plain
        return plain


def _yarn_ramp(rope: Rope) -> Tensor:
    """float32[dim / 2]: 0 for pairs that keep their frequency, 1 for pairs that are interpolated."""

    def pair(turns: float) -> float:
        """The index of the pair that makes this number of rotations within the original length."""
        return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467) over the last dim, in float32.

    ``kind`` is one of the 'rms' kinds of ``LLMConfig.norm``.
    """

    def __init__(self, size: int, eps: float, kind: str, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.kind = eps, kind

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms":
            return self.weight * y.to(x.dtype)
        weight = self.weight.float()
        return (y * (1.0 + weight if self.kind == "rms_unit_offset" else weight)).to(x.dtype)


def make_norm(config: LLMConfig, size: int, dtype: torch.dtype) -> nn.Module:
    """Return a norm of the config's kind over the last dim, of ``size`` elements."""
    if config.norm.startswith("layer"):
        return nn.LayerNorm(size, config.norm_eps, bias=config.norm == "layer", dtype=dtype)
    return RMSNorm(size, config.norm_eps, config.norm, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head: x [1, H, N, D], cos and sin float32[N, R] with R at most D."""
    size = cos.shape[-1]
    rotating = x[..., :size] if size < x.shape[-1] else x
    swapped = torch.cat((-rotating[..., size // 2 :], rotating[..., : size // 2]), -1)
    rotated = (rotating * cos + swapped * sin).to(x.dtype)
    return torch.cat((rotated, x[..., size:]), -1) if size < x.shape[-1] else rotated


class Attention(nn.Module):
    """Causal self-attention over the cache, with keys and values shared by groups of heads."""

    def __init__(self, config: LLMConfig, dtype: torch.dtype):
        super().__init__()
        c = self.config = config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, queries, c.qkv_bias, dtype=dtype)
        self.k_proj = nn.Linear(c.hidden_size, keys, c.qkv_bias, dtype=dtype)
        self.v_proj = nn.Linear(c.hidden_size, keys, c.qkv_bias, dtype=dtype)
        self.o_proj = nn.Linear(queries, c.hidden_size, c.output_bias, dtype=dtype)
        if c.qk_norm is not None:
            whole = c.qk_norm == "projection"
            self.q_norm = make_norm(c, queries if whole else c.head_dim, dtype)
            self.k_norm = make_norm(c, keys if whole else c.head_dim, dtype)

    def heads(self, x: Tensor) -> Tensor:
        """[1, N, heads * head_dim] -> [1, heads, N, head_dim]."""
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def forward(
        self, x: Tensor, context: _Context, cache: LayerCache, query_rows: Tensor, query_context: _Context
    ) -> Tensor:
        """Write keys and values of all rows ``x`` [1, N, hidden] into the cache, then compute attention for the rows
        ``query_rows`` [1, K, hidden] only, with their own rotary table and mask. Returns [1, K, hidden]."""
        if self.config.qk_norm == "projection":
            q, k = self.heads(self.q_norm(self.q_proj(query_rows))), self.heads(self.k_norm(self.k_proj(x)))
        else:
            q, k = self.heads(self.q_proj(query_rows)), self.heads(self.k_proj(x))
        v = self.heads(self.v_proj(x))
        if self.config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        keys = cache[0].store(context.positions, k if context.rotary is None else rotate(k, *context.rotary))
        values = cache[1].store(context.positions, v)
        y = self.attend(
            q if query_context.rotary is None else rotate(q, *query_context.rotary), keys, values, query_context.mask
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of q [1, heads, K, head_dim] over the cache [1, KV heads, max_len, head_dim], mask bool
        [K, max_len]. Returns [1, heads, K, head_dim]."""
        c = self.config
        if c.attention_softcap is None:
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, scale=c.attention_scale, enable_gqa=c.num_heads != c.num_kv_heads
            )
        q = q.view(1, c.num_kv_heads, -1, *q.shape[-2:])
        scores = (q @ keys.unsqueeze(2).transpose(-1, -2)).float() * c.attention_scale
        scores = torch.tanh(scores / c.attention_softcap) * c.attention_softcap
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(values.dtype)
        return (weights @ values.unsqueeze(2)).flatten(1, 2)


class MLP(nn.Module):
    """The MLP of a layer, gated (Shazeer 2020, https://arxiv.org/abs/2002.05202) or plain."""

    def __init__(self, config: LLMConfig, dtype: torch.dtype):
        super().__init__()
        c = config
        if c.gated_mlp:
            self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, c.mlp_bias, dtype=dtype)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, c.mlp_bias, dtype=dtype)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, c.mlp_bias, dtype=dtype)
        self.activation, self.gated = _ACTIVATIONS[c.activation], c.gated_mlp

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.activation(self.up_proj(x)))


class Layer(nn.Module):
    """Attention and MLP, joined as ``BLOCKS[config.block]`` says."""

    def __init__(self, config: LLMConfig, dtype: torch.dtype):
        super().__init__()
        self.config, self.block = config, BLOCKS[config.block]
        self.self_attn, self.mlp = Attention(config, dtype), MLP(config, dtype)
        for name in self.block.norms():
            self.add_module(name, make_norm(config, config.hidden_size, dtype))

    def forward(
        self, x: Tensor, context: _Context, cache: LayerCache, only: tuple[Tensor, _Context] | None = None
    ) -> Tensor:
        """The layer's result [1, N, hidden] for x [1, N, hidden].

        With ``only``, later layers need the rows with these indices int64[K] alone: the result is [1, K, hidden], and
        attention uses their own context.
        """
        block = self.block
        query_rows = normed = self._normed(block.before_attention, x)
        if only is not None:
            x = x.index_select(1, only[0])
            query_rows = self._normed(block.before_attention, x)
        attended = self.self_attn(normed, context, cache, query_rows, context if only is None else only[1])
        attended = self._scaled(self._normed(block.after_attention, attended))
        if block.parallel:
            read = query_rows if block.before_mlp is None else self._normed(block.before_mlp, x)
            return x + attended + self._scaled(self.mlp(read))
        x = x + attended
        return x + self._scaled(self._normed(block.after_mlp, self.mlp(self._normed(block.before_mlp, x))))

    def _normed(self, norm: str | None, x: Tensor) -> Tensor:
        return x if norm is None else self.get_submodule(norm)(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.config.residual_scale is None else x * self.config.residual_scale


class Backbone(nn.Module):
    """The modules under the prefix ``model.`` of Hugging Face's names."""

    def __init__(self, config: LLMConfig, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size, dtype)


class Decoder(nn.Module):
    """A language model with its KV cache of ``max_len`` positions: ``k_cache.{i}`` and ``v_cache.{i}``.

    ``forward`` takes token ids int64[1, N], their positions int64[N] and an index ``last`` int64[1] into them, and
    returns the logits float32[1, vocab] that follow token ``last``. Positions must be consecutive and below
    ``max_len``, and all earlier positions must have been written. Tokens after ``last`` may be padding: what they write
    is overwritten before a later query reads it. ``last`` is ignored if N is 1.

    Args:
        dtype: of weights, activations and cache; None: the config's.
        kv_cache: one of ``KV_CACHES``, which the cache has instead.

    Raises:
        ConfigError: ``max_len`` is not positive, or exceeds the learned positions; ``kv_cache`` is unknown.
    """

    def __init__(self, config: LLMConfig, max_len: int, dtype: torch.dtype | None = None, kv_cache: str | None = None):
        super().__init__()
        if max_len < 1:
            raise ConfigError(f"max_len = {max_len}: a KV cache holds at least one position")
        if config.learned_positions and max_len > config.max_position_embeddings:
            raise ConfigError(
                f"max_len = {max_len}: the model has embeddings for {config.max_position_embeddings} positions only"
            )
        self.config, self.max_len = config, max_len
        dtype = dtype or getattr(torch, config.dtype)
        self.model = Backbone(config, dtype)
        if not config.tied_embedding:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, dtype=dtype)
        use_column_orders(self, config.column_orders)
        self.k_cache, self.v_cache = (make_cache(config, max_len, dtype, kv_cache) for _ in range(2))
        ropes = {"frequencies": config.rope, "window_frequencies": config.window_rope if self._two_ropes() else None}
        for name, rope in ropes.items():
            table = None if rope is None else inverse_frequencies(rope, max_len)
            self.register_buffer(name, table, persistent=False)

    def _two_ropes(self) -> bool:
        return self.config.window_rope != self.config.rope and any(self.config.windows)

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        return self._logits(self._hidden(token_ids, positions, last)[:, 0])

    def _hidden(self, token_ids: Tensor, positions: Tensor, last: Tensor | None) -> Tensor:
        """The last layer's result [1, 1, hidden] for token ``last``; None: [1, N, hidden], for all tokens."""
        x = self.model.embed_tokens(token_ids)
        if self.config.embedding_scale is not None:
            scale, rounds = self.config.embedding_scale, self.config.round_embedding_scale
            x = x * (_rounded(scale, x.dtype) if rounds else scale)
        if self.config.learned_positions:
            x = x + self.model.embed_positions(positions)
        contexts = self._contexts(positions)
        several = x.shape[1] > 1  # then the last layer computes only one of them beyond its keys and values
        for i, layer in enumerate(self.model.layers):
            window, only = self.config.windows[i], None
            if last is not None and several and i == self.config.num_layers - 1:
                only = last, self._context(i, self._contexts(positions.index_select(0, last), {window}))
            x = layer(x, self._context(i, contexts), (self.k_cache.layer(i), self.v_cache.layer(i)), only)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """The logits float32[K, vocab] of rows [K, hidden] that the last layer returned."""
        head = self.model.embed_tokens.weight if self.config.tied_embedding else self.lm_head.weight
        logits = F.linear(self.model.norm(x), head).float()
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _context(self, layer: int, contexts: dict[int | None, _Context]) -> _Context:
        """The context of a layer, which depends on its window."""
        context = contexts[self.config.windows[layer]]
        return replace(context, rotary=None) if layer in self.config.nope_layers else context

    def _contexts(self, positions: Tensor, windows: Collection[int | None] | None = None) -> dict[int | None, _Context]:
        """The contexts of rows at ``positions`` by window: of all windows of the layers, or of ``windows``."""
        keys = torch.arange(self.max_len, device=positions.device)[None, :]
        causal = keys <= positions[:, None]
        whole = _Context(positions, self._rotary("frequencies", positions, self.config.rope), causal)
        contexts: dict[int | None, _Context] = {None: whole}
        for window in self.config.windows if windows is None else windows:
            if window is not None and window not in contexts:
                mask = causal & (keys > (positions - window)[:, None])
                rotary = whole.rotary
                if self._two_ropes():
                    rotary = self._rotary("window_frequencies", positions, self.config.window_rope)
                contexts[window] = _Context(positions, rotary, mask)
        return contexts

    def _rotary(self, table: str, positions: Tensor, rope: Rope | None) -> _RotaryTable | None:
        return None if rope is None else _rotary_table(positions, self.get_buffer(table), rope)


def _rotary_table(positions: Tensor, frequencies: Tensor, rope: Rope) -> _RotaryTable:
    """cos and sin float32[N, rope.dim] at ``positions`` int64[N]."""
    angles = positions[:, None].float() * frequencies[None, :]
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def _rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` rounded to ``dtype``."""
    narrow = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    return float(np.float32(value).astype(narrow.get(dtype, np.float32)))


def load_decoder(checkpoint: Checkpoint, max_len: int, dtype: torch.dtype | None = None) -> Decoder:
    """A decoder with the checkpoint's weights on the CPU, in eval mode, as a reference.

    Args:
        max_len: positions of its caches.
        dtype: of weights, activations and cache; None: the config's.

    Raises:
        WeightError: a weight cannot be read.
    """
    dtype = dtype or getattr(torch, checkpoint.config.dtype)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config, max_len, dtype)
    state = {name: numpy_to_tensor(array) for name, array in checkpoint.weights.items()}
    state = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
    for name, buffer in decoder.named_buffers():
        if buffer.is_meta and name not in state:
            state[name] = torch.zeros(buffer.shape, dtype=dtype)
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder.eval()
