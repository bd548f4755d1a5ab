"""Kernels to functions and launches: equal kernels are emitted once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable

from ...schedule.kernel import PAIR, Kernel, Schedule
from ...support import dtypes
from ...support.errors import Reason
from .kernels.attention import emit_attention, emit_merge
from .kernels.attention_decode import emit_attention_step
from .kernels.depthwise import emit_depthwise
from .kernels.gemm import READERS, emit_conv, emit_gemm
from .kernels.loops import emit_bundle, emit_loops
from .kernels.scans import emit_scan
from .kernels.sorts import emit_sort, emit_sort_merge
from .lang.dialect import Dialect
from .lang.emission import Emission
from .lang.program import ARENA, Launch

EMITTERS: dict[str, Callable[[Kernel, Dialect], Emission]] = {
    "loops": emit_loops,
    "bundle": emit_bundle,
    "gemm": emit_gemm,
    "conv2d": emit_conv,
    "depthwise": emit_depthwise,
    "attention": emit_attention,
    "attention_merge": emit_merge,
    "attention_step": emit_attention_step,
    "scan": emit_scan,
    "sort": emit_sort,
    "sort_merge": emit_sort_merge,
}


def unsupported(kernel: Kernel) -> Reason | None:
    if kernel.kind not in (*EMITTERS, PAIR):  # a pair is only made where the target has its function
        return Reason("no_kernel", f"the GPU targets have no {kernel.kind} kernel")
    if kernel.kind == "gemm" and kernel.weight.format not in ("", *READERS):
        return Reason("no_reader", f"the GPU targets have no reader for weights in {kernel.weight.format}")
    return None


class Functions:
    """The functions of a program by name; :meth:`launch` adds what a kernel needs."""

    def __init__(self, dialect: Dialect):
        self.dialect = dialect
        self.text: dict[str, str] = {}
        self._emitted: dict[Hashable, Emission] = {}
        self._names: dict[str, str] = {}

    def launch(self, kernel: Kernel) -> Launch:
        """How to run ``kernel``; ``groups`` 0: there is nothing to do."""
        key = _key(kernel)
        if key not in self._emitted:
            special = self.dialect.special_for(kernel)
            emitter = special.emit if special is not None else EMITTERS[kernel.kind]
            self._emitted[key] = emitter(kernel, self.dialect)
        e = self._emitted[key]
        arguments = tuple(_place(kernel, n) for n in e.operands)
        maps = tuple((*_place(kernel, n), tiles) for n, tiles in e.maps)
        name = self._name(kernel, e) if e.groups else ""
        return Launch(name, e.groups, e.threads, e.shared, arguments, e.checks, maps)

    def launches(self, schedule: Schedule) -> list[Launch]:
        return [self.launch(k) for k in schedule.kernels]

    def _name(self, kernel: Kernel, e: Emission) -> str:
        if e.text not in self._names:
            kind = re.sub(r"\W", "_", kernel.name.split("_", 1)[1])
            name = self._names[e.text] = f"{kind}_{len(self._names)}"
            self.text[name] = e.text.replace("@NAME@", name)
        return self._names[e.text]


def _place(kernel: Kernel, number: int) -> tuple[int, int]:
    """(buffer id, byte offset) of input ``number`` or output ``~number``."""
    op = kernel.inputs[number] if number >= 0 else kernel.outputs[~number]
    byte = op.offset * dtypes.DTYPES[op.dtype].size
    return (ARENA, op.buffer.offset + byte) if op.buffer.kind == "arena" else (op.buffer.id, byte)


def _key(kernel: Kernel) -> Hashable:
    """All that a kernel's text depends on: what it computes, its operands' layouts, and which of them are the same."""
    operands = [*kernel.inputs, *kernel.outputs]
    ids: list[int] = []
    layouts = []
    for o in operands:
        if o.buffer.id not in ids:
            ids.append(o.buffer.id)
        constant = o.buffer.kind in ("weight", "const")
        alignment = o.offset * dtypes.DTYPES[o.dtype].size % 16
        layouts.append(
            (o.dtype, o.format, o.shape, o.strides, alignment, constant, o.buffer.given, ids.index(o.buffer.id))
        )
    attrs = tuple(sorted((k, v) for k, v in kernel.attrs.items()))
    inner = tuple(_key(k) for k in (kernel.prologue, *kernel.parts) if k is not None)
    computed = kernel.body, kernel.epilogue, kernel.more, kernel.row_scale
    return kernel.kind, attrs, tuple(layouts), len(kernel.inputs), computed, inner


def sources(functions: Functions, suffix: str) -> dict[str, str]:
    """Readable text: the words in one file, the headers that kernels include in theirs, every kernel in another."""
    headers = functions.dialect.included(functions.text.values())
    kernels = "\n".join(functions.text.values())
    return {f"prelude.{suffix}": functions.dialect.head, **headers, f"kernels.{suffix}": kernels}
