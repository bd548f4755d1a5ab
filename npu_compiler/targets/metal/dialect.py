"""The SIMT vocabulary in the Metal Shading Language."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ..simt.lang.dialect import Array, Dialect, Param
from .devices import DEVICES, AppleGPU

MAX_BUFFERS = 31

_BUILTINS = (
    "uint workgroup_ [[threadgroup_position_in_grid]]",
    "uint tid_ [[thread_index_in_threadgroup]]",
    "uint lane_ [[thread_index_in_simdgroup]]",
    "uint subgroup_ [[simdgroup_index_in_threadgroup]]",
)
_ENTRY = "const int workgroup = (int)workgroup_, tid = (int)tid_, lane = (int)lane_, subgroup = (int)subgroup_;"
_SHARED = re.compile(r"^\s*threadgroup uint4 \w+\[(\d+)\];", re.MULTILINE)
_UNUSED = "(void)workgroup, (void)tid, (void)lane, (void)subgroup;"


def entry(name: str, params: Sequence[Param], threads: int, resident: int) -> str:
    """Return the opening of a kernel (see ``Dialect.entry``). Buffers are numbered in order; a kernel has no other
    arguments, because sizes are literals."""
    declared = [f"{_qualifiers(p)} {p.ctype}* {p.name} [[buffer({i})]]" for i, p in enumerate(params)]
    arguments = ",\n    ".join([*declared, *_BUILTINS])
    limit = f"[[kernel, max_total_threads_per_threadgroup({threads})]]"
    return f"{limit}\nvoid {name}(\n    {arguments}) {{\n  {_ENTRY}\n  {_UNUSED}"


def _qualifiers(p: Param) -> str:
    return "COHERENT" if p.coherent else "device" if p.writable else "device const"


def shared(arrays: Sequence[Array]) -> tuple[list[str], int]:
    """Return the declarations of threadgroup memory (see ``Dialect.shared``), as 16-byte vectors because these are the
    only way to align it."""
    lines = []
    for a in arrays:
        lines.append(f"threadgroup uint4 {a.name}_memory[{a.nbytes // 16}];")
        lines.append(f"threadgroup {a.ctype}* const {a.name} = (threadgroup {a.ctype}*){a.name}_memory;")
    return lines, 0


def shared_bytes(source: str) -> int:
    """Return the bytes of threadgroup memory that a kernel's source declares (see :func:`shared`)."""
    return 16 * sum(map(int, _SHARED.findall(source)))


DIALECT = Dialect(
    name="metal",
    prelude=(Path(__file__).parent / "kernels" / "prelude.h").read_text(),
    entry=entry,
    shared=shared,
    device=DEVICES[0],
    matrix=(8, 8, 8),
    matrix_types=("float16", "bfloat16"),
    stages=2,
    max_params=MAX_BUFFERS,
)


@cache
def dialect_for(device: AppleGPU) -> Dialect:
    """Return the dialect for ``device``."""
    return replace(DIALECT, device=device, arrival_counters=device.coherent)
