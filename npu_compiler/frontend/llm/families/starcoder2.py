"""StarCoder 2 (https://arxiv.org/abs/2402.19173): layer norms, biases and a plain MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import GGUF, Family, register
from ..keys import Keys
from ..tensor_map import TensorMap
from ..windows import alike, window_size


def _read(keys: Keys) -> Mapping[str, Any]:
    bias = keys.flag("use_bias", True)
    return {"windows": alike(keys, window_size(keys)), "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


register(
    Family(
        "starcoder2",
        aliases={"rms_norm_eps": "norm_epsilon"},
        defaults={"norm_epsilon": 1e-5, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
                  "tie_word_embeddings": True},
        fixed={"norm": "layer", "gated_mlp": False},
        read=_read,
        tensors=TensorMap(names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
        gguf=GGUF(
            "starcoder2",
            present={"use_bias": "blk.0.attn_q.bias"},
            complete=lambda config: {"hidden_act": "gelu_pytorch_tanh"},
        ),
    )
)  # fmt: skip
