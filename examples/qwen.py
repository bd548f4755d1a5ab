"""Shared by the Qwen examples: which model they run; the model as two graphs with caches as inputs and outputs.

They run every decoder family that npusim knows; Qwen2 is the default's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor, nn

from npu_compiler import capture
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend.llm import Checkpoint, LLMConfig, load_decoder, open_checkpoint, parameter_shapes
from npu_compiler.frontend.llm.modules import Decoder
from npu_compiler.frontend.llm.vocabulary import byte_level_bpe
from npu_compiler.support.errors import InputError
from npu_runtime.llm.find_model import find_model
from npu_runtime.llm.tokenizer import Tokenizer
from npusim.models import llm_weights

TINY = {
    "model_type": "qwen2", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the model."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a directory with config.json, safetensors and tokenizer.json, a .gguf file, smollm2-135m, "
        "tinystories-15m or an id on the Hugging Face hub (default: a tiny Qwen2 with random weights)",
    )


@contextmanager
def checkpoint_of(model: str | None) -> Iterator[Checkpoint]:
    """Open the checkpoint that a command line names. None: the tiny model, whose files are removed afterwards.

    Raises:
        NPUError: there is no such model, or it cannot be read.
    """
    if model is not None:
        llm_weights.register()
        yield open_checkpoint(find_model(model))
        return
    print("a tiny Qwen2 with random weights: its text means nothing")
    with tempfile.TemporaryDirectory() as folder:
        yield open_checkpoint(tiny_checkpoint(Path(folder) / "tiny-qwen2"))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer. Raises ``InputError`` if the checkpoint does not have one."""
    if checkpoint.tokenizer_json is None:
        raise InputError(f"{checkpoint.path}: the model has no tokenizer.json, which text needs")
    return Tokenizer(checkpoint.tokenizer_json)


def tiny_checkpoint(folder: Path) -> Path:
    """Write a random Qwen2 of two layers with a token for each byte, in the hub's format; return its directory."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in parameter_shapes(LLMConfig.from_hf(TINY)).items():
        spread, middle = (1.5 / np.sqrt(shape[-1]), 0.0) if len(shape) == 2 else (0.1, float("norm" in name))
        weights[name] = (rng.standard_normal(shape) * spread + middle).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (folder / "tokenizer.json").write_text(byte_level_bpe(letters, [], [1] * len(letters), "gpt-2", None), "utf-8")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@dataclass(frozen=True)
class GivenRows:
    """Keys or values of one layer, in ``tensors``: ``store`` puts a new tensor in the place of the given one."""

    tensors: list[Tensor]
    layer: int

    def store(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Return the layer's cache [1, heads, max_len, D] with ``rows`` at ``positions``."""
        self.tensors[self.layer] = self.tensors[self.layer].index_copy(2, positions, rows)
        return self.tensors[self.layer]


@dataclass(frozen=True)
class FreshRows:
    """Keys or values of one layer for a prompt from position 0: only its own, which are added to ``tensors``."""

    tensors: list[Tensor]

    def store(self, positions: Tensor, rows: Tensor) -> Tensor:
        self.tensors.append(rows)
        return rows


class GivenCaches(nn.Module):
    """Caches that are graph inputs; those with the new rows are results."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def layer(self, i: int) -> GivenRows | FreshRows:
        return GivenRows(self.tensors, i)

    def take(self) -> list[Tensor]:
        """Return the results and forget them."""
        tensors, self.tensors = self.tensors, []
        return tensors


class FreshCaches(GivenCaches):
    """Caches of a prompt from position 0: they hold only its own keys and values."""

    def layer(self, i: int) -> FreshRows:
        return FreshRows(self.tensors)


class PrefillGraph(Decoder):
    """A prompt of ``length`` tokens -> logits [1, vocab] of its last token, then keys and values of each layer."""

    def __init__(self, config: LLMConfig, length: int):
        super().__init__(config, length)
        self.k_cache, self.v_cache = FreshCaches(), FreshCaches()  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        logits = super().forward(input_ids, positions, positions[-1:])
        return logits, *_by_layer(self.k_cache.take(), self.v_cache.take())


class DecodeGraph(Decoder):
    """A token, its position and the caches -> logits [1, vocab], then the caches with the token's keys and values."""

    def __init__(self, config: LLMConfig, max_len: int):
        super().__init__(config, max_len)
        self.k_cache, self.v_cache = GivenCaches(), GivenCaches()  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        self.k_cache.tensors, self.v_cache.tensors = list(caches[::2]), list(caches[1::2])
        logits = super().forward(input_ids, position, position)
        return logits, *_by_layer(self.k_cache.take(), self.v_cache.take())


def _by_layer(keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    return [t for pair in zip(keys, values, strict=True) for t in pair]


def capture_graphs(checkpoint: Checkpoint, prompt: int, max_len: int) -> tuple[IRGraph, IRGraph, dict[str, Any]]:
    """Return the prefill graph for prompts of ``prompt`` tokens, the decode graph for caches of ``max_len`` positions,
    and a mapping from the outputs of the first to the inputs of the second (see :func:`kv_mapping`)."""
    config = checkpoint.config
    prefill = _with_weights(PrefillGraph(config, prompt), checkpoint)
    decode = _with_weights(DecodeGraph(config, max_len), checkpoint)
    ids = torch.zeros(1, prompt, dtype=torch.int64)
    shape = (1, config.num_kv_heads, max_len, config.head_dim)
    caches = [torch.zeros(shape, dtype=getattr(torch, config.dtype)) for _ in range(2 * config.num_layers)]
    one = torch.zeros(1, dtype=torch.int64)
    first = capture(prefill, (ids, torch.arange(prompt)), name="qwen_prefill")
    second = capture(decode, (ids[:, :1], one, *caches), name="qwen_decode")
    return first, second, kv_mapping(first, second, config.num_layers, prompt, max_len)


def _with_weights(graph: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    state = load_decoder(checkpoint, 1).state_dict()
    graph.load_state_dict({k: v for k, v in state.items() if "_cache." not in k})
    return graph.eval()


def kv_mapping(prefill: IRGraph, decode: IRGraph, layers: int, prompt: int, max_len: int) -> dict[str, Any]:
    """Return for each layer the names of its keys and values in both graphs, ready for JSON."""
    made, taken, given = (
        prefill.output_names()[1:],
        [t.name for t in decode.graph_inputs[2:]],
        decode.output_names()[1:],
    )
    return {
        "num_layers": layers,
        "prefill_seq_len": prompt,
        "max_cache_len": max_len,
        "layers": [
            {
                "layer": i,
                "prefill_key_output": made[2 * i], "prefill_value_output": made[2 * i + 1],
                "decode_key_input": taken[2 * i], "decode_value_input": taken[2 * i + 1],
                "decode_key_output": given[2 * i], "decode_value_output": given[2 * i + 1],
            }
            for i in range(layers)
        ],
    }  # fmt: skip


def torch_logits(checkpoint: Checkpoint, tokens: list[int], max_len: int) -> np.ndarray:
    """Return PyTorch's logits float32[len(tokens), vocab] after every token."""
    decoder, rows = load_decoder(checkpoint, max_len), []
    with torch.inference_mode():
        for i, token in enumerate(tokens):
            rows.append(decoder(torch.tensor([[token]]), torch.tensor([i]), torch.tensor([0]))[0].numpy())
    return np.stack(rows)


def compare(logits: np.ndarray, reference: np.ndarray) -> None:
    """Print how far logits float32[N, vocab] are from PyTorch's, and how many of the N choices agree."""
    error = np.abs(logits - reference).max() / np.abs(reference).max()
    agree = int((logits.argmax(1) == reference.argmax(1)).sum())
    same = f"{agree} of {len(logits)} choices agree"
    print(f"against PyTorch: largest logit error {error:.2e} of the largest logit, {same}")
