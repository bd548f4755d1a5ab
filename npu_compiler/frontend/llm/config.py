"""``LLMConfig``: everything that fixes the computation of a decoder-only language model, from a config.json.

A model type means what the Hugging Face transformers class of that name computes. Both spellings of its config are
read: transformers 4 has ``rope_theta``, ``rope_scaling`` and ``torch_dtype``, 5 has ``rope_parameters`` and ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...support import dtypes
from ...support.errors import ConfigError
from .keys import Keys, unsupported
from .rope import Rope, read_rope

__all__ = ["MAX_LAYERS", "MODEL_TYPES", "LLMConfig", "parameter_shapes"]

MAX_LAYERS = 4096  # far above any real decoder; below it, listing all weights takes no time


@dataclass(frozen=True)
class LLMConfig:
    """A decoder: embedding, ``num_layers`` times (norm, attention, norm, gated MLP) with residuals, norm, logits.

    Attributes:
        windows: per layer, how many latest positions a query sees, itself included; None: all.
        rope: of layers without a window, ``window_rope`` of those with one.
        activation: 'silu', 'gelu' or 'gelu_tanh', of the MLP's gate.
        attention_scale: what query times key is multiplied by.
        attention_softcap, logit_softcap: x becomes cap * tanh(x / cap); None: it does not.
        embedding_scale: what token embeddings are multiplied by, rounded to the model's dtype; None: nothing.
        unit_offset_norm: norms multiply by 1 + weight, in float32, and round once.
        sandwich_norms: attention and MLP results are normalised too, before they are added.
        dtype: of weights, activations and KV cache: one of ``dtypes.STORAGE_DTYPES``.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    rope: Rope
    window_rope: Rope
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_offset_norm: bool = False
    sandwich_norms: bool = False
    tied_embedding: bool = False
    dtype: str = "float32"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LLMConfig:
        """The config that a ``config.json`` describes; the text model of a multimodal gemma3.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that is not supported; the message names it.
        """
        return _read(Keys(config))


@dataclass(frozen=True)
class _Type:
    """What a model type fixes, and ``defaults`` of keys that its config.json may leave out."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()  # the switches among attention_bias and mlp_bias that it has
    window: bool = True  # sliding_window counts,
    window_switch: bool = False  # but only together with use_sliding_window
    layer_types: bool = False  # windows differ by layer
    partial_rotary: bool = False


_GEMMA3 = _Type(
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    fixed={"qk_norm": True, "unit_offset_norm": True, "sandwich_norms": True},
    biases=("attention_bias",),
    layer_types=True,
)  # fmt: skip
_TYPES = {
    "llama": _Type(biases=("attention_bias", "mlp_bias"), window=False),
    "mistral": _Type(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": _Type(defaults={"sliding_window": 4096}, fixed={"qkv_bias": True}, window_switch=True, layer_types=True),
    "qwen3": _Type(
        defaults={"sliding_window": 4096, "head_dim": 128},
        fixed={"qk_norm": True},
        biases=("attention_bias",),
        window_switch=True,
        layer_types=True,
    ),
    "gemma3_text": _GEMMA3,
    "phi3": _Type(
        defaults={"rms_norm_eps": 1e-5},
        partial_rotary=True,
    ),
}
MODEL_TYPES = (*_TYPES, "gemma3")

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
# Switches of other architectures that some fork might have added to one of these: not to be passed over.
_FOREIGN = (
    "num_experts", "num_local_experts", "kv_lora_rank", "clip_qkv", "attention_multiplier", "residual_multiplier",
    "embedding_multiplier", "logits_scaling", "logit_scale", "use_bidirectional_attention", "add_cross_attention",
    "is_encoder_decoder", "attention_chunk_size", "attention_sinks", "quantization_config",
)  # fmt: skip
_GEMMA_ONLY = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")


def _read(keys: Keys) -> LLMConfig:
    model_type = keys.text("model_type")
    outer = keys
    if model_type == "gemma3":
        keys, model_type = keys.child("text_config"), "gemma3_text"
        keys = Keys({"tie_word_embeddings": outer.flag("tie_word_embeddings", True), **keys.values}, keys.path)
    if model_type not in _TYPES:
        raise unsupported("model_type", model_type, f"known: {', '.join(MODEL_TYPES)}")
    kind = _TYPES[model_type]
    gemma = kind is _GEMMA3
    for key in (*_FOREIGN, *(() if gemma else _GEMMA_ONLY)):
        if keys.values.get(key):
            raise unsupported(keys.at(key), keys.values[key], f"a {model_type} model has no such setting here")
    keys = Keys({**kind.defaults, **keys.values}, keys.path)  # a null switches a default off
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = keys.integer("head_dim", hidden // heads)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{keys.at('num_key_value_heads')} = {kv_heads} does not divide the {heads} attention heads")
    rope, window_rope = _ropes(keys, kind, head_dim)
    return LLMConfig(
        model_type=model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=keys.integer("max_position_embeddings", 2048),
        norm_eps=keys.number("rms_norm_eps", 1e-6, zero=True),
        activation=_activation(keys, "hidden_activation" if gemma else "hidden_act"),
        rope=rope,
        window_rope=window_rope,
        windows=_windows(keys, kind, layers),
        attention_scale=(keys.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=hidden**0.5 if gemma else None,
        tied_embedding=keys.flag("tie_word_embeddings", False),
        dtype=_dtype(outer if outer.has("dtype") or outer.has("torch_dtype") else keys),
        **{**_biases(keys, kind), **kind.fixed},
    )


def _activation(keys: Keys, key: str) -> str:
    name = keys.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise unsupported(keys.at(key), name, f"known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _biases(keys: Keys, kind: _Type) -> dict[str, bool]:
    attention = "attention_bias" in kind.biases and keys.flag("attention_bias", False)
    mlp = "mlp_bias" in kind.biases and keys.flag("mlp_bias", False)
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _dtype(keys: Keys) -> str:
    key = "dtype" if keys.has("dtype") else "torch_dtype"
    text = keys.text(key, "float32")
    try:
        return dtypes.storage_dtype(text)
    except ConfigError:
        raise unsupported(keys.at(key), text, f"known: {', '.join(dtypes.STORAGE_DTYPES)}") from None


# ------------------------------------------------------------------------------------------------------------ windows


def _windows(keys: Keys, kind: _Type, layers: int) -> tuple[int | None, ...]:
    used = kind.window and keys.has("sliding_window")
    used = used and (not kind.window_switch or keys.flag("use_sliding_window", False))
    window = keys.integer("sliding_window") if used else None
    if not kind.layer_types:
        if keys.has("layer_types") and len(set(keys.texts("layer_types"))) > 1:
            different = ", ".join(sorted(set(keys.texts("layer_types"))))
            raise unsupported(keys.at("layer_types"), different, "all layers of this type are alike")
        return (window,) * layers
    types = keys.texts("layer_types") if keys.has("layer_types") else None
    if types is None and kind is _GEMMA3:
        period = keys.integer("_sliding_window_pattern", keys.integer("sliding_window_pattern"))
        return tuple(window if (i + 1) % period else None for i in range(layers))
    if types is None:
        first = keys.integer("max_window_layers", 28, low=0)
        return tuple(window if i >= first else None for i in range(layers))
    if len(types) != layers:
        raise ConfigError(f"{keys.at('layer_types')} is no list of {layers} layer types")
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise unsupported(keys.at("layer_types"), t, "known: full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ConfigError(f"{keys.at('layer_types')} has sliding_attention, but no sliding_window is in use")
    return tuple(window if t == "sliding_attention" else None for t in types)


# --------------------------------------------------------------------------------------------------------------- rope


def _ropes(keys: Keys, kind: _Type, head_dim: int) -> tuple[Rope, Rope]:
    """The ropes of layers without and with a window."""
    scaling = keys.child("rope_scaling")
    parameters = keys.child("rope_parameters")
    theta = keys.number("rope_theta", 10_000.0)
    positions = keys.integer("max_position_embeddings", 2048)

    def rope(of: Keys, theta: float) -> Rope:
        share = of.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
        if share > 1:
            raise unsupported("partial_rotary_factor", share, "it is a share of a head")
        if share != 1 and not kind.partial_rotary:
            raise unsupported("partial_rotary_factor", share, "heads of this type turn as a whole")
        dim = int(head_dim * share)
        if dim % 2 or not 0 < dim <= head_dim:
            raise ConfigError(f"rotary embeddings turn {dim} of a head's {head_dim} elements; that must be even")
        original = keys.integer("original_max_position_embeddings", 4096) if kind.partial_rotary else None
        values = of.values
        if kind.partial_rotary and of.has("short_factor"):
            values = {**values, "rope_type": "longrope"}  # older configs of the type say 'su' or 'yarn'
        return read_rope(values, of.path, dim, theta, positions, original)

    by_layer = [t for t in ("full_attention", "sliding_attention") if isinstance(parameters.values.get(t), Mapping)]
    if kind is not _GEMMA3:
        if by_layer:
            raise unsupported("rope_parameters", by_layer, "all layers of this type turn alike")
        one = rope(scaling if scaling.values else parameters, theta)
        return one, one
    if not by_layer and parameters.values:
        raise ConfigError("rope_parameters: expected one object for full_attention and one for sliding_attention")
    full, sliding = parameters.child("full_attention"), parameters.child("sliding_attention")
    if scaling.values:
        full = Keys({**full.values, **scaling.values}, scaling.path)
    return rope(full, theta), rope(sliding, keys.number("rope_local_base_freq"))


# ------------------------------------------------------------------------------------------------------------- shapes


def parameter_shapes(config: LLMConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, in the order of the layers. Names are those of Hugging Face's llama; projections
    that a type fuses (phi3) are apart here."""
    c, hidden = config, config.hidden_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        linear(f"{at}self_attn.q_proj", queries, hidden, c.qkv_bias)
        linear(f"{at}self_attn.k_proj", keys, hidden, c.qkv_bias)
        linear(f"{at}self_attn.v_proj", keys, hidden, c.qkv_bias)
        linear(f"{at}self_attn.o_proj", hidden, queries, c.output_bias)
        if c.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (c.head_dim,)
        linear(f"{at}mlp.gate_proj", c.intermediate_size, hidden, c.mlp_bias)
        linear(f"{at}mlp.up_proj", c.intermediate_size, hidden, c.mlp_bias)
        linear(f"{at}mlp.down_proj", hidden, c.intermediate_size, c.mlp_bias)
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if c.sandwich_norms else []
        shapes.update({f"{at}{name}.weight": (hidden,) for name in names})
    shapes["model.norm.weight"] = (hidden,)
    if not c.tied_embedding:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes
