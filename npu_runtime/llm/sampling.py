"""Chooses the next token from logits: greedily, or by sampling from the filtered distribution at a temperature.

Filters usually leave a few tokens, so the sampler first looks at candidates: some of the most likely tokens, and an
upper bound on the logits of all others. If the bound proves that the filters remove all others, the choice is the one
that all logits would give. Otherwise the sampler reads all logits and applies the same rules to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from npu_compiler.support.errors import BackendError
from npu_compiler.support.numbers import whole_number

from .requests import number

_FEW = 512  # approximate number of candidates that HostScores selects
_FLOAT32 = np.finfo(np.float32)
_DOUBT = 2.0**-17  # relative error of a float32 sum of exponentials with rounded arguments


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. Filters apply in the order of the fields.

    Attributes:
        repetition_penalty: divides the positive logits of tokens in the context and multiplies the negative ones
            (Keskar et al. 2019, https://arxiv.org/abs/1909.05858); above 0, 1: none.
        temperature: logits are divided by it; 0: the most likely token is taken.
        top_k: keep the k most likely tokens, and those equal to the last of them; 0: all.
        top_p: keep the fewest most likely tokens that have this share of the probability that is left (Holtzman et al.
            2020, https://arxiv.org/abs/1904.09751); from above 0 to 1.
        min_p: keep tokens at least this fraction as likely as the most likely one (https://arxiv.org/abs/2407.01082);
            from 0 to 1.
        seed: the seed of the random numbers; equal seeds draw equally. None: a new seed each time.

    Raises:
        InputError: a value is not of its type or range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        number("temperature", self.temperature, lambda x: x >= 0, "a number from 0")
        whole_number("top_k", self.top_k, 0)
        number("top_p", self.top_p, lambda x: 0 < x <= 1, "a number above 0, at most 1")
        number("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        number("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "a number above 0")
        if self.seed is not None:
            whole_number("seed", self.seed, 0)


@dataclass(frozen=True)
class Candidates:
    """Some of the most likely tokens.

    Attributes:
        ids: int64[k], ascending; None: all tokens.
        logits: float32[k], of these tokens.
        bound: no other token has a larger logit.
    """

    ids: np.ndarray | None
    logits: np.ndarray
    bound: float = -math.inf


class Scores(Protocol):
    """A model's scores of the next token."""

    def candidates(self) -> Candidates:
        """Return some of the most likely tokens, or all tokens."""

    def logits(self) -> np.ndarray:
        """Return the logits of all tokens, float32[vocab], valid until the next step."""

    def total(self, temperature: float) -> float:
        """Return the sum over all tokens of exp((logit - largest logit) / temperature), in float32 precision."""

    def log_probability(self, token: int) -> float:
        """Return the natural logarithm of the probability of ``token`` before temperature, penalty and filters."""


class HostScores:
    """``Scores`` of logits float32[vocab] in host memory. Methods raise ``BackendError`` if the largest logit is NaN or
    infinite."""

    def __init__(self, logits: np.ndarray):
        self._logits = logits

    @cached_property
    def _highest(self) -> np.float32:
        return self._logits[_checked_argmax(self._logits)]

    def logits(self) -> np.ndarray:
        return self._logits

    def candidates(self) -> Candidates:
        """Return the tokens above a bound, the ``_FEW``-th largest of the maxima of 2 * ``_FEW`` columns. This takes
        one pass over the logits and a selection among the maxima, without sorting all logits."""
        columns = 2 * _FEW
        rows = self._logits.size // columns
        if rows < 4 or not np.isfinite(self._highest):
            return Candidates(None, self._logits)
        largest = self._logits[: rows * columns].reshape(rows, columns).max(axis=0)
        bound = np.partition(largest, -_FEW)[-_FEW]
        ids = np.flatnonzero(self._logits > bound)
        return Candidates(ids, self._logits[ids], float(bound))

    def total(self, temperature: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp((self._logits - self._highest) / temperature).sum(dtype=np.float64))

    def log_probability(self, token: int) -> float:
        return log_probability(self._logits, token)


class Sampler:
    """Chooses the tokens of one generation. Its working memory is allocated once.

    Args:
        vocab: the number of tokens.
    """

    def __init__(self, options: SamplingOptions, vocab: int):
        self._options = options
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self._scores = np.empty(vocab, np.float32)
        self._seen = np.zeros(vocab, np.bool_)

    @property
    def greedy(self) -> bool:
        """True if the choice is always the most likely token."""
        return self._options.repetition_penalty == 1 and self._options.temperature == 0

    @property
    def temperature(self) -> float:
        """The divisor of logits, a normal float32: smaller ones would become 0 there. 1 for a choice of the most likely
        token."""
        asked = self._options.temperature
        return min(max(asked, float(_FLOAT32.tiny)), float(_FLOAT32.max)) if asked else 1.0

    @property
    def narrow(self) -> bool:
        """True if candidates may suffice: there is a filter, and the penalty raises no logit."""
        o = self._options
        return o.repetition_penalty >= 1 and (
            o.temperature == 0
            or 0 < o.top_k < min(_FEW, self._scores.size)
            or o.min_p > 0
            or (o.top_p < 1 and o.repetition_penalty == 1)
        )

    def see(self, tokens: Iterable[int]) -> None:
        """Add tokens to the context that the repetition penalty applies to."""
        if self._options.repetition_penalty != 1:
            self._seen[list(tokens)] = True

    def __call__(self, scores: Scores | np.ndarray) -> int:
        """Return the id of the next token.

        Args:
            scores: or logits float32[vocab], which are not changed.

        Raises:
            BackendError: the largest logit is NaN or infinite.
        """
        if isinstance(scores, np.ndarray):
            scores = HostScores(scores)
        token = None
        if self.narrow and not (self._options.temperature == 0 and isinstance(scores, HostScores)):  # argmax is quicker
            token = self._choose(scores.candidates(), scores)
        if token is None:
            token = self._choose(Candidates(None, scores.logits()), scores)
        assert token is not None  # with all logits, there is a choice
        return token

    def _choose(self, known: Candidates, everything: Scores) -> int | None:
        """Return the id of the next token, or None if it depends on tokens outside of ``known``."""
        o, ids = self._options, known.ids
        if not known.logits.size:
            return None
        if self.greedy and ids is None:
            return _checked_argmax(known.logits)
        scores = self._scores[: known.logits.size]
        np.copyto(scores, known.logits)
        if o.repetition_penalty != 1:
            seen = np.flatnonzero(self._seen if ids is None else self._seen[ids])
            values = scores[seen]
            scores[seen] = np.where(values > 0, values / o.repetition_penalty, values * o.repetition_penalty)
        best = _checked_argmax(scores)
        rest = None if ids is None else np.array([known.bound], np.float32)  # at least the scores of all others
        if rest is not None and not scores[best] > rest:
            return None
        if o.temperature == 0:
            return best if ids is None else int(ids[best])
        highest = scores[best].copy()
        for x in (scores,) if rest is None else (scores, rest):
            with np.errstate(over="ignore"):  # far below the best, a score of minus infinity is right
                np.subtract(x, highest, out=x)
                np.divide(x, self.temperature, out=x)
        return self._draw(scores, ids, rest, everything)

    def _draw(
        self, scores: np.ndarray, ids: np.ndarray | None, rest: np.ndarray | None, everything: Scores
    ) -> int | None:
        """Filter and draw from the distribution exp(``scores``), whose largest score is 0.

        ``rest``: an upper bound on the scores of all other tokens; None: there are no others. Returns None, without
        drawing, if the filters may keep some of those.
        """
        o = self._options
        if 0 < o.top_k < self._scores.size:
            if scores.size < o.top_k:
                return None
            least = np.partition(scores, -o.top_k)[-o.top_k]
            if rest is not None and not least > rest:
                return None
            kept, rest = np.flatnonzero(scores >= least), None
            scores, ids = scores[kept], kept if ids is None else ids[kept]
        mass = np.exp(scores, dtype=np.float64)
        if o.top_p < 1:
            if rest is None:
                kept = self._nucleus(mass, float(mass.sum()))
            elif o.repetition_penalty != 1:
                return None  # the total is that of the unchanged logits
            else:
                total = everything.total(self.temperature)
                if not math.isfinite(total):
                    return None
                kept = self._nucleus(mass, total * (1 - _DOUBT))
                if kept.size != self._nucleus(mass, total * (1 + _DOUBT)).size:
                    return None
                if kept.size < np.count_nonzero(scores > rest):
                    rest = None  # a candidate was filtered out, so all less likely tokens are
            ids, mass = (kept if ids is None else ids[kept]), mass[kept]
        if o.min_p > 0:
            mass[mass < o.min_p] = 0
            if rest is not None and np.exp(rest, dtype=np.float64) < o.min_p:
                rest = None
        if rest is not None:
            return None
        sums = np.cumsum(mass)
        at = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        at = min(at, int(np.searchsorted(sums, sums[-1], side="left")))  # the product may round up to the sum
        return at if ids is None else int(ids[at])

    def _nucleus(self, mass: np.ndarray, total: float) -> np.ndarray:
        """Return the indices of the fewest largest entries whose sum is at least ``top_p`` of ``total``."""
        share = self._options.top_p
        # All entries below this bound together have less than 1 - share, so only the others have to be sorted.
        few = np.flatnonzero(mass >= total * (1 - share) / self._scores.size)
        few = few[np.argsort(-mass[few], kind="stable")]
        before = np.cumsum(mass[few]) - mass[few]
        return few[before < share * total]


def _checked_argmax(logits: np.ndarray) -> int:
    best = int(np.argmax(logits))  # NaN counts as the largest
    if not np.isfinite(logits[best]):
        raise bad_logits(float(logits[best]))
    return best


def bad_logits(value: float) -> BackendError:
    """Return the error for logits that hold ``value``, NaN or infinity."""
    return BackendError(
        f"the model's logits hold {value}; its weights are damaged, or too large for the dtype: try float32"
    )


def log_probability(logits: np.ndarray, token: int) -> float:
    """Return the natural logarithm of the softmax of ``logits`` float32[vocab] at ``token``."""
    highest = float(logits.max())
    return float(logits[token]) - highest - math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
