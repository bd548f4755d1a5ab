"""Builds the text of a ``tokenizer.json`` from vocabularies that come without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...support.errors import ConfigError, WeightError
from ...support.panics import is_panic

__all__ = ["PRETOKENIZERS", "byte_level_bpe", "sentencepiece_bpe"]

_LONGEST_TOKEN = 1024  # characters
CONTROL, USER_DEFINED = 3, 4  # token types of SentencePiece and GGUF

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_BY_DIGIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
# How a text is split before byte pairs merge, by GGUF's name of the rule: a regular expression, 'digits' (single
# digits, then GPT-2's expression) or 'gpt-2'.
PRETOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais"), "gpt-2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), "digits"),
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe"), _BY_THREE_DIGITS),
    **dict.fromkeys(("qwen2", "stablelm2"), _BY_DIGIT),
}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("this model's tokenizer needs the package tokenizers: pip install 'npusim[llm]'") from None
    return tokenizers


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Convert the package's exceptions, bare ``Exception`` and ``PanicException`` (a ``BaseException``), to
    ``WeightError``."""
    try:
        yield
    except BaseException as e:
        if not (isinstance(e, Exception) or is_panic(e)):
            raise
        raise WeightError(f"{what}: {e}") from None


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pretokenizer: str, bos: int | None
) -> str:
    """Return GPT-2's byte-level byte pair encoding as the text of a ``tokenizer.json``.

    Args:
        merges: 'left right', best first.
        types: GGUF's type of each token.
        pretokenizer: a key of ``PRETOKENIZERS``.
        bos: the token that begins every text, or None.

    Raises:
        ConfigError: the pretokenizer is unknown, or the package ``tokenizers`` is missing.
        WeightError: the merges do not fit the tokens.
    """
    if pretokenizer not in PRETOKENIZERS:
        known = ", ".join(PRETOKENIZERS)
        raise ConfigError(f"tokenizer.ggml.pre = {pretokenizer!r} is not supported; known: {known}")
    t = _library()
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    with _refusing("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"):
        model = t.models.BPE(vocabulary, pairs, ignore_merges=pretokenizer == "llama-bpe")
    tokenizer = t.Tokenizer(model)
    pre, rule = t.pre_tokenizers, PRETOKENIZERS[pretokenizer]
    if rule == "gpt-2":
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        cut = pre.Digits(individual_digits=True) if rule == "digits" else pre.Split(t.Regex(rule), "isolated")
        bytes_ = pre.ByteLevel(add_prefix_space=False, use_regex=rule == "digits")
        tokenizer.pre_tokenizer = pre.Sequence([cut, bytes_])
    if pretokenizer == "qwen2":
        tokenizer.normalizer = t.normalizers.NFC()
    tokenizer.decoder = t.decoders.ByteLevel()
    return _finished(tokenizer, tokens, types, bos)


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], bos: int | None, prefix_space: bool = True
) -> str:
    """Return SentencePiece's byte pair encoding as the text of a ``tokenizer.json``. The pair whose union has the best
    score merges first. Characters without a token become byte tokens '<0x00>' to '<0xFF>'.

    Args:
        scores: of each token.
        types: GGUF's type of each token.
        bos: the token that begins every text, or None.
        prefix_space: add a space before a text.

    Raises:
        ConfigError: the package ``tokenizers`` is missing.
        WeightError: a token is empty or too long, or the package refuses the vocabulary.
    """
    t = _library()
    longest = max(map(len, tokens), default=0)
    if not 0 < longest <= _LONGEST_TOKEN:  # the number of ways to split all tokens grows with its square
        raise WeightError(f"tokenizer.ggml.tokens: the longest has {longest} characters, from 1 to {_LONGEST_TOKEN} do")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = []
    for token in (tokens[i] for i in ranked):
        splits = ((token[:n], token[n:]) for n in range(1, len(token)))
        found = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        merges += sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    with _refusing("tokenizer.ggml.tokens"):
        model = t.models.BPE(vocabulary, merges, unk_token=tokens[0], fuse_unk=True, byte_fallback=True)
    tokenizer = t.Tokenizer(model)
    spaces = t.normalizers.Replace(" ", "▁")
    tokenizer.normalizer = t.normalizers.Sequence([t.normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    d = t.decoders
    strip = [d.Strip(" ", 1, 0)] if prefix_space else []
    tokenizer.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), *strip])
    return _finished(tokenizer, tokens, types, bos)


def _finished(tokenizer: Any, tokens: Sequence[str], types: Sequence[int], bos: int | None) -> str:
    t = _library()
    with _refusing("tokenizer.ggml"):
        return _text(t, tokenizer, tokens, types, bos)


def _text(t: Any, tokenizer: Any, tokens: Sequence[str], types: Sequence[int], bos: int | None) -> str:
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        special = kind == CONTROL
        chosen = [token for token, of in zip(tokens, types, strict=False) if of == kind]
        add([t.AddedToken(token, special=special, normalized=False) for token in chosen])
    if bos is not None:
        begin = tokens[bos]
        tokenizer.post_processor = t.processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, bos)]
        )
    text: str = tokenizer.to_str()
    return text
