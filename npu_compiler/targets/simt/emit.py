"""Kernels to functions and launches: equal kernels are emitted once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

from ...schedule.anchors import (
    Attention,
    CombineAttention,
    Conv2d,
    DecodeAttention,
    DepthwiseConv2d,
    Gemm,
)
from ...schedule.kernel import (
    FusedLoops,
    K,
    Kernel,
    Loops,
    MergeRuns,
    Operand,
    Scan,
    ScanTotals,
    ScatterResult,
    ScatterUpdates,
    Sort,
    Unpack,
)
from ...schedule.schedule import Schedule
from ...support import dtypes
from ...support.errors import Reason
from .kernels.attention import emit_attention, emit_combine_attention
from .kernels.attention_decode import emit_decode_attention
from .kernels.depthwise import emit_depthwise
from .kernels.gemm import emit_conv, emit_gemm, reads
from .kernels.loops import emit_fused, emit_loops
from .kernels.scans import emit_scan, emit_scan_totals
from .kernels.scatter_updates import emit_scatter_result, emit_scatter_updates
from .kernels.sorts import emit_sort, emit_sort_merge
from .kernels.unpack import emit_unpack
from .lang.dialect import Dialect
from .lang.emission import Emission
from .lang.program import ARENA, Launch


def _entry(
    kernel: type[K], emit: Callable[[K, Dialect], Emission]
) -> tuple[type[Kernel], Callable[[Any, Dialect], Emission]]:
    return kernel, emit


EMITTERS: dict[type[Kernel], Callable[[Any, Dialect], Emission]] = dict(
    (
        _entry(Loops, emit_loops),
        _entry(FusedLoops, emit_fused),
        _entry(Gemm, emit_gemm),
        _entry(Conv2d, emit_conv),
        _entry(DepthwiseConv2d, emit_depthwise),
        _entry(Attention, emit_attention),
        _entry(CombineAttention, emit_combine_attention),
        _entry(DecodeAttention, emit_decode_attention),
        _entry(Scan, emit_scan),
        _entry(ScanTotals, emit_scan_totals),
        _entry(ScatterUpdates, emit_scatter_updates),
        _entry(ScatterResult, emit_scatter_result),
        _entry(Sort, emit_sort),
        _entry(MergeRuns, emit_sort_merge),
        _entry(Unpack, emit_unpack),
    )
)


def emit(kernel: Kernel, dialect: Dialect) -> Emission:
    """Return the function of a kernel: the target's own, or else the common one."""
    special = dialect.special_for(kernel)
    return (special.emit if special is not None else EMITTERS[type(kernel)])(kernel, dialect)


def unsupported(kernel: Kernel, dialect: Dialect) -> Reason | None:
    """Return the reason why this dialect has no code for ``kernel``, or None if it has."""
    if type(kernel) not in EMITTERS and dialect.special_for(kernel) is None:
        return Reason("no_kernel", f"the {dialect.name} target has no {kernel.kind} kernel")
    weights = [kernel.weight] if isinstance(kernel, Gemm) else kernel.inputs if isinstance(kernel, Unpack) else ()
    for w in weights:
        if not reads(w.format):
            return Reason("no_reader", f"the {dialect.name} target has no reader for weights in {w.format}")
    return None


class Functions:
    """The functions of a program by name; :meth:`launch` adds what a kernel needs."""

    def __init__(self, dialect: Dialect):
        self.dialect = dialect
        self.text: dict[str, str] = {}
        self._emitted: dict[Hashable, Emission] = {}
        self._names: dict[str, str] = {}

    def launch(self, kernel: Kernel) -> Launch:
        """Emit the function of ``kernel`` unless it exists, and return its launch. Kernels without results have 0
        workgroups."""
        key = kernel.structural_key(_layout)
        if key not in self._emitted:
            self._emitted[key] = emit(kernel, self.dialect)
        e = self._emitted[key]
        arguments = tuple(_place(kernel, n) for n in e.operands)
        maps = tuple((*_place(kernel, n), tiles) for n, tiles in e.maps)
        name = self._name(kernel, e) if e.workgroups else ""
        return Launch(name, e.workgroups, e.threads, e.shared, arguments, e.checks, maps)

    def launches(self, schedule: Schedule) -> list[Launch]:
        """Return the launches of an entry point, one per kernel."""
        return [self.launch(k) for k in schedule.kernels]

    def _name(self, kernel: Kernel, e: Emission) -> str:
        if e.text not in self._names:
            label = re.sub(r"\W", "_", kernel.label)
            name = self._names[e.text] = f"{label}_{len(self._names)}"
            self.text[name] = e.text.replace("@NAME@", name)
        return self._names[e.text]


def _place(kernel: Kernel, number: int) -> tuple[int, int]:
    """Return (buffer id, byte offset) of input ``number`` or output ``~number``."""
    op = kernel.inputs[number] if number >= 0 else kernel.outputs[~number]
    byte = op.offset * dtypes.DTYPES[op.dtype].size
    return (ARENA, op.buffer.offset + byte) if op.buffer.kind == "arena" else (op.buffer.id, byte)


def _layout(o: Operand) -> Hashable:
    """Return the properties of an operand that a kernel's text depends on, in addition to its dtype, format, shape and
    strides: its alignment, and whether it may be read before preceding kernels end."""
    constant = o.buffer.constant
    return o.offset * dtypes.DTYPES[o.dtype].size % 16, constant, o.buffer.is_input


def sources(functions: Functions, suffix: str) -> dict[str, str]:
    """Return readable text by file name: the vocabulary, the headers that kernels include, and the kernels."""
    headers = functions.dialect.included(functions.text.values())
    kernels = "\n".join(functions.text.values())
    return {f"prelude.{suffix}": functions.dialect.head, **headers, f"kernels.{suffix}": kernels}
