"""GPT-NeoX and Pythia (https://arxiv.org/abs/2204.06745): attention and MLP side by side, each with its norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, gguf_names, register
from ..keys import Keys
from ..rope import one_rope
from ..tensor_map import TensorMap

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _read(keys: Keys) -> Mapping[str, Any]:
    bias = keys.flag("attention_bias", True)
    return {
        "rope": one_rope(keys, partial=True),
        "block": "parallel_two_norms" if keys.flag("use_parallel_residual", True) else "pre_norm",
        "qkv_bias": bias,
        "output_bias": bias,
    }


register(
    Family(
        "gpt_neox",
        aliases={
            "rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct",
        },
        defaults={"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "hidden_act": "gelu"},
        settings=("use_parallel_residual",),
        fixed={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        read=_read,
        tensors=TensorMap(
            names={
                "embed_tokens": "embed_in", "norm": "final_layer_norm", "lm_head": "embed_out",
                "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            prefix="gpt_neox.",
            fused={"attention.query_key_value": _QKV},
            fused_by_head=True,
        ),
        unused=r"\.attention\.(masked_)?bias$",
        gguf=GGUF(
            "gptneox",
            tensors=replace(gguf_names(), fused={"attn_qkv": _QKV}),
            present={"attention_bias": "blk.0.attn_qkv.bias"},
        ),
    )
)  # fmt: skip
