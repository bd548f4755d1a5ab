"""Settings of a quantization_config that several methods have."""

from __future__ import annotations

from typing import Any

from ...support.errors import ConfigError
from ...support.records import Field, show


def one_of(config: dict[str, Field], key: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """Return a setting, which must be one of ``known`` (texts: in any case); an absent one or a null is ``default``.

    Raises:
        ConfigError: it has another value.
    """
    field = config.get(key)
    value = default if field is None or field.value is None else field.value
    value = value.lower() if isinstance(value, str) else value
    if type(value) not in {type(k) for k in known} or value not in known:
        path = field.path if field is not None else f"quantization_config.{key}"
        raise ConfigError(f"{path} = {show(value)} is not supported; known: {', '.join(map(str, known))}")
    return value


def group_size(config: dict[str, Field]) -> int:
    """Return the columns that share a scale; -1: all. Raises ``ConfigError`` for other values."""
    field = config.get("group_size")
    if field is None:
        return 128
    if field.value == -1:
        return -1
    return field.integer(1, 2**31 - 1)
