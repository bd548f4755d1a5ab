"""Random decoders small enough to compile in seconds, in the layouts that real ones come in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from npu_compiler import target_config
from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
from npu_compiler.support import env
from npu_runtime.llm.model import LLM

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_LEN = 96
TEXT = [(7 * i * i + 3 * i) % 256 for i in range(MAX_LEN)]
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def config(**changes: Any) -> dict[str, Any]:
    """A llama of two layers with grouped heads."""
    return {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
        "eos_token_id": 256, "bos_token_id": 256, **changes,
    }  # fmt: skip


def weights(settings: dict[str, Any], seed: int = 0, scale: float = 1.5) -> dict[str, np.ndarray]:
    """Random weights large enough that different contexts give clearly different logits."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in parameter_shapes(LLMConfig.from_hf(settings)).items():
        spread = scale / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        arrays[name] = (rng.standard_normal(shape) * spread + (len(shape) == 1)).astype(np.float32)
    return arrays


def tokenizer_json() -> str:
    """One token per byte (256), then the special tokens: any text can be encoded, any bytes can come out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    text: str = tokenizer.to_str()
    return text


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A directory as the hub has them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(**changes)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    safetensors.numpy.save_file(weights(settings, seed), folder / "model.safetensors")
    return folder


def asynchronous(path: Path, max_len: int) -> LLM:
    """The model on a CPU target that is asked for the entry points of one that works while the host does not."""
    with pytest.MonkeyPatch.context() as patch:
        cpu = replace(target_config.target_config("cpu"), asynchronous=True)
        patch.setitem(target_config._registered, "cpu", cpu)
        return LLM.load(path, max_len=max_len, cache=False)


def own_cache(folder: Path) -> Iterator[Path]:
    """``folder`` as the cache while the generator is held, but for what all tests share."""
    for name in ("kernels", "models"):
        shared = env.cache_dir() / name
        shared.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_CACHE_DIR", str(folder))
        yield folder
