"""One answer of a language model: an iterator over its tokens, the text so far, timings, and why it ended."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tokenizer import Detokenizer, StopStrings, Tokenizer


class Token(NamedTuple):
    """A generated token.

    Attributes:
        id: the token id.
        text: the text that the token completes; empty while a character, or a possible stop string, is incomplete. The
            texts of all tokens together are the answer.
        logprob: the natural logarithm of the token's probability before temperature and filters; None unless requested.
    """

    id: int
    text: str
    logprob: float | None


@dataclass
class Timings:
    """Tokens and seconds of one generation. Time that the caller spends between tokens is not included."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt; their keys and values were in the cache already
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of all tokens but the first, which the prefill gives
    first_token_seconds: float = 0.0  # from the call to the first token, encoding included

    @property
    def prefill_per_second(self) -> float:
        """Prompt tokens computed per second of prefill; reused ones do not count."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.prefill_seconds)

    @property
    def decode_per_second(self) -> float:
        """Tokens per second after the first; 0 if there were none."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    def to_dict(self) -> dict[str, float]:
        """Return all fields and both rates, by name."""
        rates = {
            "prefill_tokens_per_second": self.prefill_per_second,
            "decode_tokens_per_second": self.decode_per_second,
        }
        return {**vars(self), **rates}

    def __str__(self) -> str:
        reused = f" ({self.reused_tokens} reused)" if self.reused_tokens else ""
        return (
            f"prompt {self.prompt_tokens} tokens{reused}, {self.prefill_per_second:.1f} tokens/s; "
            f"answer {self.generated_tokens} tokens, {self.decode_per_second:.1f} tokens/s; "
            f"first token after {self.first_token_seconds * 1e3:.0f} ms"
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


class Generation(Iterator[Token]):
    """The tokens of one answer, generated as they are iterated.

    Attributes:
        tokens: the token ids so far.
        text: the text so far, without a stop string.
        finish_reason: None until the end; then 'stop' (an end token, a stop token or a stop string), 'length'
            (``max_tokens``) or 'context' (the context is full).
        timings: the timings so far.
    """

    def __init__(self, steps: Generator[Token, None, str], timings: Timings):
        self._steps = steps
        self.timings = timings
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def __next__(self) -> Token:
        try:
            token = next(self._steps)
        except StopIteration as end:
            if end.value is not None:
                self.finish_reason = end.value
            raise StopIteration from None
        self.tokens.append(token.id)
        self.text += token.text
        return token

    def run(self) -> Generation:
        """Generate all tokens and return itself. Raises ``BackendError`` if logits are NaN or infinite."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End the generation; iteration then yields no more tokens."""
        self._steps.close()


class TextOutput:
    """The text of a growing list of tokens, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found is not None

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """Return the text that was held back until the end."""
        if self.stopped:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()
