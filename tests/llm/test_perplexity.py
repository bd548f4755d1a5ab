"""Perplexity through compiled prompts: beside PyTorch, of weight formats, and from the command line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from npu_compiler.support import progress  # noqa: E402
from npu_compiler.support.errors import BackendError, InputError  # noqa: E402
from npu_runtime.llm.scoring import Scorer, compare, perplexity, windows  # noqa: E402
from npusim import cli  # noqa: E402

from . import small_model, tiny  # noqa: E402

CONTEXT = 200  # prompts of 128 cover it in two runs, of which the second one begins earlier
TOKENS = tiny.text_ids(450, 256)
TEXT = "The first token of a text is not scored; every other one is, once. " * 4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from small_model.own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def scorers(model: Path) -> dict[str, Scorer]:
    found = {w: Scorer.load(model, context=CONTEXT, weights=w, threads=1) for w in ("none", "auto", "q8_0", "q4_0")}
    found["q8_0 int8"] = Scorer.load(model, context=CONTEXT, weights="q8_0", threads=1, kv_cache="int8")
    return found


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def eager_perplexity(path: Path, tokens: list[int], context: int, stride: int) -> tuple[int, float]:
    """The tokens scored by transformers, whose loss ignores labels of -100, and their perplexity."""
    network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    total, count, done, ids = 0.0, 0, 0, torch.tensor([tokens])
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : done - begin] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(network(part, labels=labels).loss) * scored
        count, done = count + scored, end
        if end == len(tokens):
            break
    return count, float(np.exp(total / count))


@pytest.mark.parametrize("stride", [CONTEXT, 70, None])
def test_perplexity_is_that_of_pytorch(model: Path, scorers: dict[str, Scorer], stride: int | None) -> None:
    count, expected = eager_perplexity(model, TOKENS, CONTEXT, stride or CONTEXT // 2)
    found = perplexity(scorers["none"], TOKENS, stride)
    assert found.scored == count
    assert found.perplexity == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("count", "context", "stride"), [(2, 8, 4), (8, 8, 8), (9, 8, 8), (30, 8, 3), (30, 7, 7)])
def test_windows_score_each_token_once_after_the_context_that_the_stride_leaves(
    count: int, context: int, stride: int
) -> None:
    scored = []
    for begin, first, end in windows(count, context, stride):
        assert 0 <= begin < first <= end <= begin + context
        assert begin == 0 or stride == context or first - begin >= context - stride
        scored += range(first, end)
    alone = {begin for begin in range(0, count, stride)} if stride == context else {0}
    assert scored == [i for i in range(count) if i not in alone]


def test_a_lossless_format_gives_the_same_number(scorers: dict[str, Scorer]) -> None:
    ours, reference, difference = compare(scorers["auto"], scorers["none"], TOKENS)
    assert ours == reference == perplexity(scorers["none"], TOKENS)
    assert (difference.mean_kl, difference.same_top1, difference.rms_logits) == (0, 1, 0)


def test_fewer_bits_differ_more(scorers: dict[str, Scorer]) -> None:
    eight, four = (compare(scorers[w], scorers["none"], TOKENS)[2] for w in ("q8_0", "q4_0"))
    assert 0 < 10 * eight.mean_kl < four.mean_kl
    assert 0 < 3 * eight.rms_logits < four.rms_logits
    assert four.same_top1 < eight.same_top1 < 1


def test_the_difference_is_that_of_the_logits(scorers: dict[str, Scorer]) -> None:
    tokens = TOKENS[:90]
    _, _, difference = compare(scorers["q4_0"], scorers["none"], tokens)
    ours, reference = (torch.tensor(np.array(scorers[w].logits()[:89])).double() for w in ("q4_0", "none"))
    p, q = reference.log_softmax(-1), ours.log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    assert difference.mean_kl == pytest.approx(float(kl), rel=1e-9)
    assert difference.rms_logits == pytest.approx(float((ours - reference).square().mean().sqrt()), rel=1e-9)
    assert difference.same_top1 == float((ours.argmax(-1) == reference.argmax(-1)).double().mean())


def test_progress_counts_tokens(scorers: dict[str, Scorer]) -> None:
    steps: dict[str, progress.Step] = {}
    with progress.listening(lambda step: steps.update({step.text: step})):
        perplexity(scorers["none"], TOKENS)
    (step,) = steps.values()
    assert (step.done, step.total, step.finished) == (449, 449, True)


def test_arguments(scorers: dict[str, Scorer], model: Path) -> None:
    for stride in (0, CONTEXT + 1, True, 1.5):
        with pytest.raises(InputError, match=f"stride={stride}: it takes a whole number from 1 to {CONTEXT}"):
            perplexity(scorers["none"], TOKENS, stride)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokens of the text: 1; a perplexity needs two"):
        perplexity(scorers["none"], [3])
    with pytest.raises(InputError, match="context=1: it takes a whole number from 2"):
        Scorer.load(model, context=1)


def test_logits_that_are_nan_are_an_error(scorers: dict[str, Scorer], monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorers["none"]
    read = scorer.backend.start_read
    monkeypatch.setattr(scorer.backend, "start_read", lambda out, b: (read(out, b), out.fill(np.nan)))
    with pytest.raises(BackendError, match="the model's logits hold nan; its weights are damaged"):
        perplexity(scorer, TOKENS)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["perplexity", *argv, "--context", str(CONTEXT), "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    data: dict[str, Any] = json.loads(out)
    return data


def test_command(
    model: Path, scorers: dict[str, Scorer], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    data = as_json(
        capsys, str(model), text, "--weights", "q8_0", "--kv-cache", "int8", "--against", "none", "--stride", "90"
    )
    mine = scorers["q8_0 int8"]
    tokens = mine.encode(TEXT)
    ours, reference, difference = compare(mine, scorers["none"], tokens, 90)
    assert data == {
        "schema_version": 1, "command": "perplexity", "model": "small", "target": "cpu", "dtype": "float32",
        "context": CONTEXT, "stride": 90, "text_tokens": len(TEXT), "scored_tokens": len(TEXT) - 1, "weights": "q8_0",
        "weight_bytes": mine.weights.nbytes, "kv_cache": "int8", "kv_cache_bytes": mine.state_bytes,
        "perplexity": ours.perplexity, "nll": ours.nll,
        "reference": {
            "weights": "none", "weight_bytes": scorers["none"].weights.nbytes, "kv_cache": "float32",
            "kv_cache_bytes": scorers["none"].state_bytes, "perplexity": reference.perplexity, "nll": reference.nll,
        },
        "difference": {
            "mean_kl": difference.mean_kl, "same_top1": difference.same_top1, "rms_logits": difference.rms_logits,
        },
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    alone = as_json(capsys, str(model), "-", "--weights", "q8-0", "--kv-cache", "int8", "--stride", "90")
    assert alone["perplexity"] == ours.perplexity and not {"reference", "difference"} & set(alone)
    argv = [str(model), text, "--context", str(CONTEXT), "--weights", "q8_0", "--against", "none", "--stride", "90"]
    argv += ["--kv-cache", "int8"]
    assert cli.main(["perplexity", *argv]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert f"{ours.perplexity:.4f}" in out and f"{reference.perplexity:.4f}" in out and "KL divergence" in out


@pytest.mark.parametrize(
    ("content", "extra", "message"),
    [
        (b"", (), "text.txt: the text is empty"),
        (b" \n", (), "text.txt: the text is empty"),
        (b"x", (), "tokens of the text: 1; a perplexity needs two"),
        (b"ab\xff", (), "text.txt: byte 2 is not UTF-8"),
        (None, (), "text.txt: cannot be read: No such file or directory"),
        (b"text", ("--weights", "q9"), "unknown weight format 'q9'; known: bf16c12"),
        (b"text", ("--against", "q9"), "unknown weight format 'q9'; known: bf16c12"),
        (b"text", ("--stride", "201"), "stride=201: it takes a whole number from 1 to 200"),
        (b"text", ("--context", "300"), "small was made for at most 256 positions"),
    ],
)
def test_wrong_input_is_one_clear_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, extra: Any, message: str
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    argv = ["perplexity", str(model), str(file), "--weights", "none", "--context", str(CONTEXT), *extra]
    capsys.readouterr()
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("npusim: ") and message in err and len(err.splitlines()) == 1


def test_a_compiled_program_has_no_scores(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.npubin"
    file.write_bytes(b"")
    assert cli.main(["perplexity", str(file), text]) == 1
    assert "is compiled to generate text; scoring needs the model that it was made of" in capsys.readouterr().err
