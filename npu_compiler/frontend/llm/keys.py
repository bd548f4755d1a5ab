"""Typed reading of config.json: every value is checked, and an error names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_compiler.errors import ConfigError

__all__ = ["REQUIRED", "Keys", "unsupported"]

REQUIRED: Any = object()


def unsupported(path: str, value: Any, known: str) -> ConfigError:
    """The error for a setting that is understood but not supported."""
    return ConfigError(f"{path} = {value!r} is not supported; {known}")


class Keys:
    """A JSON object of a config; ``path`` is where it lies in the file. A null is as good as an absent key.

    All methods raise ``ConfigError`` for a value of another type, and for an absent key without ``default``.
    """

    def __init__(self, values: Mapping[str, Any], path: str = ""):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path or 'the config'} is a {type(values).__name__}, expected an object")
        self.values, self.path = values, path

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self.at(key)} is missing from the model's config")
        return default

    def integer(self, key: str, default: Any = REQUIRED, low: int = 1) -> int:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{self.at(key)} is {value!r}, expected a whole number from {low} on")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, zero: bool = False) -> float:
        value = self.raw(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (0 <= value < float("inf")) or (value == 0 and not zero):
            raise ConfigError(f"{self.at(key)} is {value!r}, expected a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.raw(key)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ConfigError(f"{self.at(key)} is no list of {count} numbers")
        return tuple(Keys({key: v}, self.path).number(key) for v in value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.at(key)} is {value!r}, expected true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.at(key)} is {value!r}, expected a text")
        return value

    def child(self, key: str) -> Keys:
        return Keys(self.raw(key, {}), self.at(key))
