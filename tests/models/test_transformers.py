"""ViT and BERT: own definitions and those of transformers, in both spellings of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from npusim import models

from ..support.sweeps import FULL
from .gate import Args, compile_and_run, expect
from .random_models import images, randomise

DTYPES = ("float32", "float16", "bfloat16")


def check(model: nn.Module, runs: list[Args], dtype: str, classifies: bool = False) -> None:
    wanted = expect(model, runs, dtype)
    results = compile_and_run(model, runs, dtype)
    wanted.check(results)
    if classifies:
        wanted.check_ranking(results)


def token_runs(count: int, batch: int, length: int, vocab: int) -> list[Args]:
    """Ids, a mask with padding of various lengths, token types."""
    generator = torch.Generator().manual_seed(5)
    runs = []
    for _ in range(count):
        ids = torch.randint(vocab, (batch, length), generator=generator)
        kept = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        position = torch.arange(length).expand(batch, -1)
        runs.append((ids, (position < kept).long(), (position >= length // 3).long()))
    return runs


@pytest.mark.parametrize("dtype", DTYPES if FULL else ("float16",))  # test_blocks_of_the_base_size has the others
def test_vit(dtype: str) -> None:
    torch.manual_seed(0)
    model = randomise(models.vit(image=64, patch=8, depth=3, width=96, heads=4, num_classes=100))
    check(model, [(x,) for x in images(48, 64).split(3)], dtype, classifies=True)


@pytest.mark.parametrize("dtype", DTYPES if FULL else ("float16",))
def test_bert(dtype: str) -> None:
    torch.manual_seed(0)
    model = randomise(models.bert(vocab=500, positions=64, depth=3, width=96, heads=4, hidden=384))
    check(model, token_runs(8, 3, 50, 500), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_the_base_size(dtype: str) -> None:
    """Width 768, 12 heads, 197 tokens: two of ViT-B/16's twelve blocks."""
    torch.manual_seed(0)
    model = randomise(models.vit(image=224, patch=16, depth=2, width=768, heads=12, num_classes=1000))
    check(model, [(x,) for x in images(4, 224).split(1)], dtype, classifies=True)


class HuggingFace(nn.Module):
    """Positional tensors in, one tensor out."""

    def __init__(self, model: nn.Module, output: str, names: tuple[str, ...]):
        super().__init__()
        self.model, self.output, self.names = model, output, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, args, strict=True)))[self.output]


# Each model has both spellings of attention by default, and both models together have every dtype.
SPELLINGS = [(dtype, attention) for dtype in DTYPES for attention in ("eager", "sdpa")]


def spellings(*sample: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("dtype", "attention"), SPELLINGS if FULL else sample)


SIZES: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


@spellings(("float32", "eager"), ("bfloat16", "sdpa"))
def test_vit_of_transformers(dtype: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **SIZES, image_size=32, patch_size=8, num_labels=50, attn_implementation=attention, initializer_range=0.1
    )
    model = randomise(transformers.ViTForImageClassification(config))
    runs: list[Args] = [(x,) for x in images(48, 32).split(3)]
    check(HuggingFace(model, "logits", ("pixel_values",)), runs, dtype, classifies=True)


@spellings(("bfloat16", "eager"), ("float16", "sdpa"))
def test_bert_of_transformers(dtype: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, vocab_size=200, max_position_embeddings=40, attn_implementation=attention, initializer_range=0.1
    )
    model = HuggingFace(
        randomise(transformers.BertModel(config)),
        "last_hidden_state",
        ("input_ids", "attention_mask", "token_type_ids"),
    )
    check(model, token_runs(8, 3, 30, 200), dtype)
