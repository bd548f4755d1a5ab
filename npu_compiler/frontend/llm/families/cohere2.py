"""Command R7B and Command A (https://arxiv.org/abs/2504.00698): layers with a window rotate, the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys
from ..rope import one_rope
from ..tensor_map import TensorMap
from ..windows import all_but_every_nth


def _read(keys: Keys) -> Mapping[str, Any]:
    return {
        "rope": None,
        "window_rope": one_rope(keys),
        "windows": all_but_every_nth(keys),
        "logit_scale": keys.number("logit_scale"),
        **attention_bias(keys),
    }


register(
    Family(
        "cohere2",
        aliases={"rms_norm_eps": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "sliding_window": 4096,
                  "sliding_window_pattern": 4},
        settings=("logit_scale",),
        fixed={"norm": "layer_no_bias", "block": "parallel"},
        read=_read,
        tensors=TensorMap(interleaved=True),
        gguf=GGUF("cohere2", tensors=replace(gguf_names(), interleaved=True)),
    )
)  # fmt: skip
