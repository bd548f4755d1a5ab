"""The language model runtime on a small random llama: against PyTorch, across restarts, and wherever users go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from npu_compiler.artifact.program import BufferSpec  # noqa: E402
from npu_compiler.frontend.llm import load_decoder, open_checkpoint  # noqa: E402
from npu_compiler.support.dtypes import numpy_dtype  # noqa: E402
from npu_compiler.support.errors import InputError  # noqa: E402
from npu_runtime import CPUBackend  # noqa: E402
from npu_runtime.llm.kv_snapshot import load_snapshot, save_snapshot  # noqa: E402
from npu_runtime.llm.model import LLM  # noqa: E402
from npu_runtime.state import State  # noqa: E402

from .small_model import MAX_LEN, TEXT  # noqa: E402


@pytest.fixture(scope="module")
def reference(model: Path) -> np.ndarray:
    """Logits float32[MAX_LEN, vocab] after each token of TEXT, by PyTorch."""
    decoder = load_decoder(open_checkpoint(model), MAX_LEN)
    rows = []
    with torch.inference_mode():
        for i, token in enumerate(TEXT):
            rows.append(decoder(torch.tensor([[token]]), torch.tensor([i]), torch.tensor([0]))[0].numpy())
    return np.stack(rows)


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("prompt", [1, 2, 7, 32, 33, 64, 65, 95, 96])
def test_teacher_forcing(llm: LLM, reference: np.ndarray, prompt: int) -> None:
    found = llm.logits(TEXT, prompt)
    assert found.shape == (MAX_LEN - prompt + 1, llm.vocab) and found.dtype == np.float32
    np.testing.assert_allclose(found, reference[prompt - 1 :], rtol=0, atol=2e-5 * np.abs(reference).max())


def test_greedy_text_is_the_argmax_of_the_reference(llm: LLM, model: Path) -> None:
    decoder = load_decoder(open_checkpoint(model), MAX_LEN)
    tokens = list(TEXT[:40])
    with torch.inference_mode():
        for i in range(60):
            start = 0 if i == 0 else len(tokens) - 1
            fed = tokens[start:]
            logits = decoder(torch.tensor([fed]), torch.arange(start, len(tokens)), torch.tensor([len(fed) - 1]))
            tokens.append(int(logits[0].argmax()))
            if len(tokens) > MAX_LEN:
                break
    answer = llm.generate(TEXT[:40], ignore_eos=True, stream=False)
    assert answer.tokens == tokens[40:]
    assert answer.finish_reason == "context" and len(answer.tokens) == MAX_LEN - 40 + 1


def test_logprobs(llm: LLM, reference: np.ndarray) -> None:
    answer = llm.generate(TEXT[:20], max_tokens=1, logprobs=True, temperature=2.0, seed=1, top_k=3)
    (token,) = list(answer)
    expected = torch.log_softmax(torch.from_numpy(reference[19]).double(), -1)[token.id]
    assert token.logprob == pytest.approx(float(expected), abs=1e-4)
    assert next(llm.generate(TEXT[:20], max_tokens=1)).logprob is None


# ---------------------------------------------------------------------------------------------------------- generation


def test_text_and_tokens_agree(llm: LLM) -> None:
    generation = llm.generate("hello", max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    texts = [token.text for token in generation]
    assert generation.text == "".join(texts) == llm.decode(generation.tokens)
    assert generation.finish_reason == "length" and len(generation.tokens) == 40
    assert next(generation, None) is None and generation.finish_reason == "length"


def test_seeds_make_answers_repeatable_whatever_came_before(llm: LLM) -> None:
    def answer(seed: int) -> list[int]:
        return llm.generate(TEXT[:50], max_tokens=20, temperature=1.0, top_p=0.95, seed=seed, stream=False).tokens

    first = answer(1)
    llm.generate("something else", max_tokens=3, stream=False)
    assert answer(1) == first
    assert answer(1) == first  # now with the prompt's first chunk in the caches
    assert answer(2) != first


def test_stop_tokens_and_strings(llm: LLM) -> None:
    full = llm.generate(TEXT[:10], max_tokens=30, ignore_eos=True, stream=False)
    some = full.tokens[6]
    cut = llm.generate(TEXT[:10], max_tokens=30, ignore_eos=True, stop=[some], stream=False)
    assert cut.tokens == full.tokens[: full.tokens.index(some) + 1] and cut.finish_reason == "stop"
    assert cut.text == llm.decode(cut.tokens[:-1])  # a stop token has no text
    letters = llm.generate("abc", max_tokens=60, temperature=1.5, seed=3, ignore_eos=True, stream=False).text
    stop = letters[4:7]  # spans several tokens
    halted = llm.generate("abc", max_tokens=60, temperature=1.5, seed=3, ignore_eos=True, stop=stop, stream=False)
    assert halted.finish_reason == "stop" and halted.text == letters[: letters.index(stop)]


def test_end_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    tokens = llm.generate(TEXT[:10], max_tokens=10, ignore_eos=True, stream=False).tokens
    monkeypatch.setattr(llm, "manifest", dataclasses.replace(llm.manifest, eos_ids=(tokens[4],)))
    answer = llm.generate(TEXT[:10], max_tokens=10, stream=False)
    assert answer.finish_reason == "stop" and answer.tokens == tokens[: tokens.index(tokens[4]) + 1]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.encode(messages)
    assert llm.tokenizer.decode(ids) == "hi" and ids[0] == 257 and ids[-1] == 258  # <|user|> … <|assistant|>
    by_ids = llm.generate(ids, max_tokens=5, stream=False)
    assert llm.chat(messages, max_tokens=5, stream=False).tokens == by_ids.tokens
    assert llm.chat("hi", max_tokens=5, stream=False).tokens == by_ids.tokens


def test_a_continued_conversation_is_not_computed_again(llm: LLM) -> None:
    llm.reset()
    first = llm.generate(TEXT[:20], max_tokens=6, ignore_eos=True, stream=False)
    longer = [*TEXT[:20], *first.tokens, *TEXT[:10]]
    second = llm.generate(longer, max_tokens=6, ignore_eos=True, stream=False)
    assert second.timings.reused_tokens == 25  # the last token of an answer is never fed back
    llm.reset()
    fresh = llm.generate(longer, max_tokens=6, ignore_eos=True, stream=False)
    assert fresh.timings.reused_tokens == 0 and fresh.tokens == second.tokens


def test_reuse_never_changes_a_bit_otherwise(llm: LLM) -> None:
    """A prompt that shares only its beginning with the caches reuses whole chunks, as a fresh start computes them."""

    def last_logits(tokens: list[int]) -> np.ndarray:
        generation = llm.generate(tokens, max_tokens=1)
        next(generation)
        reused.append(generation.timings.reused_tokens)
        return llm._runs[32]._logits.to_numpy()

    reused: list[int] = []
    other = [*TEXT[:70], 5, 6, 7, 8, 9]
    llm.reset()
    fresh = last_logits(other)
    last_logits(TEXT[:80])  # shares 70 tokens: 64 of them in whole chunks
    again = last_logits(other)
    assert reused == [0, 64, 64]
    np.testing.assert_array_equal(again, fresh)


def test_a_new_generation_ends_the_old_one(llm: LLM) -> None:
    old = llm.generate("abc", max_tokens=5, ignore_eos=True)
    next(old)
    next(llm.generate("xyz", max_tokens=5, ignore_eos=True))
    with pytest.raises(InputError, match="another one"):
        next(old)


def test_timings(llm: LLM) -> None:
    t = llm.generate(TEXT[:33], max_tokens=4, ignore_eos=True, stream=False).timings
    assert t.prompt_tokens == 33 and t.generated_tokens == 4
    assert t.prefill_per_second == pytest.approx((33 - t.reused_tokens) / t.prefill_seconds)
    assert t.decode_per_second == pytest.approx(3 / t.decode_seconds)
    assert t.first_token_seconds >= t.prefill_seconds
    assert "33 tokens" in str(t) and json.dumps(t.to_dict())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([*TEXT, 1], {}, f"the prompt has 97 tokens, but the context holds {MAX_LEN}.*max_len.*256"),
        (TEXT[:90], {"max_tokens": 8}, "ask for at most 7 tokens"),
        ([], {}, "empty"),
        ([1, 320], {}, "token id 320 is outside of the vocabulary, which has 320"),
        ([1, -1], {}, "token id -1"),
        ([1, "x"], {}, r"prompt\[1\] is 'x'"),
        ([1.5], {}, "1.5"),
        ([None], {}, r"prompt\[0\] is None"),
        ([True], {}, r"prompt\[0\] is True"),
        (b"text", {}, "not a bytes"),
        (bytearray(b"text"), {}, "not a bytearray"),
        (np.array(5), {}, r"one dim, not the shape \[\]"),
        (np.ones((2, 2), np.int64), {}, r"one dim, not the shape \[2, 2\]"),
        (np.ones(2), {}, r"prompt\[0\] is"),
        (TEXT[:4], {"max_tokens": 1.5}, "max_tokens=1.5: it takes a whole number from 1"),
        (TEXT[:4], {"max_tokens": float("nan")}, "max_tokens=nan"),
        (TEXT[:4], {"max_tokens": True}, "max_tokens=True"),
        (TEXT[:4], {"max_tokens": "5"}, "max_tokens='5'"),
        (TEXT[:4], {"temperature": "1"}, "temperature='1'"),
        (TEXT[:4], {"temperature": None}, "temperature=None"),
        (TEXT[:4], {"temperature": 10**400}, "temperature=a 1329-bit integer"),
        (TEXT[:4], {"top_k": 1.5}, "top_k=1.5"),
        (TEXT[:4], {"top_k": "x"}, "top_k='x'"),
        (TEXT[:4], {"top_p": []}, "top_p=a list"),
        (TEXT[:4], {"min_p": True}, "min_p=True"),
        (TEXT[:4], {"repetition_penalty": "x"}, "repetition_penalty='x'"),
        (TEXT[:4], {"seed": 1.5}, "seed=1.5"),
        (TEXT[:4], {"seed": "x"}, "seed='x'"),
        (TEXT[:4], {"stop": 1.5}, "stop=1.5: it takes texts and token ids"),
        (TEXT[:4], {"stop": [None]}, "stop holds None"),
        (TEXT[:4], {"stop": b"x"}, "stop=a bytes"),
        (5, {}, "not a int"),
        (None, {}, "not a NoneType"),
        (TEXT[:4], {"max_tokens": 0}, "max_tokens=0"),
        (TEXT[:4], {"temperature": -1}, "temperature=-1"),
        ([{"role": "user"}], {}, r"messages\[0\]"),
    ],
)
def test_wrong_requests(llm: LLM, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(prompt, **options)


def test_arguments_of_numpy_and_none(llm: LLM) -> None:
    expected = llm.generate(TEXT[:4], max_tokens=3, ignore_eos=True, stream=False).tokens
    torch = pytest.importorskip("torch")
    for prompt in (np.array(TEXT[:4], np.uint16), tuple(np.array(TEXT[:4])), [torch.tensor(i) for i in TEXT[:4]]):
        options = {"max_tokens": np.int32(3), "temperature": np.float32(0), "top_k": np.int64(0), "stop": None}
        assert llm.generate(prompt, ignore_eos=True, stream=False, **options).tokens == expected


def test_other_arguments(llm: LLM, tmp_path: Path) -> None:
    for prompt in (0, 5, 1.0, None, "1", True):
        with pytest.raises(InputError, match="prompt="):
            llm.logits([1, 2], prompt)  # type: ignore[arg-type]
    for tokens in (None, 5, [None], np.ones((1, 2), np.int64), b"ab"):
        with pytest.raises(InputError, match="prompt"):
            llm.logits(tokens)  # type: ignore[arg-type]
    for messages in (None, [], 5, np.array([1, 2])):
        with pytest.raises(InputError):
            llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="decoded"):
        llm.decode([-1])
    for path in ("a\0b", None, 5):
        with pytest.raises(InputError):
            llm.save_state(path)  # type: ignore[arg-type]
        with pytest.raises(InputError):
            llm.load_state(path)  # type: ignore[arg-type]
    for model in ("a\0b", "x" * 5000, None, 5):
        with pytest.raises(InputError):
            LLM.load(model)  # type: ignore[arg-type]


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    answer = llm.generate(TEXT, ignore_eos=True, stream=False)
    assert len(answer.tokens) == 1 and answer.finish_reason == "context"


# --------------------------------------------------------------------------------------------------------- saved state


def test_saved_conversation(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    llm.reset()
    first = llm.generate(TEXT[:40], max_tokens=5, ignore_eos=True, stream=False)
    llm.save_state(path)
    held = llm.tokens
    longer = [*TEXT[:40], *first.tokens, 1, 2, 3]
    expected = llm.generate(longer, max_tokens=10, ignore_eos=True, stream=False)
    assert path.stat().st_size < 44 * 2 * 2 * 2 * 16 * 4 + 2000  # valid positions only
    llm.reset()
    llm.load_state(path)
    assert llm.tokens == held
    answer = llm.generate(longer, max_tokens=10, ignore_eos=True, stream=False)
    assert answer.tokens == expected.tokens and answer.timings.reused_tokens == 44


def test_saved_caches_of_8_bits(tmp_path: Path) -> None:
    shape, rng = (1, 2, 16, 4), np.random.default_rng(0)
    buffers = [BufferSpec(i, "state", d, shape, f"{d}_cache") for i, d in enumerate(("int8", "float8_e4m3fn"))]
    program: Any = SimpleNamespace(buffers=buffers)
    filled = {b.name: rng.integers(-9, 9, shape).astype(numpy_dtype(b.dtype)) for b in buffers}
    backend = CPUBackend(1)
    save_snapshot(tmp_path / "state", State(program, backend, filled), [5, 6, 7], 16, b"model")
    empty = State(program, backend, {b.name: np.zeros(shape, numpy_dtype(b.dtype)) for b in buffers})
    assert load_snapshot(tmp_path / "state", empty, 16, b"model") == [5, 6, 7]
    for key, array in empty.snapshot().items():
        np.testing.assert_array_equal(array[:, :, :3].astype(np.float32), filled[key][:, :, :3].astype(np.float32))


def test_states_that_do_not_fit(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate(TEXT[:40], max_tokens=1, stream=False)
    held = llm.tokens
    path = tmp_path / "talk.safetensors"
    llm.save_state(path)
    with pytest.raises(InputError, match="cannot be read"):
        llm.load_state(tmp_path / "none")
    (tmp_path / "text").write_text("nothing of the kind, but long enough")
    with pytest.raises(InputError, match="not a saved state"):
        llm.load_state(tmp_path / "text")
    arrays = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({"x": np.zeros(1)}, tmp_path / "other")
    with pytest.raises(InputError, match="holds no tokens"):
        llm.load_state(tmp_path / "other")
    cut = {k: v[:, :, :5] if "cache" in k else v for k, v in arrays.items()}
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in cut.items()}, tmp_path / "cut")
    with pytest.raises(InputError, match="expected"):
        llm.load_state(tmp_path / "cut")
    scaled = arrays | {f"{k}.scale": v for k, v in arrays.items() if "cache" in k}  # as for kv_cache="int8"
    safetensors.numpy.save_file(scaled, tmp_path / "scaled")
    with pytest.raises(InputError, match="other caches than the model; it was saved with another kv_cache, or by"):
        llm.load_state(tmp_path / "scaled")
    for tokens in (np.array(5), np.ones((1, 40), np.int64), np.ones(40, np.int32)):
        safetensors.numpy.save_file({**arrays, "npusim.tokens": tokens}, tmp_path / "scalar")
        with pytest.raises(InputError, match="not a list of int64"):
            llm.load_state(tmp_path / "scalar")
    with pytest.raises(InputError, match="cannot be written"):
        llm.save_state(tmp_path / "no" / "where")
    monkeypatch.setattr(llm, "_identity", b"x" * 32)
    with pytest.raises(InputError, match="other weights"):
        llm.load_state(path)
    monkeypatch.undo()
    monkeypatch.setattr(llm, "max_len", 20)
    with pytest.raises(InputError, match="the state has 40 tokens, but the context holds 20"):
        llm.load_state(path)
    assert llm.tokens == held
