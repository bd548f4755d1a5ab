"""Text to token ids and back: a tokenizer, incremental decoding, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.support.errors import InputError
from npu_compiler.support.panics import is_panic

_UNFINISHED = "\ufffd"  # decoders replace bytes that are not (yet) a character by it
_LONGEST_TAIL = 3  # bytes of an incomplete UTF-8 character, at most
_WINDOW = 16  # tokens after which complete text leaves the window; after four times as many, incomplete text does, too
_CONTEXT = 4  # tokens that stay in the window: decoders may treat the first token of a text differently


class Tokenizer:
    """A tokenizer of the ``tokenizers`` package, from the text of its ``tokenizer.json``.

    Attributes:
        size: tokens of the vocabulary, special ones included.

    Raises:
        InputError: the package is missing, or it refuses the text.
    """

    def __init__(self, text: str):
        try:
            import tokenizers
        except ImportError:
            raise InputError("text needs the package tokenizers: pip install 'npusim[llm]'") from None
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
            self._inner.no_truncation()
            self._inner.no_padding()
            self.size: int = self._inner.get_vocab_size(with_added_tokens=True)
        except BaseException as error:
            raise _refused("tokenizer.json", error) from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            special: add the tokens that begin and end a text, such as a begin token.

        Raises:
            InputError: the tokenizer cannot encode the text.
        """
        try:
            text.encode()
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        except UnicodeEncodeError as error:  # Python gives bytes that are not UTF-8 to programs as half characters
            raise InputError(f"the text is not UTF-8 at character {error.start}: convert it") from None
        except BaseException as error:
            raise _refused("the text cannot be encoded", error) from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: the tokenizer cannot decode the ids.
        """
        try:
            text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        except BaseException as error:
            raise _refused("the tokens cannot be decoded", error) from None
        return text


def _refused(what: str, error: BaseException) -> BaseException:
    """Return an ``InputError`` for the package's exceptions: bare ``Exception``, or ``PanicException``, which is a
    ``BaseException``."""
    known = isinstance(error, Exception) or is_panic(error)
    return InputError(f"{what}: {error}") if known else error


class Detokenizer:
    """Incremental decoding: every token adds text. Only complete characters are returned, and none changes later.

    Args:
        tokenizer: None: all text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # a window of the latest tokens
        self._shown = 0  # characters of the window's text that were returned

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes. It may be empty, or include text of earlier tokens."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        ready = max(len(text.rstrip(_UNFINISHED)), len(text) - _LONGEST_TAIL)
        if len(self._ids) >= 4 * _WINDOW:
            ready = len(text)
        new, self._shown = text[self._shown : ready], max(self._shown, ready)
        if len(self._ids) >= _WINDOW and self._shown == len(text):
            self._ids = self._ids[-_CONTEXT:]
            self._shown = len(self._tokenizer.decode(self._ids))
        return new

    def flush(self) -> str:
        """Return the remaining text at the end, with U+FFFD for bytes that did not become a character."""
        if self._tokenizer is None or not self._ids:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._shown += len(rest)
        return rest


class StopStrings:
    """Finds the first of several strings in a text that arrives bit by bit. Text that may begin one is held back.

    Attributes:
        found: the stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, new: str) -> str:
        """Return the text that can be shown after ``new`` arrived; if a stop string was found, the text up to it."""
        text = self._held + new
        at, stop = min(((text.find(s), s) for s in self._stops if s in text), default=(-1, None))
        if stop is not None:
            self.found, self._held = stop, ""
            return text[:at]
        longest = max(map(len, self._stops), default=1) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if self._begins_stop(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _begins_stop(self, tail: str) -> bool:
        return any(s.startswith(tail) for s in self._stops)

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held
