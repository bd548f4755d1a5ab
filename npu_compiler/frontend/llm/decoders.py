"""Decoders that choose the next token themselves, or score the tokens that follow."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import LLMConfig
from .modules import Decoder

_PER_COLUMN = 4  # M: for Qwen's vocabulary the digest is expected to contain the 447 most likely tokens


class GreedyDecoder(Decoder):
    """A decoder whose next input is state, like the caches: ``next_token`` int64[1] at ``next_position`` int64[1].

    ``forward`` has no arguments. It returns the most likely token int64[1] and its logit float32[1], and stores that
    token as the next input.
    """

    def __init__(self, config: LLMConfig, max_len: int, kv_cache: str | None = None):
        super().__init__(config, max_len, kv_cache=kv_cache)
        for name in ("next_token", "next_position"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.int64))

    def forward(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        token, position = self.get_buffer("next_token"), self.get_buffer("next_position")
        logits = super().forward(token[None], position, position)
        best = logits.argmax(-1)
        token.copy_(best)
        position.add_(1)
        return best, logits.amax(-1)


class SamplingDecoder(Decoder):
    """A step for a host that samples from a top-k digest of the logits.

    ``forward`` takes a token id int64[1, 1], its position int64[1] and a temperature float32[1]. It returns the logits
    float32[1, vocab] and their digest. For this, logits form a table with C columns in which token t is in column
    t % C. The digest is the M largest logits of each column float32[M, C], largest first; the rows they are in
    int64[M, C]; and for each column the sum of exp((logit - the column's largest) / temperature), and the same at
    temperature 1, float32[2, C]. No logit outside of the digest exceeds the largest of its last row.
    """

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, positions: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = super().forward(token_ids, positions, positions)
        vocab = self.config.vocab_size
        rows = min(max(vocab // 512, 8), 128)
        table = F.pad(logits[0], (0, -vocab % rows), value=-math.inf) if vocab % rows else logits[0]
        table = table.view(rows, -1)
        values, places = table.topk(_PER_COLUMN, 0)
        below = table - table.amax(0)
        sums = torch.stack(((below / temperature).exp().sum(0), below.exp().sum(0)))
        return logits, values, places, sums


class ScoringDecoder(Decoder):
    """A decoder that rates given tokens.

    ``forward`` takes token ids int64[1, N], their positions int64[N] and the tokens ``following`` int64[N] that come
    after each. It returns the log-likelihoods float32[N] (natural logarithm) of ``following``, and all logits
    float32[N, vocab].
    """

    def forward(self, token_ids: Tensor, positions: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self._logits(self._hidden(token_ids, positions, None)[0])
        chosen = logits.gather(-1, following[:, None])[:, 0]
        return chosen - logits.logsumexp(-1), logits
