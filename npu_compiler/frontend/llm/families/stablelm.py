"""StableLM 2 and 3B (https://arxiv.org/abs/2402.17834): a llama with layer norms and partly rotating heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import GGUF, Family, register
from ..keys import Keys, unsupported
from ..rope import one_rope


def _read(keys: Keys) -> Mapping[str, Any]:
    if keys.flag("qk_layernorm", False):
        raise unsupported(keys.at("qk_layernorm"), True, "each head would have a norm of its own")
    return {
        "rope": one_rope(keys, partial=True),
        "block": "parallel" if keys.flag("use_parallel_residual", False) else "pre_norm",
        "qkv_bias": keys.flag("use_qkv_bias", False),
    }


register(
    Family(
        "stablelm",
        aliases={"rms_norm_eps": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        settings=("qk_layernorm", "use_parallel_residual"),
        fixed={"norm": "layer"},
        read=_read,
        gguf=GGUF("stablelm", present={"use_qkv_bias": "blk.0.attn_q.bias"}),
    )
)
