"""GPT-2 (https://openai.com/index/better-language-models/): learned positions, layer norms, a plain MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, gguf_names, register
from ..keys import Keys, unsupported
from ..tensor_map import TensorMap

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _read(keys: Keys) -> Mapping[str, Any]:
    if keys.flag("scale_attn_by_inverse_layer_idx", False):
        raise unsupported(keys.at("scale_attn_by_inverse_layer_idx"), True, "all layers of this type are alike")
    hidden = keys.integer("hidden_size")
    own = {"rope": None, "intermediate_size": keys.integer("intermediate_size", 4 * hidden)}
    return own if keys.flag("scale_attn_weights", True) else {**own, "attention_scale": 1.0}


register(
    Family(
        "gpt2",
        aliases={
            "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
        },
        defaults={
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True,
        },
        settings=("scale_attn_by_inverse_layer_idx",),
        fixed={
            "norm": "layer", "gated_mlp": False, "learned_positions": True, "qkv_bias": True, "output_bias": True,
            "mlp_bias": True,
        },
        read=_read,
        tensors=TensorMap(
            names={
                "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            prefix="transformer.",
            layer="h.{}.",
            fused={"attn.c_attn": _QKV},
            transposed=True,
        ),
        unused=r"\.attn\.(masked_)?bias$",
        gguf=GGUF(
            "gpt2",
            tensors=replace(gguf_names(), fused={"attn_qkv": _QKV}),
        ),
    )
)  # fmt: skip
