"""Llama 1 to 3 and models of the same form: SmolLM 1 and 2, TinyLlama, Vicuna, Yi … (https://arxiv.org/abs/2302.13971).

GGUF files call Mistral models 'llama', too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys


def _read(keys: Keys) -> Mapping[str, Any]:
    return {**attention_bias(keys), "mlp_bias": keys.flag("mlp_bias", False)}


register(
    Family(
        "llama",
        read=_read,
        gguf=GGUF(
            "llama",
            tensors=replace(gguf_names(), interleaved=True),
            present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        ),
    )
)
