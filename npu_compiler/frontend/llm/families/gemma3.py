"""Gemma 3 (https://arxiv.org/abs/2503.19786): norms on both sides, two ropes; of multimodal models, the text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....support.errors import ConfigError
from ..family import GGUF, Family, gguf_names, register
from ..keys import Keys
from ..rope import Rope, layer_ropes, scaled_rope
from ..windows import all_but_every_nth
from .gemma2 import attention_scalar, read_scales


def _ropes(keys: Keys) -> tuple[Rope, Rope]:
    """Return the ropes of layers without and with a window."""
    scaling, parameters = keys.child("rope_scaling"), keys.child("rope_parameters")
    if not layer_ropes(keys) and parameters.values:
        raise ConfigError("rope_parameters: expected one object for full_attention and one for sliding_attention")
    full, sliding = parameters.child("full_attention"), parameters.child("sliding_attention")
    if scaling.values:
        full = Keys({**full.values, **scaling.values}, scaling.path)
    return scaled_rope(keys, full), scaled_rope(keys, sliding, keys.number("rope_local_base_freq"))


def _read(keys: Keys) -> Mapping[str, Any]:
    rope, window_rope = _ropes(keys)
    windows = all_but_every_nth(keys)
    return {**read_scales(keys), "rope": rope, "window_rope": window_rope, "windows": windows}


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **attention_scalar(config, layers_of_27b=62),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": {}},
    }


register(
    Family(
        "gemma3_text",
        wrappers={"gemma3": "text_config"},
        aliases={"hidden_act": "hidden_activation"},
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
        },
        settings=("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        fixed={
            "qk_norm": "head", "norm": "rms_unit_offset", "block": "sandwich_norm", "round_embedding_scale": True,
        },
        read=_read,
        unused=r"vision_tower\.|multi_modal_projector\.",
        gguf=GGUF(
            "gemma3",
            tensors=replace(gguf_names(post_attention_layernorm="post_attention_norm"), norm_shift=-1.0),
            complete=_complete,
        ),
    )
)  # fmt: skip
