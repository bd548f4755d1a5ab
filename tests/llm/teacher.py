"""Teacher-forced logits against transformers: how far off, and what that does to the distribution of the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..models.gate import Expected, largest, rms, scale_room


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(reference || logits) of the softmax over the last dim, in nats, for each row."""
    p, q = map(_log_softmax, (reference, logits))
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0)  # below 0 by rounding only


@dataclass(frozen=True)
class Teacher:
    """Logits float64 [tokens, vocab] that transformers gives after each token of a text: from float64 (float32 for half
    types) and from ``dtype``, both with weights as ``dtype`` holds them."""

    dtype: str
    exact: np.ndarray
    eager: np.ndarray

    def check(self, logits: np.ndarray, rows: slice | np.ndarray = slice(None)) -> str:
        """The gate for our logits of some rows: errors, ranking and divergence. Returns the figures."""
        ours, exact, eager = logits.astype(np.float64), self.exact[rows], self.eager[rows]
        expected = Expected(self.dtype, [exact], [eager])
        expected.check([ours])
        expected.check_ranking([ours], margin=2 * largest(eager - exact))
        # A divergence is quadratic in the errors that cause it, so its root is gated as they are.
        mine, theirs = (np.sqrt(divergence(exact, x)) for x in (ours, eager))
        figures = f"KL {rms(mine) ** 2:.3g} per token, transformers' {rms(theirs) ** 2:.3g}"
        assert rms(mine) <= scale_room(theirs) * rms(theirs) + 1e-6, figures
        ratios = {name: round(m.ours / m.eager, 3) for name, m in expected.errors([ours])[0].items()}
        return f"errors over transformers' {ratios}, {figures}"


def teacher(model: Any, dtype: str, windows: list[list[int]]) -> Teacher:
    """``model`` of transformers in float32, run over texts of which each begins anew; it is left
    in the wider type."""
    eager = _logits(converted(model, getattr(torch, dtype)), windows)  # rounds the weights, for all that follows
    wide = torch.float64 if dtype == "float32" else torch.float32
    return Teacher(dtype, _logits(converted(model, wide), windows), eager)


def converted(model: Any, dtype: torch.dtype) -> Any:
    """``model.to(dtype)`` but for the frequencies of the rotary embedding, which stay float32 as they do in a model
    that transformers loads in ``dtype``."""
    frequencies = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    model.to(dtype)
    for name, value in frequencies.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, value)
    return model


def _logits(model: Any, windows: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([model(torch.tensor([w]), use_cache=False).logits[0].double().numpy() for w in windows])
