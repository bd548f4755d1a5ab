"""Model files that once ended in bare exceptions, hangs or gigabytes: each gets one typed error.

``tests/fuzz`` draws many more; these have names.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from npu_compiler.frontend.llm import open_checkpoint
from npu_compiler.support.errors import ConfigError, InputError, WeightError
from npu_runtime.llm.tokenizer import Tokenizer

from ..fuzz import model_files
from ..fuzz.kinds import gguf as gguf_kind


def use_gguf(path: Path, family: str, change: Callable[[Any], object]) -> None:
    trees = {tree[0]["general.architecture"]: tree for tree in gguf_kind.trees()}
    tree = copy.deepcopy(trees[family])
    change(tree)
    path.write_bytes(gguf_kind.encode(tree))
    model_files.use_checkpoint(open_checkpoint(path))


def write_model(folder: Path) -> None:
    for name, content in model_files.directory("llama").items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)


def setting(key: str, value: Any) -> Callable[[Any], object]:
    return lambda tree: tree[0].update({key: value})


def drop_tensor(name: str) -> Callable[[Any], object]:
    return lambda tree: tree[1].remove(next(t for t in tree[1] if t[0] == name))


TOKENS, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.scores"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", setting("llama.block_count", 2**32 - 1), "num_hidden_layers|llama.block_count"),
        ("llama", setting("llama.block_count", 5000), "num_hidden_layers: expected .* from 1 to 4096"),
        ("llama", setting("llama.rope.dimension_count", "8"), r"llama\.rope\.dimension_count: expected a whole number"),
        ("llama", setting("llama.attention.head_count", [4, 4]), r"attention\.head_count: expected a whole number"),
        ("llama", setting("llama.attention.head_count", 0), "num_attention_heads: expected a whole number from 1"),
        ("llama", setting("general.architecture", ["llama"]), r"general\.architecture: expected a text"),
        ("phi3", drop_tensor("rope_factors_short.weight"), "lacks .*rope_factors_short"),
        ("llama", setting(TOKENS, 5), "tokens: expected a list"),
        ("llama", setting(TOKENS, [1, 2]), r"tokens\[0\]: expected a text"),
        ("llama", setting("tokenizer.ggml.merges", [1.5]), r"merges\[0\]: expected a text"),
        ("llama", setting("tokenizer.ggml.token_type", 3), "token_type: expected a list"),
        ("phi3", setting(SCORES, [0.0]), r"scores: expected a list of 32, got one of 1"),
        ("llama", setting("tokenizer.ggml.bos_token_id", 400), "bos_token_id: expected a whole number from 0 to 31"),
        ("llama", setting("tokenizer.ggml.bos_token_id", [1]), "bos_token_id: expected a whole number"),
        ("llama", setting("tokenizer.chat_template", 7), "chat_template: expected a text"),
        ("phi3", setting(TOKENS, [*model_files.LETTERS[:-1], "x" * 2000]), "the longest has 2000 characters"),
        ("llama", lambda tree: tree[1].append(tree[1][0]), "is listed twice"),
        ("llama", lambda tree: tree[1][0].__setitem__(1, [2**60, 2**60]), "has the shape"),
        ("llama", setting("general.alignment", "32"), r"general\.alignment: expected a whole number"),
    ],
)
def test_gguf(family: str, change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    use_gguf(tmp_path / "whole.gguf", family, lambda tree: None)
    with pytest.raises((ConfigError, WeightError), match=message):
        use_gguf(tmp_path / "a.gguf", family, change)


@pytest.mark.parametrize("what", ["text", "texts", "numbers"])
def test_a_header_as_large_as_a_disk(what: str, tmp_path: Path) -> None:
    """A sparse file: a terabyte of zeros that takes no room."""
    path = tmp_path / "a.gguf"
    kind = {"text": (8, 2**39), "texts": (9, 8, 2**36), "numbers": (9, 4, 2**37)}[what]
    head = struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<" + "I" * (len(kind) - 1) + "Q", *kind)
    with open(path, "wb") as file:
        file.write(b"GGUF" + head)
        try:
            file.truncate(2**40)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
    with pytest.raises(WeightError, match="the file is damaged"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"]
)
def test_documents_as_large_as_a_disk(name: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**33)
    with pytest.raises((ConfigError, WeightError), match="it has 8589934592 bytes"):
        model_files.use_checkpoint(open_checkpoint(tmp_path))


def replaced_by(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def document(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**text, **changes}))

    return change


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            replaced_by(lambda p: p.write_bytes(b"\xff\xfe"), "chat_template.jinja"),
            r"chat_template\.jinja is not UTF-8",
        ),
        (replaced_by(Path.mkdir, "chat_template.jinja"), r"chat_template\.jinja cannot be read"),
        (replaced_by(lambda p: p.write_bytes(b"\xff\xfe"), "tokenizer.json"), r"tokenizer\.json is not UTF-8"),
        (replaced_by(Path.mkdir, "tokenizer.json"), r"tokenizer\.json cannot be read"),
        (replaced_by(lambda p: p.write_text(NESTED), "tokenizer.json"), r"tokenizer\.json .*nested too deep"),
        (replaced_by(lambda p: p.write_text(NESTED), "config.json"), r"config\.json .*nested too deep"),
        (replaced_by(os.mkfifo, "config.json"), r"config\.json cannot be read: it is not a file"),
        (replaced_by(os.mkfifo, "model.safetensors"), r"model\.safetensors: cannot be read: it is not a file"),
        (document("config.json", num_hidden_layers=2**31), "num_hidden_layers: expected .* from 1 to 4096"),
        (
            document("config.json", num_hidden_layers=10**30),
            "num_hidden_layers: expected .* from 1 to 4096",
        ),
        (document("config.json", text_config=3), "text_config: expected an object"),
        (document("config.json", bos_token_id="x"), "bos_token_id: expected a whole number"),
        (document("generation_config.json", eos_token_id=[2, None]), r"eos_token_id\[1\]: expected a whole number"),
        (document("tokenizer.json", added_tokens=[{"id": "7"}]), r"added_tokens\[0\]\.id: expected a whole number"),
        (document("tokenizer.json", model={"vocab": {"a": None}}), r"vocab\.a: expected a whole number"),
    ],
)
def test_directories(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    model_files.use_checkpoint(open_checkpoint(tmp_path))
    change(tmp_path)
    with pytest.raises((ConfigError, WeightError), match=message):
        model_files.use_checkpoint(open_checkpoint(tmp_path))


def test_templates_by_odd_names(tmp_path: Path) -> None:
    write_model(tmp_path)
    templates = [{"name": ["default"], "template": "no"}, {"name": "default", "template": "yes"}]
    document("tokenizer_config.json", chat_template=templates)(tmp_path)
    assert open_checkpoint(tmp_path).chat_template == "yes"


def test_what_the_package_panics_at(capfd: pytest.CaptureFixture[str]) -> None:
    """Its PanicException is not an Exception; its message goes to stderr, which is not ours to close."""
    text = json.loads(model_files.tokenizer("byte-level"))
    text["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a+)+$"}
    tokenizer = Tokenizer(json.dumps(text))
    assert tokenizer.encode("cab")
    with pytest.raises(InputError, match="the text cannot be encoded"):
        tokenizer.encode("a" * 40 + "c")
    with pytest.raises(InputError, match="the tokens cannot be decoded"):
        tokenizer.decode([-1])
    assert np.isfinite(tokenizer.size)
