"""Decoder families are one file each: the walk-through of docs/families.md adds one, and nothing else changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_compiler.frontend.llm import families, family, load_decoder, open_checkpoint
from npu_compiler.frontend.llm.family import FAMILIES, GGUF, Family, by_architecture, by_model_type, register
from npu_compiler.support.errors import ConfigError

from ..docs.snippets import snippets
from . import tiny
from .gguf_writer import write_gguf

DOCS = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.fixture
def own_registry() -> Iterator[None]:
    by_model_type("llama")  # all of them are there
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def seed_oss(own_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of the walk-through, where families are looked for."""
    folder = tmp_path / "families"
    folder.mkdir()
    (code,) = snippets(DOCS)
    (folder / "seed_oss.py").write_text(code.text, encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    family._discover.cache_clear()
    yield
    sys.modules.pop(f"{families.__name__}.seed_oss", None)


@pytest.mark.parametrize(("kind", "output_bias"), [("directory", False), ("directory", True), ("gguf", False)])
def test_a_family_is_one_file(kind: str, output_bias: bool, seed_oss: None, tmp_path: Path) -> None:
    settings = {"head_dim": 16, "attention_bias": True, "attention_out_bias": output_bias}
    model = tiny.random_model("SeedOss", settings)
    path = tiny.save(model, tmp_path) if kind == "directory" else write_gguf(tmp_path / "a.gguf", model, "seed_oss")
    ours, ids = load_decoder(open_checkpoint(path), 16), tiny.text_ids(12)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, -1].float()
        logits = ours(torch.tensor([ids]), torch.arange(12), torch.tensor([11]))
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


def test_without_its_file_the_family_is_unknown(tmp_path: Path) -> None:
    model = tiny.random_model("SeedOss", {"head_dim": 16})
    with pytest.raises(ConfigError, match=r"model_type = 'seed_oss' is not supported; known: cohere, .*starcoder2"):
        open_checkpoint(tiny.save(model, tmp_path))
    with pytest.raises(ConfigError, match=r"general\.architecture = 'seed_oss' is not supported; known: cohere2, "):
        by_architecture("seed_oss")


def test_names_are_taken_once(own_registry: None) -> None:
    with pytest.raises(ValueError, match="model type 'llama' is declared twice"):
        register(Family("llama"))
    with pytest.raises(ValueError, match="GGUF architecture 'phi3' is declared twice"):
        register(Family("other", gguf=GGUF("phi3")))
    assert "other" not in FAMILIES


def test_settings_of_a_new_family_are_refused_by_the_others(seed_oss: None) -> None:
    from npu_compiler.frontend.llm import LLMConfig

    llama = tiny.random_model("Llama", {}).config.to_dict()
    with pytest.raises(ConfigError, match=r"attention_out_bias = True is not supported; a llama model has no such"):
        LLMConfig.from_hf({**llama, "attention_out_bias": True})


def test_the_table_lists_all_families() -> None:
    by_model_type("llama")
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w, ]+) \| ([\w-]+)?", DOCS.read_text(encoding="utf-8").split("\n## ")[0], re.MULTILINE
    )
    listed = {model_type: (file, arch) for file, types, arch in rows for model_type in types.split(", ")}
    assert set(listed) == set(FAMILIES)
    for model_type, f in FAMILIES.items():
        assert listed[model_type][1] == (f.gguf.architecture if f.gguf else ""), model_type
    files = {p.stem for p in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert {file for file, _ in listed.values()} == files


def test_shared_code_does_not_name_families() -> None:
    """Identity is asked for in the families' own files only."""
    by_model_type("llama")
    names = {*FAMILIES, *(f.gguf.architecture for f in FAMILIES.values() if f.gguf)}
    quoted = re.compile(rf"""["']({"|".join(map(re.escape, sorted(names)))})["']""")
    tokenizers = {"llama", "gpt2", "qwen2", "command-r"}  # names that GGUF gives to tokenizers
    for path in Path(family.__file__).parent.glob("*.py"):
        found = set(quoted.findall(path.read_text(encoding="utf-8")))
        assert found <= (tokenizers if path.stem in ("checkpoint", "vocabulary", "gguf_tokenizer") else set()), (
            path.name
        )
