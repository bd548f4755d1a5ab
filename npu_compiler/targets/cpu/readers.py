"""Readers of weight formats: the kernel headers that decode panels of weights (``kernels/storage.h``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...weights.format import find_layout

_ONCE = re.compile(r"^#pragma once\n", re.M)


@dataclass(frozen=True)
class Reader:
    """The reader of ``format``, a C++ struct of that name. ``text`` defines or includes it in a translation unit."""

    format: str
    text: str


def reader_of(layout: str) -> Reader:
    """Return the reader of a layout.

    A reader of this package is a header named after its format. A reader from outside is copied into the program's
    sources, so that they can be compiled anywhere.
    """
    format, found = find_layout(layout)
    if found.reader is None:
        return Reader(format.name, f'#include "{format.name}.h"\n')
    return Reader(format.name, _ONCE.sub("", found.reader.read_text(encoding="utf-8"), count=1))
