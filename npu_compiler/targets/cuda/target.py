"""Schedules -> CUDA C++ -> one cubin a kernel (and PTX for chips that are newer). Loading compiles nothing."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...support import env
from ...support.cache import open_cache
from ...target_config import TARGETS
from ..simt.lang.dialect import Dialect
from ..simt.target import SimtTarget
from . import chips
from .dialect import dialect_for
from .nvrtc import FLAGS, Compiled, Nvrtc, find_nvrtc


class CUDATarget(SimtTarget):
    """Compiles for one chip (``chips.arch``). With an 'a' at the end of its name, code uses what that chip alone has;
    without, a cubin runs on chips of the same major version, and its PTX on later ones."""

    name = "cuda"
    config = TARGETS["cuda"]
    suffix = "cu"

    @property
    def dialect(self) -> Dialect:
        return dialect_for(chips.arch())

    def build(self, functions: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
        arch, nvrtc, dialect = chips.arch(), find_nvrtc(), self.dialect
        names = list(functions)
        with ThreadPoolExecutor(env.usable_cpus()) as pool:
            made = list(pool.map(lambda n: compile_function(nvrtc, dialect.source([functions[n]]), n, arch), names))
        modules = {n: [c.cubin, zlib.compress(c.ptx) if c.ptx else b""] for n, c in zip(names, made, strict=True)}
        build = {"compiler": f"nvrtc {'.'.join(map(str, nvrtc.version))}", "flags": " ".join((f"-arch={arch}", *FLAGS))}
        return {"arch": arch, "modules": modules}, (arch,), build


def compile_function(nvrtc: Nvrtc, source: str, name: str, arch: str) -> Compiled:
    """One kernel, from the cache if the same text was compiled before."""
    cache = open_cache("cuda")
    # the name is part of the symbol: kernels that differ in nothing else are still different
    key = f"cubin {nvrtc.version} {arch} {FLAGS} {source}"
    known = cache.get(key)
    if known is not None:
        size = int.from_bytes(known[:8], "little")
        return Compiled(known[8 : 8 + size], known[8 + size :])
    made = nvrtc.compile(source, name, arch)
    cache.put(key, len(made.cubin).to_bytes(8, "little") + made.cubin + made.ptx)
    return made


TARGET = CUDATarget()
