"""Tiny random models of every supported type, as transformers has them, and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler.frontend.llm import LLMConfig, parameter_shapes
from npu_compiler.frontend.llm.family import by_model_type
from npu_compiler.frontend.llm.modules import Decoder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_GEMMA = {
    "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.0, 4.0],
}  # fmt: skip

# name -> (class of transformers, the config's settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "hidden_act": "gelu"}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": 11, "num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, "rope_parameters": {**_YARN, "truncate": False}}),
    "gemma3_text": ("Gemma3", {**_GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3-softcap": ("Gemma3", {**_GEMMA, "attn_logit_softcapping": 0.7}),
    "phi3": ("Phi3", {"sliding_window": 13}),
    "phi3-partial": (
        "Phi3", {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4, "rope_type": "default"}},
    ),
    "phi3-long": (
        "Phi3", {"rope_parameters": {**_LONG, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 16},
    ),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0,
                   "num_hidden_layers": 3, "attn_logit_softcapping": 0.7, "attn_implementation": "eager"},
    ),
    "granite": (
        "Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 1.7, "residual_multiplier": 0.6,
                    "logits_scaling": 0.4, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {"logit_scale": 0.4}),
    "cohere2": (
        "Cohere2", {"logit_scale": 0.4, "sliding_window": 9, "num_hidden_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "gpt_neox-serial": ("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 1.0, "use_parallel_residual": False}),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "intermediate_size": None}),
}  # fmt: skip
# GGUF's architecture of each family that has one
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "phi3": "phi3", "granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2", "cohere": "command-r",
    "cohere2": "cohere2", "starcoder2": "starcoder2", "stablelm": "stablelm", "gpt_neox": "gptneox", "gpt2": "gpt2",
}  # fmt: skip


def softcapped(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """transformers' gemma3 keeps the setting but its attention does not pass it on."""
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    return eager_attention_forward(module, query, key, value, mask, softcap=module.attn_logit_softcapping, **options)


def hf_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of a case. ``changes`` are settings of the config."""
    family, settings = CASES[name]
    return random_model(family, {**settings, **changes}, "softcap" in name).to(dtype)


def random_model(family: str, settings: dict[str, Any], softcap: bool = False) -> Any:
    """The model of transformers with weights large enough for peaked, diverse logits, and norms that are not 1.

    ``family`` begins the names of its classes. A setting of None takes a common one back.
    """
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    said = {**_SMALL, **settings}
    config = getattr(transformers, family + suffix)(**{k: v for k, v in said.items() if v is not None})
    if softcap:
        transformers.AttentionInterface.register("softcapped", softcapped)
        transformers.AttentionMaskInterface.register("softcapped", transformers.masking_utils.eager_mask)
        config._attn_implementation = "softcapped"
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(0.0, 0.3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.3)
            assert p.numel(), key
    return model


def our_names(state: dict[str, torch.Tensor], config: LLMConfig) -> dict[str, torch.Tensor]:
    """A state_dict of transformers under our names, as the loader reads it."""
    tensors = by_model_type(config.model_type).tensors
    places = tensors.places(parameter_shapes(config), config.num_heads, config.num_kv_heads)
    if "lm_head.weight" in state:  # files of gpt_neox have it under another name; transformers 5 has not
        state = {**state, "embed_out.weight": state["lm_head.weight"]}
    return {name: torch.from_numpy(place.take(state[place.name].numpy()).copy()) for name, place in places.items()}


def decoder(name: str, max_len: int, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Any]:
    """(our module, the same model of transformers)."""
    model = hf_model(name, dtype)
    config = LLMConfig.from_hf(model.config.to_dict())
    ours = Decoder(config, max_len, dtype)
    missing, unexpected = ours.load_state_dict(our_names(model.state_dict(), config), strict=False)
    assert not unexpected
    assert all("_cache." in key for key in missing)
    return ours.eval(), model


def save(model: Any, folder: Path, shard: str = "50GB") -> Path:
    """The model as a directory of transformers, with its config in the file's own spelling."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def edit(folder: Path, file: str = "config.json", drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change keys of a JSON file; ``drop`` removes some."""
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {k: v for k, v in values.items() if k not in drop} | changes
    path.write_text(json.dumps(values))
    return folder


def text_ids(n: int, vocab: int = 96, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, n)]
