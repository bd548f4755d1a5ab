"""Typed reading of config.json and of GGUF metadata: every value is checked, and an error names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...support.errors import ConfigError
from ...support.records import Field, show

__all__ = ["MAX_SIZE", "REQUIRED", "Keys", "unsupported"]

REQUIRED: Any = object()
MAX_SIZE = 2**31 - 1  # of anything that a config counts


def unsupported(path: str, value: Any, known: str) -> ConfigError:
    """Return the error for a setting that is understood but not supported."""
    return ConfigError(f"{path} = {show(value)} is not supported; {known}")


class Keys:
    """A JSON object of a config; ``path`` is where it is in the file. A null means the same as an absent key.

    ``aliases`` are the keys that the file uses in place of ours: methods take our key and errors name the file's.

    All methods raise ``ConfigError`` for a value of another type, and for an absent key without ``default``.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", aliases: Mapping[str, str] | None = None):
        if not isinstance(values, Mapping):
            Field(values, path or "the config", ConfigError).fail("an object")
        self.values, self.path, self._aliases = values, path, aliases or {}

    def name(self, key: str) -> str:
        """Return the file's key for ours."""
        return self._aliases.get(key, key)

    def at(self, key: str) -> str:
        """Return the path of a key in the file, for messages."""
        return f"{self.path}.{self.name(key)}" if self.path else self.name(key)

    def has(self, key: str) -> bool:
        """Return True if the key is present and not null."""
        return self.values.get(self.name(key)) is not None

    def field(self, key: str, default: Any = REQUIRED) -> Field:
        """Return the value of a key for checked reading, or ``default`` if it is absent."""
        value = self.values.get(self.name(key))
        if value is None and default is REQUIRED:
            raise ConfigError(f"{self.at(key)} is missing from the model's config")
        return Field(default if value is None else value, self.at(key), ConfigError)

    def integer(self, key: str, default: Any = REQUIRED, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return a whole number from ``low`` to ``high``."""
        return self.field(key, default).integer(low, high)

    def number(self, key: str, default: Any = REQUIRED, *, zero: bool = False) -> float:
        """Return a finite number above zero, or with ``zero`` at least zero."""
        return _positive(self.field(key, default), zero)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` finite numbers above zero."""
        return tuple(map(_positive, self.field(key).row(count)))

    def optional_number(self, key: str) -> float | None:
        """Return a finite number above zero, or None if the key is absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Return True or False."""
        return self.field(key, default).boolean()

    def text(self, key: str, default: Any = REQUIRED) -> str:
        """Return a string."""
        """A string."""
        return self.field(key, default).text()

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return self.field(key).texts()

    def child(self, key: str) -> Keys:
        """Return the object of a key, or an empty one if it is absent."""
        return Keys(self.field(key, {}).value, self.at(key))


def _positive(f: Field, zero: bool = False) -> float:
    value = f.number(0.0)
    if value == 0 and not zero:
        f.fail("a number above 0")
    return value
