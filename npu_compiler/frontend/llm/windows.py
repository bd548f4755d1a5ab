"""Sliding windows of attention, as configs describe them: per layer, how many latest positions a query sees."""

from __future__ import annotations

from collections.abc import Callable

from ...support.errors import ConfigError
from .keys import Keys, unsupported

__all__ = ["Windows", "alike", "all_but_every_nth", "by_layer", "late_layers", "window_size"]

Windows = tuple[int | None, ...]  # per layer; None: all positions


def alike(keys: Keys, window: int | None = None) -> Windows:
    """Return the windows of a model whose layers all have the same one.

    Raises:
        ConfigError: 'layer_types' says otherwise.
    """
    if keys.has("layer_types") and len(set(keys.texts("layer_types"))) > 1:
        different = ", ".join(sorted(set(keys.texts("layer_types"))))
        raise unsupported(keys.at("layer_types"), different, "all layers of this type are alike")
    return (window,) * keys.integer("num_hidden_layers")


def by_layer(keys: Keys, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """Return the windows: 'layer_types' says which layers have one; if it is absent, ``slides(layer)`` decides.

    Raises:
        ConfigError: 'layer_types' has another length or a type that is not supported.
    """
    layers = keys.integer("num_hidden_layers")
    if not keys.has("layer_types"):
        return tuple(window if slides(i) else None for i in range(layers))
    types = keys.texts("layer_types")
    if len(types) != layers:
        raise ConfigError(f"{keys.at('layer_types')} is not a list of {layers} layer types")
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise unsupported(keys.at("layer_types"), t, "known: full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ConfigError(f"{keys.at('layer_types')} has sliding_attention, but no sliding_window is in use")
    return tuple(window if t == "sliding_attention" else None for t in types)


def window_size(keys: Keys) -> int | None:
    """Return 'sliding_window', or None if there is none."""
    return keys.integer("sliding_window") if keys.has("sliding_window") else None


def all_but_every_nth(keys: Keys) -> Windows:
    """Return the windows: without 'layer_types', all layers but every 'sliding_window_pattern'-th have one."""

    def slides(layer: int) -> bool:
        period = keys.integer("_sliding_window_pattern", keys.integer("sliding_window_pattern"))
        return (layer + 1) % period != 0

    return by_layer(keys, window_size(keys), slides)


def late_layers(keys: Keys) -> Windows:
    """Return the windows: without 'layer_types', layers from 'max_window_layers' on have one if 'use_sliding_window' is
    set."""
    used = keys.has("sliding_window") and keys.flag("use_sliding_window", False)
    first = 0 if keys.has("layer_types") else keys.integer("max_window_layers", 28, low=0)
    return by_layer(keys, window_size(keys) if used else None, lambda i: i >= first)
