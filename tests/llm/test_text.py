"""Text in and out: detokenising token by token, stop strings, chat templates, cutting prompts into chunks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.support.errors import InputError
from npu_runtime.llm.chat_template import render_chat
from npu_runtime.llm.chunks import plan_chunks
from npu_runtime.llm.generation import TextOutput
from npu_runtime.llm.tokenizer import Detokenizer, StopStrings, Tokenizer

from . import small_model

pytest.importorskip("tokenizers")
TOKENIZER = Tokenizer(small_model.tokenizer_json())


def pieces(ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@given(st.text(max_size=80))
def test_valid_text_comes_whole_and_only_complete_characters(text: str) -> None:
    found = pieces(TOKENIZER.encode(text, special=False))
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found) or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_come_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids)


def test_characters_appear_with_their_last_byte() -> None:
    assert pieces(TOKENIZER.encode("a😀é", special=False)) == ["a", "", "", "", "😀", "", "é", ""]
    assert pieces(TOKENIZER.encode("😀", special=False)[:3]) == ["", "", "", "\ufffd"]


def test_endless_broken_bytes_do_not_pile_up() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    broken = TOKENIZER.encode("😀", special=False)[1]
    shown = sum(len(detokenizer.push(broken)) for _ in range(500))
    assert shown >= 490 and len(detokenizer._ids) <= 64


def test_spaces_survive_a_decoder_that_strips_the_first() -> None:
    """SentencePiece tokens carry their space, which is dropped at the start of a text only."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    inner = Inner(models.BPE(vocab={"▁a": 0, "▁b": 1, "<0xC3>": 2, "<0xA9>": 3}, merges=[]))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(inner.to_str())
    ids = [0, 1, 2, 3, *[1, 0] * 30]
    assert pieces(ids, tokenizer)[:5] == ["a", " b", "", "é", " b"]
    assert "".join(pieces(ids, tokenizer)) == tokenizer.decode(ids)


@settings(max_examples=200)
@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings(parts: list[str], stops: list[str]) -> None:
    whole, search = "".join(parts), StopStrings(stops)
    shown = ""
    for part in parts:
        shown += search.push(part)
        if search.found:
            break
    shown += search.flush()
    ends = [whole.find(s) + len(s) for s in stops if s in whole]
    assert (search.found is not None) == bool(ends)
    if search.found:
        # the text ends before a stop string, and none was complete earlier
        assert whole.startswith(shown + search.found)
        assert not any(s in shown for s in stops)
    else:
        assert shown == whole


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    search = StopStrings(["</end>"])
    assert [search.push(t) for t in ("x<", "/e", "a<", "/end", "> y")] == ["x", "", "</ea", "", ""]
    assert search.found == "</end>"


def test_output_combines_both() -> None:
    output = TextOutput(TOKENIZER, ["é!"])
    ids = TOKENIZER.encode("aé?é!b", special=False)
    assert [output.push(i) for i in ids[:-1]] == ["a", "", "", "é?", "", "", ""]
    assert output.stopped and output.finish() == ""
    rest = TextOutput(TOKENIZER, ["é!"])
    assert "".join(rest.push(i) for i in TOKENIZER.encode("xé", special=False)) + rest.finish() == "xé"


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(small_model.TEMPLATE, messages, {"eos_token": "<|end|>"}) == "<|user|>hi<|end|><|assistant|>"
    odd = [{"role": "é", "content": "<"}]
    assert render_chat("{{ messages | tojson }}", odd, {}) == '[{"role": "é", "content": "<"}]'


_NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (None, [{"role": "user", "content": "x"}], "no chat template"),
        ("x", [], "no messages"),
        ("x", [{"role": "user"}], r"messages\[0\]"),
        ("x", ["hi"], r"messages\[0\]"),
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{% if %}", [{"role": "user", "content": "x"}], "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "unsafe"),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], "not safely|unsafe"),
        ("{{ 1 / 0 }}", [{"role": "user", "content": "x"}], "division"),
        ("{{ missing.field }}", [{"role": "user", "content": "x"}], "undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", [{"role": "user", "content": "x"}], "recursion"),
        ("{{ 'a' * 20000000000 }}", [{"role": "user", "content": "x"}], "memory"),
        ("{{ '%20000000000d' % 1 }}", [{"role": "user", "content": "x"}], "memory"),
        ("{{ 'a'.zfill(20000000000) }}", [{"role": "user", "content": "x"}], "memory"),
        ("{{ 'a' * 20000000 }}", [{"role": "user", "content": "x"}], "has 20000000 characters"),
        (_NESTED_LOOPS, [{"role": "user", "content": "x"}], "takes more than 1 second"),
        ("{{ 99999999 ** 99999999 }}", [{"role": "user", "content": "x"}], "takes more than 1 second"),
        ("x", [{"role": "user", "content": object()}], "something else than text, numbers, lists and dicts"),
    ],
)
def test_chat_template_errors(template: str | None, messages: list[Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        render_chat(template, messages, {})


def test_chat_templates_after_one_that_was_too_much() -> None:
    messages = [{"role": "user", "content": "x"}]
    for _ in range(2):
        with pytest.raises(InputError, match="takes more than"):
            render_chat(_NESTED_LOOPS, messages, {})
        assert render_chat("{{ messages[0].content }}", messages, {}) == "x"


def test_chat_templates_in_threads_and_children() -> None:
    """Every answer belongs to its request; a child of a fork has a worker of its own."""

    def ask(text: str) -> bool:
        return render_chat("{{ messages[0].content }}", [{"role": "user", "content": text}], {}) == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, [str(i) * 1000 for i in range(40)]))
    child = os.fork()
    if child == 0:
        os._exit(0 if ask("child") else 1)
    assert ask("parent")
    assert os.waitpid(child, 0)[1] == 0


def test_damaged_tokenizer() -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer("{}")


@settings(max_examples=300)
@given(st.integers(0, 300), st.integers(1, 300), st.sampled_from([(1,), (1, 8), (1, 32, 128), (1, 4, 32)]))
def test_chunks_cover_the_prompt_and_stay_within_the_context(begin: int, count: int, sizes: tuple[int, ...]) -> None:
    end, max_len = begin + count, max(begin + count, *sizes)
    chunks = plan_chunks(begin, end, sizes, max_len)
    assert chunks[0].start <= begin and chunks[-1].stop == end
    assert [c.size for c in chunks] == sorted((c.size for c in chunks), reverse=True)
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert chunk.start >= 0 and chunk.start + chunk.size <= max_len  # padding included
        assert chunk.start < chunk.stop <= chunk.start + chunk.size
        assert before is None or chunk.start <= before.stop < chunk.stop


def test_chunk_sizes_are_chosen_by_cost() -> None:
    def sizes(count: int) -> list[int]:
        return [c.size for c in plan_chunks(0, count, (1, 32, 128), 4096)]

    assert sizes(1) == [1]
    assert sizes(5) == [32]
    assert sizes(128) == [128]
    assert sizes(300) == [128, 128, 32, 32]
    assert sizes(129) == [128, 1]
    assert sizes(120) == [128]
