"""Perplexity of a text under a language model, and how far a model is from a reference that computes the same.

The text is cut into windows of at most ``context`` tokens, each of which begins ``stride`` tokens after the one before.
A window starts with empty caches, and a token is scored in the first window that holds it and a token before it; its
tokens before that are context only. The perplexity is exp of the mean negative log-likelihood (natural logarithm) of
the scored tokens. This is the evaluation of https://huggingface.co/docs/transformers/perplexity; a smaller stride gives
tokens more context and takes longer. The first token of a text is never scored, nor is that of any window if ``stride``
is ``context``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support import dtypes, progress
from npu_compiler.support.errors import InputError
from npu_compiler.support.numbers import whole_number

from ..backends.base import Backend, get_backend
from ..executor import Executor
from ..state import State
from ..weight_loader import WeightStore
from .chunks import plan_chunks
from .manifest import ModelManifest
from .sampling import bad_logits

ENTRY = "score"
_BLOCK = 2**20  # logits that are compared at a time: the temporary arrays stay in caches


class Scorer:
    """A language model that rates given texts. It is not thread-safe.

    Args:
        program: of ``scoring_graphs``.
        weights: the program's.
        manifest: everything except the tensors.

    Attributes:
        max_len: tokens of the context.
        vocab: tokens of the vocabulary.
        state_bytes: the size of the KV caches.
    """

    def __init__(self, program: CompiledProgram, weights: WeightStore, manifest: ModelManifest, backend: Backend):
        self.program, self.weights, self.manifest, self.backend = program, weights, manifest, backend
        self.max_len = manifest.max_len
        state = State(program, backend, weights.state)
        self.state_bytes = sum(b.size_bytes for b in state.values())
        executor = Executor(program, weights, backend, ENTRY, state)
        inputs = {s.name: (s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.inputs}
        outputs = [(s.shape, dtypes.numpy_dtype(s.dtype)) for s in executor.outputs]
        (self.size,), (_, self.vocab) = outputs[0][0], outputs[1][0]
        self._host = {name: backend.host_array(*what) for name, what in inputs.items()}
        self._inputs = {name: backend.allocate_zeros(*what) for name, what in inputs.items()}
        self._outputs = [backend.allocate_zeros(*what) for what in outputs]
        self._results = [backend.host_array(*what) for what in outputs]
        self._run = executor.bind(self._inputs, self._outputs)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        target: str = "cpu",
        dtype: Any = None,
        context: int | None = None,
        threads: int | None = None,
        cache: bool = True,
        weights: str | None = "auto",
        kv_cache: str | None = None,
        activations: str | None = "auto",
    ) -> Scorer:
        """Open a model, compile it if the cache does not have the program, and load its weights.

        Args:
            model: as for ``LLM.load``, and so are the other arguments and the errors. A ``.npubin`` cannot be scored.
            context: tokens of a window; None: what the model was trained for, at most 2048.
        """
        from .loader import Loader

        if context is not None:
            context = whole_number("context", context, 2)
        backend = get_backend(target, **({} if threads is None else {"threads": threads}))
        loader = Loader(
            target, dtype, context, backend, cache, weights, scoring=True, kv_cache=kv_cache, activations=activations
        )
        return cls(*loader.load(model), backend)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the begin token if the tokenizer adds one. Raises ``InputError``."""
        return self.manifest.open_tokenizer(self.vocab).encode(text)

    def log_likelihoods(self, tokens: Sequence[int], following: Sequence[int], start: int) -> np.ndarray:
        """Compute up to ``size`` tokens from position ``start`` on, after the tokens before ``start``.

        Returns:
            float32 [len(tokens)]: the log-likelihood of the token that follows each; valid until the next call.

        Raises:
            BackendError: logits are NaN or infinite.
        """
        for name, values in (("token_ids", tokens), ("following", following)):
            row = self._host[name].reshape(-1)
            row[: len(values)] = values
            row[len(values) :] = 0
        self._host["positions"][:] = np.arange(start, start + self.size)
        for name, array in self._host.items():
            self.backend.start_copy(self._inputs[name], array)
        self._run()
        self.backend.start_read(self._results[0], self._outputs[0])
        self._run.finish()
        found = self._results[0][: len(tokens)]
        if not np.isfinite(found).all():
            raise bad_logits(float(found[~np.isfinite(found)][0]))
        return found

    def logits(self) -> np.ndarray:
        """Return all logits of the last call, float32 [size, vocab], copied from the device."""
        self.backend.start_read(self._results[1], self._outputs[1])
        self.backend.synchronize()
        return self._results[1]


@dataclass(frozen=True)
class Difference:
    """The difference of a model from a reference, over all scored tokens.

    Attributes:
        mean_kl: the mean Kullback-Leibler divergence of the model's distribution from the reference's, in nats.
        same_top1: the share of tokens for which the most likely one is the same.
        rms_logits: the root of the mean squared difference of the logits.
    """

    mean_kl: float
    same_top1: float
    rms_logits: float


@dataclass(frozen=True)
class Perplexity:
    """A measured perplexity.

    Attributes:
        scored: tokens whose likelihood was measured.
        nll: their mean negative log-likelihood, in nats.
    """

    scored: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll), infinite if a float cannot hold it."""
        return math.exp(self.nll) if self.nll < 709 else math.inf


class Window(NamedTuple):
    """Tokens ``begin`` to ``end`` of a text, of which those from ``scored`` on are scored."""

    begin: int
    scored: int
    end: int


def windows(count: int, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a text of ``count`` tokens; see the module."""
    done = 0
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        yield Window(begin, max(done, begin + 1), end)
        if end == count:
            return
        done = end


def checked_stride(model: Scorer, stride: int | None) -> int:
    """Return a stride from 1 to the model's context; None: half of it. Raises ``InputError`` for others."""
    if stride is None:
        return max(model.max_len // 2, 1)
    return whole_number("stride", stride, 1, model.max_len)


def perplexity(model: Scorer, tokens: Sequence[int], stride: int | None = None) -> Perplexity:
    """Return the perplexity of ``tokens``. The module describes the evaluation.

    Args:
        stride: as :func:`checked_stride` takes it.

    Raises:
        InputError: there are fewer than two tokens, or ``stride`` is invalid.
        BackendError: logits are NaN or infinite.
    """
    return _measure([model], tokens, stride)[0][0]


def compare(
    model: Scorer, reference: Scorer, tokens: Sequence[int], stride: int | None = None
) -> tuple[Perplexity, Perplexity, Difference]:
    """Return the perplexities of a model and of a reference, and the difference between them.

    ``reference`` is the same model in another weight format, loaded with the same context. The other arguments and the
    errors are those of :func:`perplexity`.
    """
    if (reference.vocab, reference.max_len) != (model.vocab, model.max_len):
        raise InputError("the reference has another vocabulary or context than the model")
    (ours, theirs), difference = _measure([model, reference], tokens, stride)
    assert difference is not None
    return ours, theirs, difference


def _measure(
    models: Sequence[Scorer], tokens: Sequence[int], stride: int | None
) -> tuple[list[Perplexity], Difference | None]:
    """The perplexity of each of one or two models, and the difference of the first from the second."""
    context, size = models[0].max_len, models[0].size
    if len(tokens) < 2:
        raise InputError(f"tokens of the text: {len(tokens)}; a perplexity needs two, because the first is not scored")
    stride = checked_stride(models[0], stride)
    count, sums, differences = 0, np.zeros(len(models)), np.zeros(3)
    with progress.step("measuring the perplexity", len(tokens) - 1) as step:
        for window in windows(len(tokens), context, stride):
            inputs, following = tokens[window.begin : window.end - 1], tokens[window.begin + 1 : window.end]
            done = window.scored - window.begin - 1
            for chunk in plan_chunks(0, len(inputs), (size,), context):
                part = slice(chunk.start, chunk.stop)
                found = [m.log_likelihoods(inputs[part], following[part], chunk.start) for m in models]
                rows = slice(max(done - chunk.start, 0), chunk.stop - chunk.start)
                fresh = max(rows.stop - rows.start, 0)  # others are context, or were scored by the chunk before
                if not fresh:
                    continue
                sums += [x[rows].sum(dtype=np.float64) for x in found]
                if len(models) > 1:
                    differences += _differences(*(m.logits()[rows] for m in models))
                count, done = count + fresh, chunk.stop
                step.advance(fresh)
    results = [Perplexity(count, -float(s) / count) for s in sums]
    if len(models) == 1:
        return results, None
    kl, same, squares = (differences / count).tolist()
    return results, Difference(kl, same, math.sqrt(squares / models[0].vocab))


def _differences(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The sums over rows of logits [N, vocab] of the divergence, of equal first tokens, and of squared differences."""
    total = np.zeros(3)
    rows = max(_BLOCK // ours.shape[1], 1)
    for i in range(0, len(ours), rows):
        a, b = (np.asarray(x[i : i + rows], np.float64) for x in (ours, reference))
        total[1] += np.count_nonzero(a.argmax(1) == b.argmax(1))
        total[2] += np.square(a - b).sum()
        a, b = (x - x.max(1, keepdims=True) for x in (a, b))
        a, b = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b))
        total[0] += (np.exp(b) * (b - a)).sum()
    return total
