"""Schedules -> CUDA C++ -> one cubin per kernel, and PTX for later chips. Loading a program compiles nothing."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...support import env, progress
from ...support.cache import open_cache
from .. import Selectable
from ..simt.lang.dialect import Dialect
from ..simt.target import SimtTarget
from .devices import CONFIG, CUDADevice, device_at_hand
from .dialect import dialect_for
from .nvrtc import FLAGS, Compiled, Nvrtc, find_nvrtc


class CUDATarget(Selectable[CUDADevice], SimtTarget):
    """The CUDA code generator. Code for an architecture whose name ends in 'a' runs only on that one. Other cubins run
    on later architectures of the same major version, and their PTX runs on all later ones."""

    name = "cuda"
    config = CONFIG
    suffix = "cu"
    device_at_hand = staticmethod(device_at_hand)

    @property
    def dialect(self) -> Dialect:
        return dialect_for(self.device)

    def compiler(self) -> str:
        return f"NVRTC {'.'.join(map(str, find_nvrtc().version))}"

    def build(self, functions: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
        arch, nvrtc, dialect = self.device.arch, find_nvrtc(), self.dialect
        names = list(functions)
        with ThreadPoolExecutor(env.usable_cpus()) as pool, progress.step("compiling CUDA", len(names)) as step:

            def compiled(name: str) -> Compiled:
                made = compile_function(nvrtc, dialect.source([functions[name]]), name, arch)
                step.advance()
                return made

            made = list(pool.map(compiled, names))
        modules = {n: [c.cubin, zlib.compress(c.ptx) if c.ptx else b""] for n, c in zip(names, made, strict=True)}
        build = {"compiler": f"nvrtc {'.'.join(map(str, nvrtc.version))}", "flags": " ".join((f"-arch={arch}", *FLAGS))}
        return {"arch": arch, "modules": modules}, (arch,), build


def compile_function(nvrtc: Nvrtc, source: str, name: str, arch: str) -> Compiled:
    """Compile one kernel, or take it from the cache. Raises ``ToolchainError`` if it does not compile."""
    cache = open_cache("cuda")
    key = f"cubin {nvrtc.version} {arch} {FLAGS} {source}"
    known = cache.get(key)
    if known is not None:
        size = int.from_bytes(known[:8], "little")
        return Compiled(known[8 : 8 + size], known[8 + size :])
    made = nvrtc.compile(source, name, arch)
    cache.put(key, len(made.cubin).to_bytes(8, "little") + made.cubin + made.ptx)
    return made


TARGET = CUDATarget()
