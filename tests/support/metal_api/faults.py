"""What goes wrong: misuse that Metal's API validation stops, and errors that Metal reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .names import CONSTANTS


class APIMisuse(AssertionError):
    """A call that Metal's API validation refuses."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise APIMisuse(message)


class NSDictionary:
    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)

    def objectForKey_(self, key: str) -> Any:
        return self._values.get(key)


class NSError:
    def __init__(self, text: str, code: int = 1, info: Mapping[str, Any] | None = None):
        self._text, self._code, self._info = text, code, NSDictionary(info or {})

    def localizedDescription(self) -> str:
        return self._text

    def code(self) -> int:
        return self._code

    def userInfo(self) -> NSDictionary:
        return self._info

    def with_encoders(self, encoders: Sequence[EncoderInfo]) -> NSError:
        """The error of a command buffer that was asked for the state of its encoders."""
        return NSError(self._text, self._code, {CONSTANTS["MTLCommandBufferEncoderInfoErrorKey"]: list(encoders)})


class EncoderInfo:
    def __init__(self, label: str, state: int, signposts: Sequence[str] = ()):
        self._label, self._state, self._signposts = label, state, list(signposts)

    def label(self) -> str:
        return self._label

    def errorState(self) -> int:
        return self._state

    def debugSignposts(self) -> list[str]:
        return self._signposts
