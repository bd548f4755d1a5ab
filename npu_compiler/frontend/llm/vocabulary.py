"""Tokenizers rebuilt from vocabularies that come without a ``tokenizer.json``, as the text of one."""

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
# How a text is cut before byte pairs merge, by GGUF's name for it: a regular expression, 'digits' (single digits, then
# GPT-2's expression) or 'gpt-2'.
PRETOKENIZERS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "digits",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("this model's tokenizer needs the package tokenizers: pip install 'npusim[llm]'") from None
    return tokenizers


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """The package raises bare ``Exception``, and what its Rust code panics with, which is not even that."""
    try:
        yield
    except BaseException as e:
        if not (isinstance(e, Exception) or is_panic(e)):
            raise
        raise WeightError(f"{what}: {e}") from None


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pretokenizer: str, bos: int | None
) -> str:
    """GPT-2's byte-level byte pair encoding. ``merges``: 'left right', best first. ``types``: of each token, as in
    GGUF. ``pretokenizer``: a key of ``PRETOKENIZERS``. ``bos``: the token that begins every text."""
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
    """SentencePiece's byte pair encoding: the pair whose union has the best score merges first; what is in no token
    becomes byte tokens '<0x00>' to '<0xFF>'. ``prefix_space``: texts begin with a space."""
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
