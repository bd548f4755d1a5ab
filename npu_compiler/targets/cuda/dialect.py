"""The SIMT vocabulary in CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...schedule.anchors import Attention, B2bConv2d, Conv2d, DualConv2d, Gemm, GemmWithLoops, PooledConv2d
from ..simt.lang.dialect import KERNELS as COMMON_KERNELS
from ..simt.lang.dialect import Array, Dialect, Param, special
from .b2b_conv import emit_b2b_conv, supports_b2b_conv
from .decoded_gemm import decoded_column_tiles, emit_decoded_gemm, supports_decoded
from .devices import DEFAULT, DEVICES, CUDADevice
from .dual_conv import emit_dual_conv, supports_dual_conv
from .flash import emit_wgmma_flash, supports_attention
from .flash_tf32 import emit_flash_tf32, supports_float32
from .pooled_conv import emit_pooled_conv, supports_pooled_conv
from .pooled_rows import emit_pooled_rows, supports_pooled_rows
from .rotary_gemm import emit_rotary_gemm, supports_rotary_gemm
from .tma_conv import emit_tma_conv, supports_tma_conv
from .tma_gemm import column_tiles, emit_tma_gemm, supports_tma

KERNELS = Path(__file__).parent / "kernels"
STATIC_BYTES = 48 << 10  # shared memory that can be declared; more is requested at launch

_ENTRY = (
    "const int workgroup = (int)blockIdx.x, tid = (int)threadIdx.x, lane = tid & 31, subgroup = tid >> 5; "
    "(void)workgroup, (void)lane, (void)subgroup;"
)


def entry(name: str, params: Sequence[Param], threads: int, resident: int) -> str:
    """Return the opening of a kernel: see ``Dialect.entry``."""

    def declare(p: Param) -> str:
        if p.ctype == "TensorMap":
            return f"const __grid_constant__ TensorMap {p.name}"
        if p.constant:
            return f"const {p.ctype}* __restrict__ {p.name}"
        return f"{'' if p.writable else 'const '}{p.ctype}* {p.name}"

    bounds = f"{threads}, {resident}" if resident else str(threads)
    head = f'extern "C" __global__ void __launch_bounds__({bounds})\n{name}({", ".join(map(declare, params))}) {{'
    return f"{head}\n  {_ENTRY}"


def clustered(head: str, count: int) -> str:
    """Return the opening ``head`` of a kernel for clusters of ``count`` thread blocks."""
    return head.replace("__global__ void ", f"__global__ void __cluster_dims__({count}, 1, 1) ", 1)


def shared(arrays: Sequence[Array]) -> tuple[list[str], int]:
    """Return the declarations of shared memory, and the bytes to request at launch: see ``Dialect.shared``."""
    total = sum(a.nbytes for a in arrays)
    if total <= STATIC_BYTES:
        return [f"__shared__ __align__({_alignment(a)}) {a.ctype} {a.name}[{a.length}];" for a in arrays], 0
    lines, at = ["extern __shared__ __align__(1024) unsigned char shared_memory[];"], 0
    for a in arrays:
        lines.append(f"{a.ctype}* const {a.name} = ({a.ctype}*)(shared_memory + {at});")
        at += a.nbytes
    return lines, total


def _alignment(a: Array) -> int:
    """Return the alignment of an array. Large ones may hold wgmma operands, whose swizzle repeats every 1024 bytes."""
    return 1024 if a.nbytes >= 1 << 14 else 16


DIALECT = Dialect(
    name="cuda",
    prelude=(KERNELS / "prelude.h").read_text(),
    headers=(COMMON_KERNELS, KERNELS),
    entry=entry,
    shared=shared,
    device=DEVICES[0],
    matrix=(16, 8, 16),
    matrix_types=("float16", "bfloat16", "uint8"),
    matrix_tf32=(16, 8, 8),
    stages=4,
    fragment_access=True,
    grid_barrier=True,
    prefetches=True,
    has_double=True,
    fast=("sigmoid",),
    special=(special(Attention, supports_float32, emit_flash_tf32),),
)

# Programs that use Hopper's own instructions run on no other architecture.
HOPPER = replace(
    DIALECT,
    device=DEFAULT,
    overlaps=True,
    wgmma_widths=(64, 128, 256),
    special=(
        special(Gemm, lambda k, _: supports_tma(k), emit_tma_gemm, column_tiles),
        special(Gemm, supports_decoded, emit_decoded_gemm, decoded_column_tiles),
        special(Conv2d, supports_tma_conv, emit_tma_conv),
        special(Conv2d, lambda k, _: supports_tma(k), emit_tma_gemm),
        special(DualConv2d, supports_dual_conv, emit_dual_conv),
        special(B2bConv2d, supports_b2b_conv, emit_b2b_conv),
        special(PooledConv2d, supports_pooled_rows, emit_pooled_rows),
        special(PooledConv2d, supports_pooled_conv, emit_pooled_conv),
        special(GemmWithLoops, supports_rotary_gemm, emit_rotary_gemm),
        special(Attention, supports_attention, emit_wgmma_flash),
        *DIALECT.special,
    ),
    clustered=clustered,
)


@cache
def dialect_for(device: CUDADevice) -> Dialect:
    """Return the dialect for ``device``: with TMA and wgmma on Hopper."""
    return replace(DIALECT if device.tma is None else HOPPER, device=device)
