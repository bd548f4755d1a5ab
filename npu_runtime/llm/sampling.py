"""From logits to a token: greedy, or a draw from the tempered, filtered distribution.

The filters mostly leave a few likely tokens, so a token is chosen among candidates first: some of the likeliest, and
a bound on the logits of all others. Where the bound shows that the filters remove the others, the choice is the very
one that all logits would give; where it does not, all logits are looked at, by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from npu_compiler.support.errors import BackendError

from .requests import number, whole_number

_FEW = 512  # candidates, about
_DOUBT = 2.0**-17  # relative error of a sum of exponentials in float32, whose exponents were rounded


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
        number("temperature", self.temperature, lambda x: x >= 0, "a number from 0")
        whole_number("top_k", self.top_k, 0)
        number("top_p", self.top_p, lambda x: 0 < x <= 1, "a number above 0, at most 1")
        number("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        number("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "a number above 0")
        if self.seed is not None:
            whole_number("seed", self.seed, 0)


@dataclass(frozen=True)
class Candidates:
    """Some of the most likely tokens: ``ids`` int64[k], ascending, None: all tokens; their ``logits`` float32[k]; no
    other token's logit is above ``bound``."""

    ids: np.ndarray | None
    logits: np.ndarray
    bound: float = -math.inf


class Scores(Protocol):
    """What a model says of the next token."""

    def candidates(self) -> Candidates:
        """A few likely tokens, or all."""

    def logits(self) -> np.ndarray:
        """Of all tokens: float32[vocab], valid until the next step."""

    def total(self, temperature: float) -> float:
        """The sum over all tokens of exp((logit - largest logit) / temperature), in float32 precision."""

    def log_probability(self, token: int) -> float:
        """The natural logarithm of the model's own probability of ``token``: before temperature, penalty, filters."""


class HostScores:
    """``Scores`` of logits float32[vocab] in host memory. Raises ``BackendError`` for NaN."""

    def __init__(self, logits: np.ndarray):
        self._logits = logits

    @cached_property
    def _highest(self) -> np.float32:
        return self._logits[_checked_argmax(self._logits)]

    def logits(self) -> np.ndarray:
        return self._logits

    def candidates(self) -> Candidates:
        """Those above the ``_FEW``-th of the largest logits of as many columns: a pass, and no sort of everything."""
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

    @property
    def temperature(self) -> float:
        """What logits are divided by; 1 where only the most likely token counts."""
        return self._options.temperature or 1.0

    @property
    def narrow(self) -> bool:
        """Whether candidates may be enough: there is a filter, and no token becomes more likely than its logit says."""
        o = self._options
        return o.repetition_penalty >= 1 and (
            o.temperature == 0
            or 0 < o.top_k < min(_FEW, self._scores.size)
            or o.min_p > 0
            or (o.top_p < 1 and o.repetition_penalty == 1)
        )

    def see(self, tokens: Iterable[int]) -> None:
        """Tokens that are in the context now, for the repetition penalty."""
        if self._options.repetition_penalty != 1:
            self._seen[list(tokens)] = True

    def __call__(self, scores: Scores | np.ndarray) -> int:
        """The next token for ``scores``, or for logits float32[vocab], which stay as they are. Raises ``BackendError``
        for NaN."""
        if isinstance(scores, np.ndarray):
            scores = HostScores(scores)
        all_here = isinstance(scores, HostScores) and self._options.temperature == 0  # then a look at all is quicker
        token = self._choose(scores.candidates(), scores) if self.narrow and not all_here else None
        if token is None:
            token = self._choose(Candidates(None, scores.logits()), scores)
        assert token is not None  # nothing is missing
        return token

    def _choose(self, known: Candidates, everything: Scores) -> int | None:
        """The next token, or None if it depends on others than the ``known`` ones."""
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
                np.divide(x, o.temperature, out=x)
        return self._draw(scores, ids, rest, everything)

    def _draw(
        self, scores: np.ndarray, ids: np.ndarray | None, rest: np.ndarray | None, everything: Scores
    ) -> int | None:
        """A draw from exp(``scores``), whose largest is 0, after the filters. None, and nothing is drawn, if they may
        leave others too, whose scores are at most ``rest``."""
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
                return None  # the total is that of the logits as they were
            else:
                total = everything.total(o.temperature)
                if not math.isfinite(total):
                    return None
                kept = self._nucleus(mass, total * (1 - _DOUBT))
                if kept.size != self._nucleus(mass, total * (1 + _DOUBT)).size:
                    return None
                if kept.size < np.count_nonzero(scores > rest):
                    rest = None  # one of the candidates was left out already
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
        """The indices of the fewest largest entries that hold the share ``top_p`` of ``total``, most likely first."""
        share = self._options.top_p
        # Entries below this bound hold less than 1 - share together, so the nucleus is among the others: few to sort.
        few = np.flatnonzero(mass >= total * (1 - share) / self._scores.size)
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
