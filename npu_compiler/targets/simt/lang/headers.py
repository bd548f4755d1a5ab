"""Kernel headers: a kernel's text says ``#include "gemm.h"`` as any C++ does; the compilers get one text.

A header begins with a comment that says what it computes and how it is used, then ``#pragma once`` and what it needs
itself. It is written in the words of :mod:`npu_compiler.targets.simt.lang.dialect` if every GPU target runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


def included(text: str, folders: Sequence[Path]) -> dict[str, str]:
    """The headers that ``text`` includes, directly or not, by name; each behind those it needs."""
    found: dict[str, str] = {}
    for name in _INCLUDE.findall(text):
        header = _read(name, tuple(folders))
        found |= {inner: t for inner, t in included(header, folders).items() if inner not in found}
        found.setdefault(name, header)
    return found


def pasted(texts: Iterable[str], folders: Sequence[Path]) -> str:
    """``texts`` as one that includes nothing: every header once, before all of them."""
    text = "\n".join(texts)
    headers = [re.sub(r"^#pragma once\n", "", h, flags=re.MULTILINE) for h in included(text, folders).values()]
    return "\n".join(_INCLUDE.sub("", t) for t in (*headers, text))


@cache
def _read(name: str, folders: tuple[Path, ...]) -> str:
    path = next((f / name for f in folders if (f / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"kernel header {name} is in none of {', '.join(map(str, folders))}")
    return path.read_text()
