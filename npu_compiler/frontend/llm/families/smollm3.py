"""SmolLM 3 (https://huggingface.co/blog/smollm3): a llama in which every fourth layer does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....support.errors import ConfigError
from ..family import GGUF, Family, attention_bias, gguf_names, register
from ..keys import Keys
from ..windows import by_layer, window_size


def _read(keys: Keys) -> Mapping[str, Any]:
    layers = keys.integer("num_hidden_layers")
    if keys.has("no_rope_layers"):
        rotates = [f.integer(0, 1) for f in keys.field("no_rope_layers").items()]  # 1: the layer rotates
        if len(rotates) != layers:
            raise ConfigError(f"{keys.at('no_rope_layers')} has {len(rotates)} elements for {layers} layers")
    else:
        interval = keys.integer("no_rope_layer_interval")
        rotates = [int((i + 1) % interval != 0) for i in range(layers)]
    window = window_size(keys) if keys.flag("use_sliding_window", False) else None
    return {
        "nope_layers": tuple(i for i, rotating in enumerate(rotates) if not rotating),
        "windows": by_layer(keys, window, lambda i: not rotates[i]),
        **attention_bias(keys),
        "mlp_bias": keys.flag("mlp_bias", False),
    }


register(
    Family(
        "smollm3",
        defaults={"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
                  "rope_theta": 2e6},
        settings=("no_rope_layers",),
        read=_read,
        gguf=GGUF("smollm3", tensors=replace(gguf_names(), interleaved=True)),
    )
)  # fmt: skip
