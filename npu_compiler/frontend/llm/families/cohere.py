"""Command R (https://docs.cohere.com/docs/command-r): attention and MLP side by side after one norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys, unsupported
from ..tensor_map import TensorMap


def _read(keys: Keys) -> Mapping[str, Any]:
    if keys.flag("use_qk_norm", False):
        raise unsupported(keys.at("use_qk_norm"), True, "each head would have a norm of its own")
    return {"logit_scale": keys.number("logit_scale"), **attention_bias(keys)}


register(
    Family(
        "cohere",
        aliases={"rms_norm_eps": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 5e5, "tie_word_embeddings": True},
        settings=("logit_scale", "use_qk_norm"),
        fixed={"norm": "layer_no_bias", "block": "parallel"},
        read=_read,
        tensors=TensorMap(interleaved=True),
        gguf=GGUF("command-r", tensors=replace(gguf_names(), interleaved=True)),
    )
)
