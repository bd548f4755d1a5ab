"""From logits to a token: greedy, or a draw from the tempered, filtered distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from npu_compiler.errors import BackendError, InputError


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. Filters apply in the order of the fields.

    ``repetition_penalty`` divides the positive logits of tokens already in the context and multiplies the negative ones
    (Keskar et al. 2019, CTRL). ``temperature`` 0 takes the most likely token. ``top_k`` keeps the k most likely tokens
    and their equals (0: all), ``top_p`` the fewest of these that hold that share of their probability (Holtzman et al.
    2020), ``min_p`` those at least that fraction as likely as the most likely one. ``seed``: equal seeds draw equally.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0")
        _require("top_k", self.top_k, self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number from 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0")
        _require("seed", self.seed, self.seed is None or self.seed >= 0, "a whole number from 0")


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise InputError(f"{name}={value}: it takes {wanted}")


class Sampler:
    """Chooses tokens of one generation; work memory is allocated once."""

    def __init__(self, options: SamplingOptions, vocab: int):
        self._options = options
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self._scores = np.empty(vocab, np.float32)
        self._seen = np.zeros(vocab, np.bool_)

    @property
    def greedy(self) -> bool:
        """Whether it takes the most likely token, whatever was there before."""
        return self._options.repetition_penalty == 1 and self._options.temperature == 0

    def see(self, tokens: Iterable[int]) -> None:
        """Tokens that are in the context now, for the repetition penalty."""
        if self._options.repetition_penalty != 1:
            self._seen[list(tokens)] = True

    def __call__(self, logits: np.ndarray) -> int:
        """The next token for ``logits`` float32[vocab], which stay as they are. Raises ``BackendError`` for NaN."""
        o, scores = self._options, self._scores
        if self.greedy:
            return _checked_argmax(logits)
        np.copyto(scores, logits)
        if o.repetition_penalty != 1:
            known = np.flatnonzero(self._seen)
            values = scores[known]
            scores[known] = np.where(values > 0, values / o.repetition_penalty, values * o.repetition_penalty)
        best = _checked_argmax(scores)
        if o.temperature == 0:
            return best
        with np.errstate(over="ignore"):  # far below the best, a score of minus infinity is right
            np.subtract(scores, scores[best], out=scores)
            np.divide(scores, o.temperature, out=scores)
        return self._draw(scores)

    def _draw(self, scores: np.ndarray) -> int:
        """A draw from exp(``scores``), whose largest is 0, after the filters."""
        o = self._options
        ids: np.ndarray | None = None  # None: all tokens, in order
        if 0 < o.top_k < scores.size:
            ids = np.flatnonzero(scores >= np.partition(scores, -o.top_k)[-o.top_k])
            scores = scores[ids]
        mass = np.exp(scores, dtype=np.float64)
        if o.top_p < 1:
            kept = _nucleus(mass, o.top_p)
            ids, mass = (kept if ids is None else ids[kept]), mass[kept]
        if o.min_p > 0:
            mass[mass < o.min_p] = 0
        sums = np.cumsum(mass)
        at = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        at = min(at, int(np.searchsorted(sums, sums[-1], side="left")))  # the product may round up to the sum
        return at if ids is None else int(ids[at])


def _nucleus(mass: np.ndarray, share: float) -> np.ndarray:
    """The indices of the fewest largest entries that hold ``share`` of the sum, most likely first."""
    total = float(mass.sum())
    # Entries below this bound hold less than 1 - share together, so the nucleus is among the others: few to sort.
    few = np.flatnonzero(mass >= total * (1 - share) / mass.size)
    few = few[np.argsort(-mass[few], kind="stable")]
    before = np.cumsum(mass[few]) - mass[few]
    return few[before < share * total]


def _checked_argmax(logits: np.ndarray) -> int:
    best = int(np.argmax(logits))  # NaN counts as the largest
    if not np.isfinite(logits[best]):
        raise BackendError(
            f"the model's logits hold {logits[best]}; its weights are damaged, or too large for the dtype: try float32"
        )
    return best


def log_probability(logits: np.ndarray, token: int) -> float:
    """The natural logarithm of the model's own probability of ``token``: before temperature, penalty and filters."""
    highest = float(logits.max())
    return float(logits[token]) - highest - math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
