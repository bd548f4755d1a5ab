"""A model family, the arguments of its calls, and the sizes that configurations share.

A family is a class, its configuration, and the arguments of a call as in its documentation. Configurations keep every
architectural default; only sizes are reduced. Classifiers have 100 classes: with the default of two, there would be too
few errors for the statistics of the error gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``model``: the class in ``library``. ``config``: the fields that its configuration sets. ``inputs``: from a
    configuration to the keyword arguments of a call. ``step``: whether a second program takes the returned cache."""

    group: str
    name: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs = field(default=lambda config: tokens(config))
    step: bool = False
    library: str = "transformers"


def tokens(config: Any, length: int = 12, batch: int = 2) -> dict[str, Any]:
    """int64 [batch, length] token ids and a mask of ones."""
    ids = torch.randint(5, 200, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def translation(config: Any) -> dict[str, Any]:
    """Source and target tokens of an encoder-decoder."""
    source = tokens(config)
    target = torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(1))
    return {**source, "decoder_input_ids": target}


def image(size: int) -> Inputs:
    """float32 [2, 3, size, size]."""
    return features(2, 3, size, size, name="pixel_values")


def speech(config: Any) -> dict[str, Any]:
    """Log-mel features [2, bins, frames] and target tokens."""
    target = torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(1))
    frames = 2 * config.max_source_positions
    return {"input_features": randn(2, config.num_mel_bins, frames), "decoder_input_ids": target}


def captioned(size: int, batch: int) -> Inputs:
    """int64 [batch, 12] tokens and float32 [batch, 3, size, size] images; each text is compared with each image."""
    return lambda config: {**tokens(config, batch=batch), "pixel_values": randn(batch, 3, size, size)}


def masked(size: int, patches: int) -> Inputs:
    """An image and the noise that decides which patches are hidden, float32 [2, patches]."""
    return lambda config: {**image(size)(config), "noise": randn(2, patches)}


def segment(size: int) -> Inputs:
    """An image and one point to segment."""
    return lambda config: {"pixel_values": randn(1, 3, size, size), "input_points": torch.tensor([[[[9.0, 9.0]]]])}


def features(*shape: int, name: str = "input_values") -> Inputs:
    """float32 [*shape]: a waveform, or what was computed from it."""
    return lambda config: {name: randn(*shape)}


def ids_only(config: Any) -> dict[str, Any]:
    """Tokens without a mask."""
    return {"input_ids": tokens(config)["input_ids"]}


def randn(*shape: int) -> torch.Tensor:
    """Normally distributed numbers, the same for a shape in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = {**SMALL, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
SEQ = {
    **SPECIAL,
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
STAGES = {"embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "window_size": 2, "image_size": 64}
CONV = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 64, 64]}
EFFICIENT = {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}
CLIP_TEXT = {**SMALL, **SPECIAL}
CLIP = {"text_config": CLIP_TEXT, "vision_config": VIT, "projection_dim": 32}
