"""A griffe extension for the API reference: the roles of Sphinx in docstrings become plain code in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:[a-z]+):`~?\.*([^`]+)`")


class Roles(griffe.Extension):
    """``:func:`~npu_compiler.compile``` is shown as ``npu_compiler.compile``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
