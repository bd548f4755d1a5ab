"""``LLMConfig``: everything that fixes the computation of a decoder-only language model, from a config.json.

A model type means what the Hugging Face transformers class of that name computes. Both spellings of its config are
read: transformers 4 has ``rope_theta``, ``rope_scaling`` and ``torch_dtype``, 5 has ``rope_parameters`` and ``dtype``.
Settings of one family are read in its file of ``families/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...support import dtypes
from ...support.errors import ConfigError
from .blocks import BLOCKS
from .family import by_model_type, refused_settings
from .keys import Keys, unsupported
from .rope import Rope, head_dim, one_rope
from .windows import alike

__all__ = ["MAX_LAYERS", "LLMConfig", "parameter_shapes"]

ORDER = "order"  # leaf of the name of an order of columns, int64
MAX_LAYERS = 4096  # far above any real decoder; below it, listing all weights takes no time


@dataclass(frozen=True)
class LLMConfig:
    """A decoder: embedding, ``num_layers`` times (attention, MLP) with norms and residuals, norm, logits.

    Attributes:
        norm: 'rms' (normalise in float32, round, multiply), 'rms_float32' (multiply in float32, then round),
            'rms_unit_offset' (the same with 1 + weight), 'layer' (with a bias) or 'layer_no_bias'.
        block: the places of a layer's norms: a key of ``blocks.BLOCKS``.
        gated_mlp: the MLP is down(activation(gate(x)) * up(x)), else down(activation(up(x))).
        activation: the MLP's activation: 'silu', 'gelu', 'gelu_tanh' or 'relu'.
        qk_norm: queries and keys are normalised per 'head' or over the whole 'projection'; None: not at all.
        windows: per layer, the number of latest positions that a query sees, itself included; None: all.
        rope: the rotary embedding of layers without a window, ``window_rope`` of those with one; None: no rotation.
        nope_layers: layers that do not rotate either ('no positional encoding').
        learned_positions: an embedding of the position is added to the token's.
        attention_scale: factor of query times key.
        attention_softcap, logit_softcap: x becomes cap * tanh(x / cap); None: x stays.
        embedding_scale: factor of token embeddings; None: no factor.
        round_embedding_scale: that factor is rounded to the model's dtype first.
        residual_scale: factor of the results of attention and MLP before they are added; None: no factor.
        logit_scale: factor of logits; None: no factor.
        column_orders: (projection, the projection whose order it uses), of quantised projections whose weights have
            their columns in another order; a projection that uses its own comes first.
        dtype: the dtype of weights, activations and KV cache: one of ``dtypes.STORAGE_DTYPES``.
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
    rope: Rope | None
    window_rope: Rope | None
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    round_embedding_scale: bool = False
    residual_scale: float | None = None
    logit_scale: float | None = None
    norm: str = "rms"
    block: str = "pre_norm"
    qk_norm: str | None = None
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    learned_positions: bool = False
    nope_layers: tuple[int, ...] = ()
    tied_embedding: bool = False
    column_orders: tuple[tuple[str, str], ...] = ()
    dtype: str = "float32"

    def identity(self) -> str:
        """Return a text that differs between architectures. It lists only fields that differ from their defaults, so
        that it stays the same when fields are added."""
        return repr({f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LLMConfig:
        """Return the config that a ``config.json`` describes; for a multimodal model, that of its text model.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that is not supported; the message names it.
        """
        return _read(Keys(config))


_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
# Switches of other architectures, which a fork may have added to a known one: they must not be ignored.
_FOREIGN = (
    "num_experts", "num_local_experts", "kv_lora_rank", "clip_qkv", "use_bidirectional_attention",
    "add_cross_attention", "is_encoder_decoder", "attention_chunk_size", "attention_sinks", "quantization_config",
)  # fmt: skip


def _read(outer: Keys) -> LLMConfig:
    model_type = outer.text("model_type")
    family, keys = by_model_type(model_type), outer
    if model_type in family.wrappers:
        keys = outer.child(family.wrappers[model_type])
        tied = {"tie_word_embeddings": outer.flag("tie_word_embeddings")} if outer.has("tie_word_embeddings") else {}
        keys = Keys({**tied, **keys.values}, keys.path)
    for key in (*_FOREIGN, *refused_settings(family)):
        if keys.values.get(key):
            raise unsupported(keys.at(key), keys.values[key], f"a {family.model_type} model has no such setting here")
    # a null switches a default off
    keys = Keys({**family.defaults, **keys.values}, keys.path, family.aliases)
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{keys.at('num_key_value_heads')} = {kv_heads} does not divide the {heads} attention heads")
    own = {**family.fixed, **family.read(keys)}

    def given(field: str, read: Callable[[], Any]) -> Any:
        """Return the family's value of a field, else that of the settings that all families share."""
        return own.pop(field) if field in own else read()

    size = head_dim(keys)
    rope = given("rope", lambda: one_rope(keys))
    return LLMConfig(
        model_type=family.model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=given("intermediate_size", lambda: keys.integer("intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=keys.integer("max_position_embeddings", 2048),
        norm_eps=keys.number("rms_norm_eps", 1e-6, zero=True),
        activation=given("activation", lambda: _activation(keys)),
        rope=rope,
        window_rope=given("window_rope", lambda: rope),
        windows=given("windows", lambda: alike(keys)),
        attention_scale=given("attention_scale", lambda: size**-0.5),
        tied_embedding=keys.flag("tie_word_embeddings", False),
        dtype=_dtype(outer if outer.has("dtype") or outer.has("torch_dtype") else keys),
        **own,
    )


def _activation(keys: Keys) -> str:
    name = keys.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise unsupported(keys.at("hidden_act"), name, f"known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(keys: Keys) -> str:
    key = "dtype" if keys.has("dtype") else "torch_dtype"
    text = keys.text(key, "float32")
    try:
        return dtypes.storage_dtype(text)
    except ConfigError:
        raise unsupported(keys.at(key), text, f"known: {', '.join(dtypes.STORAGE_DTYPES)}") from None


def parameter_shapes(config: LLMConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of the layers. Names are those of Hugging Face's llama;
    projections that a family fuses (phi3) are separate here."""
    c, hidden = config, config.hidden_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    if c.learned_positions:
        shapes["model.embed_positions.weight"] = (c.max_position_embeddings, hidden)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = (size,)
        if c.norm == "layer":
            shapes[f"{name}.bias"] = (size,)

    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        linear(f"{at}self_attn.q_proj", queries, hidden, c.qkv_bias)
        linear(f"{at}self_attn.k_proj", keys, hidden, c.qkv_bias)
        linear(f"{at}self_attn.v_proj", keys, hidden, c.qkv_bias)
        linear(f"{at}self_attn.o_proj", hidden, queries, c.output_bias)
        if c.qk_norm is not None:
            norm(f"{at}self_attn.q_norm", queries if c.qk_norm == "projection" else c.head_dim)
            norm(f"{at}self_attn.k_norm", keys if c.qk_norm == "projection" else c.head_dim)
        if c.gated_mlp:
            linear(f"{at}mlp.gate_proj", c.intermediate_size, hidden, c.mlp_bias)
        linear(f"{at}mlp.up_proj", c.intermediate_size, hidden, c.mlp_bias)
        linear(f"{at}mlp.down_proj", hidden, c.intermediate_size, c.mlp_bias)
        for name in BLOCKS[c.block].norms():
            norm(f"{at}{name}", hidden)
    norm("model.norm", hidden)
    if not c.tied_embedding:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    for owner in dict.fromkeys(owner for _, owner in c.column_orders):
        shapes[f"{owner}.{ORDER}"] = shapes[f"{owner}.weight"][1:]
    return shapes
