"""The command line for language models: generate, bench and compile."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from npusim import cli  # noqa: E402

from . import small_model  # noqa: E402

MAX_LEN = "48"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from small_model.own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    return str(small_model.write_model(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def program(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "small.npubin"
    assert cli.main(["compile", model, "-o", str(path), "--max-len", MAX_LEN]) == 0
    return path


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == status
    out, err = capsys.readouterr()
    assert not err
    data: dict[str, Any] = json.loads(out)
    return data


def test_generate(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", model, "-p", "hello", "--max-tokens", "9", "--max-len", MAX_LEN]
    data = as_json(capsys, *argv)
    assert data["command"] == "generate" and len(data["tokens"]) == 9 and data["finish_reason"] == "length"
    assert data["max_len"] == int(MAX_LEN) and data["timings"]["prompt_tokens"] == 5
    assert cli.main([*argv, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == data["text"] + "\n"
    assert "answer 9 tokens" in err and "loaded in" in err
    assert cli.main(argv) == 0
    assert not capsys.readouterr().err


def test_generate_from_standard_input_and_sampling(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", model, "--max-len", MAX_LEN, "--max-tokens", "12", "--temperature", "1.2", "--top-k", "50"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    first = as_json(capsys, *argv, "--seed", "4")
    again = as_json(capsys, *argv, "--seed", "4", "-p", "hello")
    assert first["tokens"] == again["tokens"]
    assert as_json(capsys, *argv, "--seed", "5", "-p", "hello")["tokens"] != first["tokens"]


def test_a_prompt_that_is_not_utf8(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line and on standard input, which Python decodes strictly in most locales."""
    argv = ["generate", model, "--max-len", MAX_LEN]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", "strict"))
    for more in ([], ["-p", "a\udcff"]):
        assert cli.main([*argv, *more]) == 1
        assert capsys.readouterr().err == "npusim: the text is not UTF-8 at character 1: convert it\n"


def test_chat(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", model, "--chat", "-p", "hi", "--max-tokens", "3", "--max-len", MAX_LEN]
    assert as_json(capsys, *argv)["timings"]["prompt_tokens"] == 5  # role, two letters, end, role
    assert as_json(capsys, *argv, "--system", "be")["timings"]["prompt_tokens"] == 9


def test_conversation(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    talk = Terminal("hello\n\nyou\n/reset\nhi\n" + "x" * 60 + "\n/quit\nnot read\n")
    monkeypatch.setattr(sys, "stdin", talk)
    assert cli.main(["generate", model, "--chat", "--max-tokens", "4", "--max-len", MAX_LEN, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.count("> ") == 7 and talk.readline() == "not read\n"
    assert err.count("answer ") == 3 and "reused" in err
    assert "the context holds 48" in err and "/reset starts" in err
    monkeypatch.setattr(sys, "stdin", Terminal(""))  # Ctrl-D
    assert cli.main(["generate", model, "--chat", "--max-len", MAX_LEN]) == 0


def test_streaming_ends_quietly_when_the_reader_leaves(model: str, cache: Path) -> None:
    command = f"{sys.executable} -m npusim generate {model} -p hello --max-len {MAX_LEN} | head -c 1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], env=environment, capture_output=True)
    assert len(done.stdout) == 1 and not done.stderr and done.returncode == 0


def test_compiled_program(program: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(p.name for p in program.parent.iterdir()) == ["small.llm.json", "small.npubin", "small.safetensors"]
    argv = ["-p", "hello", "--max-tokens", "9"]
    ours = as_json(capsys, "generate", str(program), *argv)
    assert ours["tokens"] == as_json(capsys, "generate", model, "--max-len", MAX_LEN, *argv)["tokens"]
    described = as_json(capsys, "describe", str(program))["program"]
    assert {e["name"] for e in described["entries"]} == {"decode", "prefill_32"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-len", "50"], "compiled with max_len=48, not 50"),
        (["--dtype", "bfloat16"], "compiled with dtype=float32, not bfloat16"),
        (["-p", "x" * 49], "the prompt has 49 tokens, but the context holds 48"),
        (["--max-tokens", "100"], "ask for at most 44 tokens"),
        (["--temperature", "-1"], "temperature=-1"),
    ],
)
def test_generate_errors(program: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str) -> None:
    capsys.readouterr()
    assert cli.main(["generate", str(program), "-p", "hello", *extra]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("npusim: ") and message in err and "Traceback" not in err


def test_a_weight_with_nan_is_named(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_model.write_model(tmp_path / "nan")
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays["model.layers.1.mlp.down_proj.weight"][2, 3] = float("nan")
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    capsys.readouterr()
    assert cli.main(["generate", str(folder), "-p", "hello", "--max-len", MAX_LEN, "-q"]) == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "npusim: warning: weight 'model.layers.1.mlp.down_proj.weight' contains NaN"
    assert error.startswith("npusim: the model's logits hold nan; its weights are damaged")


@pytest.mark.parametrize(
    ("file", "size", "message"),
    [
        ("model.safetensors", -100, "truncated; download or copy it again"),
        ("model.safetensors", 50, "not a safetensors file, or is truncated"),
        ("tokenizer.json", -100, "tokenizer.json cannot be read as JSON"),
        ("config.json", -10, "config.json cannot be read as JSON"),
    ],
)
def test_truncated_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, size: int, message: str
) -> None:
    path = small_model.write_model(tmp_path / "short") / file
    path.write_bytes(path.read_bytes()[:size])
    capsys.readouterr()
    assert cli.main(["generate", str(path.parent), "-p", "hello"]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("npusim: ") and message in err and len(err.splitlines()) == 1


def test_incomplete_programs(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in (["small.npubin"], ["small.npubin", "small.safetensors"]):
        for name in names:
            (tmp_path / name).write_bytes((program.parent / name).read_bytes())
        assert cli.main(["generate", str(tmp_path / "small.npubin"), "-p", "x"]) == 1
        assert "beside it" in capsys.readouterr().err
    (tmp_path / "small.llm.json").write_text("[]")
    assert cli.main(["generate", str(tmp_path / "small.npubin"), "-p", "x"]) == 1
    assert "small.llm.json: not a description" in capsys.readouterr().err


def test_unknown_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["generate", "no-such-model", "-p", "x"]) == 1
    assert "built-in models are smollm2-135m, tinystories-15m" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["generate", "owner/model", "-p", "x"]) == 1
    assert "pip install huggingface_hub" in capsys.readouterr().err


def test_bench(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", model, "--prompt-len", "33", "--gen-len", "4", "--seconds", "0.1", "--max-len", MAX_LEN]
    data = as_json(capsys, *argv, "--vs", "torch", "--threads", "1")
    assert set(data["results"]) == {"npusim", "torch eager"} and data["prompt_tokens"] == 33
    for speed in data["results"].values():
        assert speed["rounds"] >= 3
        assert speed["prefill_tokens_per_second"] == pytest.approx(33 / speed["prefill_ms"] * 1e3)
        assert speed["decode_tokens_per_second"] == pytest.approx(1 / speed["decode_ms"] * 1e3)
    ours, eager = data["results"]["npusim"], data["results"]["torch eager"]
    assert data["speedup"]["decode"] == pytest.approx(eager["decode_ms"] / ours["decode_ms"])
    assert cli.main([*argv, "--gen-len", "20"]) == 1
    assert "make 53 tokens, but the context holds 48" in capsys.readouterr().err


def test_bench_of_a_program(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", str(program), "--prompt-len", "8", "--gen-len", "2", "--seconds", "0.1"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "decode ms/token" in out and "prompt 8, 2 tokens decoded" in out
    assert cli.main([*argv, "--vs", "torch"]) == 1
    assert "needs the checkpoint itself" in capsys.readouterr().err


def test_compile_shows_no_single_graph(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", model, "--until", "fuse"]) == 1
    assert "one graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("compile", ["--batch", "2"]),
        ("compile", ["--disable", "layout"]),
        ("bench", ["--weights", "q4_0"]),
        ("bench", ["--disable", "layout"]),
        ("profile", ["--batch", "2"]),
        ("profile", ["--weights", "q4_0"]),
    ],
)
def test_options_of_other_models_are_not_ignored(
    verb: str, options: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, model, *options]) == 1
    wanted = f"npusim: {options[0]} does not apply to a language model, and {model} is one\n"
    assert capsys.readouterr().err == wanted
