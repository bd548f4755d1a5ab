"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) and their context extensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...support.errors import ConfigError
from .keys import Keys, unsupported

__all__ = ["Rope", "head_dim", "layer_ropes", "one_rope", "read_rope", "rope_settings", "scaled_rope"]

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """The rotation of the first ``dim`` elements of a head, in pairs (i, i + dim / 2).

    ``kind`` is one of ``KINDS`` and uses some of the other fields. cos and sin are multiplied by ``attention_factor``.
    'longrope' divides frequencies by ``short_factor`` if the cache is not longer than ``original_positions``, else by
    ``long_factor``.
    """

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def head_dim(keys: Keys) -> int:
    """Return the elements of an attention head: 'head_dim', else an equal share of 'hidden_size'."""
    return keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))


def layer_ropes(keys: Keys) -> list[str]:
    """Return the types of layers for which 'rope_parameters' has a separate object."""
    parameters = keys.child("rope_parameters").values
    return [t for t in ("full_attention", "sliding_attention") if isinstance(parameters.get(t), Mapping)]


def rope_settings(keys: Keys) -> Keys:
    """Return 'rope_scaling' (transformers 4) or else 'rope_parameters' (5), for models whose layers share one rope.

    Raises:
        ConfigError: 'rope_parameters' differ by layer.
    """
    scaling, by_layer = keys.child("rope_scaling"), layer_ropes(keys)
    if by_layer:
        raise unsupported("rope_parameters", by_layer, "all layers of this type rotate alike")
    return scaling if scaling.values else keys.child("rope_parameters")


def scaled_rope(
    keys: Keys, settings: Keys, theta: float | None = None, *, partial: bool = False, original: int | None = None
) -> Rope:
    """Return the rope that ``settings``, an object of the config ``keys``, describes.

    Args:
        theta: used if ``settings`` has none; None: 'rope_theta' of ``keys``, else 10,000.
        partial: the family rotates a part of each head ('partial_rotary_factor').
        original: see ``read_rope``.

    Raises:
        ConfigError: a setting is malformed or not supported.
    """
    if theta is None:
        theta = keys.number("rope_theta", 10_000.0)
    size = head_dim(keys)
    share = settings.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if share > 1:
        raise unsupported(keys.at("partial_rotary_factor"), share, "it is a share of a head")
    if share != 1 and not partial:
        raise unsupported(keys.at("partial_rotary_factor"), share, "heads of this type rotate as a whole")
    dim = int(size * share)
    if dim % 2 or not 0 < dim <= size:
        raise ConfigError(f"rotary embeddings rotate {dim} of a head's {size} elements; that must be even")
    positions = keys.integer("max_position_embeddings", 2048)
    return read_rope(settings.values, settings.path, dim, theta, positions, original)


def one_rope(keys: Keys, *, partial: bool = False) -> Rope:
    """Return the rope that all layers share; see ``scaled_rope``."""
    return scaled_rope(keys, rope_settings(keys), partial=partial)


def read_rope(
    values: Mapping[str, Any], path: str, dim: int, theta: float, positions: int, original: int | None
) -> Rope:
    """Return the rope that ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5) describes.

    Args:
        values: the object; ``path`` is where it is in the config.
        dim: elements of a head that rotate.
        theta: used if the object has no ``rope_theta``.
        positions: ``max_position_embeddings``.
        original: the config's own ``original_max_position_embeddings``, which overrides the object's.

    Raises:
        ConfigError: a setting is malformed or not supported.
    """
    keys = Keys(values, path)
    kind = keys.text("rope_type", keys.text("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in KINDS:
        raise unsupported(keys.at("rope_type"), kind, f"known: {', '.join(KINDS)}")
    if keys.has("mrope_section"):
        raise unsupported(keys.at("mrope_section"), values["mrope_section"], "positions have one axis here")
    theta = keys.number("rope_theta", theta)
    if kind == "default":
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, kind, keys.number("factor"))
    before = original or keys.integer("original_max_position_embeddings", positions)
    if kind == "llama3":
        return Rope(
            dim, theta, kind, keys.number("factor"), before,
            low_freq_factor=keys.number("low_freq_factor"), high_freq_factor=keys.number("high_freq_factor"),
        )  # fmt: skip
    if before < 2:
        raise ConfigError(f"{keys.at('original_max_position_embeddings')} = {before}: it takes 2 or more")
    factor = keys.number("factor", positions / before)
    if kind == "yarn":
        return Rope(
            dim, theta, kind, factor, before, _yarn_attention(keys, factor),
            beta_fast=keys.number("beta_fast", 32.0), beta_slow=keys.number("beta_slow", 1.0),
            truncate=keys.flag("truncate", True),
        )  # fmt: skip
    stretched = math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 else 1.0
    return Rope(
        dim, theta, kind, factor, before, keys.number("attention_factor", stretched),
        short_factor=keys.numbers("short_factor", dim // 2), long_factor=keys.numbers("long_factor", dim // 2),
    )  # fmt: skip


def _yarn_attention(keys: Keys, factor: float) -> float:
    """Peng et al. 2023 (https://arxiv.org/abs/2309.00071), section 3.4; DeepSeek's two mscales generalise it."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    default = magnitude(1.0)
    if keys.has("mscale") and keys.has("mscale_all_dim"):
        over, under = keys.number("mscale", zero=True), keys.number("mscale_all_dim", zero=True)
        if over and under:
            default = magnitude(over) / magnitude(under)
    return keys.number("attention_factor", default)
