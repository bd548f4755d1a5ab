"""Kernel headers: a kernel includes them by ``#include "gemm.h"``; the compilers receive one text without includes.

A header begins with a comment about its computation and its use, then ``#pragma once`` and its own includes. Headers
for all GPU targets are written in the vocabulary of :mod:`npu_compiler.targets.simt.lang.dialect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


def included(text: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the headers that ``text`` includes, directly or not, as name -> text; each after those that it includes.

    Raises ``FileNotFoundError`` if a header is in none of ``folders``.
    """
    found: dict[str, str] = {}
    for name in _INCLUDE.findall(text):
        header = _read(name, tuple(folders))
        found |= {inner: t for inner, t in included(header, folders).items() if inner not in found}
        found.setdefault(name, header)
    return found


def pasted(texts: Iterable[str], folders: Sequence[Path]) -> str:
    """Return ``texts`` as one text without includes: every header once, before all of them."""
    text = "\n".join(texts)
    headers = [re.sub(r"^#pragma once\n", "", h, flags=re.MULTILINE) for h in included(text, folders).values()]
    return "\n".join(_INCLUDE.sub("", t) for t in (*headers, text))


@cache
def _read(name: str, folders: tuple[Path, ...]) -> str:
    path = next((f / name for f in folders if (f / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"kernel header {name} is in none of {', '.join(map(str, folders))}")
    return path.read_text()
