"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) and the ways to stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...support.errors import ConfigError
from .keys import Keys, unsupported

__all__ = ["Rope", "read_rope"]

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """How far elements of a head turn per position: ``dim`` of them do, in pairs (i, i + dim / 2).

    ``kind`` is one of ``KINDS``; the other fields are those that the kind needs. cos and sin are multiplied by
    ``attention_factor``. 'longrope' divides frequencies by ``short_factor`` where the cache is no longer than
    ``original_positions``, else by ``long_factor``.
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


def read_rope(
    values: Mapping[str, Any], path: str, dim: int, theta: float, positions: int, original: int | None
) -> Rope:
    """The rope that ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5) describes.

    ``theta``: when it has no ``rope_theta``. ``positions``: ``max_position_embeddings``. ``original``: the config's own
    ``original_max_position_embeddings``, which goes before the one in ``values``.
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
