"""What the scheduler hands to a target: kernels over strided operands, with every size a literal.

A ``loops`` kernel is generated from its :class:`LoopBody`; the others (``gemm``, ``conv2d``, ``depthwise``,
``attention``,
``scan``, ``sort``) name a hand-written micro-kernel of the target and may carry an ``epilogue`` expression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..graph import expr
from ..graph.expr import Expr
from ..support import dtypes

PAIR = "conv2d_pair"  # the kind of a kernel of two convolutions


@dataclass(frozen=True)
class Buffer:
    """A block of memory. ``kind``: 'input', 'output', 'weight', 'const', 'state' (pointers the runtime supplies, by
    ``id``), 'arena' (at byte ``offset`` of the one arena) or 'scratch' (a prologue's result, each thread its own).
    ``name`` is the I/O name, state key or a label. ``lasting``: its place in the arena is its own from run to run, and
    zero before the first. ``format``: of a weight in a weight format, the name of its layout
    (:mod:`npu_compiler.weights.format`); its bytes are then no elements, and a kernel reads them with the format's
    reader."""

    id: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    offset: int = 0
    lasting: bool = False
    format: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.DTYPES[self.dtype].size

    @property
    def given(self) -> bool:
        """Whether it is filled before the first kernel runs, and written by none."""
        return self.kind in ("input", "weight", "const")


@dataclass(frozen=True)
class Operand:
    """A strided window of a buffer; ``strides`` and ``offset`` count elements. Distinct operands of one kernel may
    share a buffer only if neither is written, or if they are read and written at the same index of the domain."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.buffer.dtype

    @property
    def format(self) -> str:
        """The layout of a weight in a weight format, or ''."""
        return self.buffer.format

    @property
    def contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major element strides; dims of size 1 get stride 0, so that equal layouts compare equal."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(0 if n == 1 else step)
        step *= n
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Stage:
    """One step of a loop nest, executed in order for each row (one point of the non-reduced dims).

    'reduce': fold ``expr`` over the reduced dims with ``reduce`` (sum prod max min argmax argmin; fixed order)
    'temp':   the value of ``expr`` at every point, kept for later stages (or recomputed, as the target likes)
    'store':  write ``expr`` to output ``output`` at ``index`` (one Expr per output dim); once per row if ``per_row``

    Later stages read stage ``n`` through ``expr.stage(n, dtype)``; argmax/argmin give the flat position (int64) over
    the reduced dims in order.
    """

    kind: str
    expr: Expr
    reduce: str = ""
    output: int = -1
    index: tuple[Expr, ...] = ()
    per_row: bool = False


@dataclass(frozen=True)
class LoopBody:
    """A loop nest over ``domain``; ``axes`` are the reduced dims. ``serial``: rows must run in order on one thread."""

    domain: tuple[int, ...]
    axes: tuple[int, ...]
    stages: tuple[Stage, ...]
    serial: bool = False


@dataclass
class Kernel:
    """One launch. ``inputs`` are numbered as the loads of ``body``/``epilogue`` number them; the fixed operands of a
    micro-kernel come first. ``epilogue`` maps ``acc`` (float32) to the stored value; its loads and indices range over
    the dims of ``outputs[0]``. ``sources`` are IR node names. Kernels of one ``step`` touch different data: they may
    run in any order, and threads meet only between steps.

    A gemm may have a ``prologue``: a loops kernel that computes its left operand where it is needed, into scratch
    memory (its one output). The prologue's inputs then stand in ``inputs`` in place of the left operand. A kernel of
    kind ``bundle`` runs ``parts`` that touch different data; its operands are theirs, part after part. A kernel of kind
    ``conv2d_pair`` is a conv2d with one part, another conv2d whose results, as that would store them, are ``acc1`` of
    the epilogue and nowhere in memory; the part's inputs are the last of ``inputs``.

    A row norm between two products may be divided among them. The first has ``more`` than its epilogue: a 'reduce'
    stage, whose sums over each tile of columns go to its last output, float32 [tiles, M], and a 'store' stage. The
    second has these sums as its last input; ``row_scale``, of their total ``stage 0``, multiplies its ``acc``."""

    name: str
    kind: str
    inputs: list[Operand]
    outputs: list[Operand]
    attrs: dict[str, Any] = field(default_factory=dict)
    body: LoopBody | None = None
    epilogue: Expr | None = None
    sources: tuple[str, ...] = ()
    flops: int = 0
    step: int = 0
    prologue: Kernel | None = None
    parts: tuple[Kernel, ...] = ()
    more: tuple[Stage, ...] = ()
    row_scale: Expr | None = None

    @property
    def operands(self) -> list[Operand]:
        """As the kernel's function takes them: inputs, then outputs; those of a bundle's parts one part after
        another."""
        return [o for p in self.parts for o in p.operands] or [*self.inputs, *self.outputs]

    @property
    def weight(self) -> Operand:
        """The operand after the left one: the right operand of a product, the filters of a convolution."""
        return self.inputs[self.fixed]

    @property
    def fixed(self) -> int:
        """Where the operand after the left one stands in ``inputs``."""
        return len(self.prologue.inputs) if self.prologue is not None else 1

    def on_buffers(self, new: Callable[[Buffer], Buffer]) -> Kernel:
        """The same kernel on other buffers; scratch memory stays."""

        def moved(ops: list[Operand]) -> list[Operand]:
            return [o if o.buffer.kind == "scratch" else replace(o, buffer=new(o.buffer)) for o in ops]

        prologue = self.prologue.on_buffers(new) if self.prologue is not None else None
        parts = tuple(p.on_buffers(new) for p in self.parts)
        return replace(self, inputs=moved(self.inputs), outputs=moved(self.outputs), prologue=prologue, parts=parts)

    @property
    def bytes_read(self) -> int:
        """Of distinct elements; of tables, the rows looked up."""
        if self.kind == "bundle":
            return sum(p.bytes_read for p in self.parts)
        if self.prologue is not None:
            return self.prologue.bytes_read + sum(_touched(o) for o in self.inputs[len(self.prologue.inputs) :])
        return sum(self._read(n) for n in range(len(self.inputs)))

    def _read(self, number: int) -> int:
        """Bytes that a loop nest reads of an input: at places that are data, no more than there are points."""
        operand = self.inputs[number]
        loads = [x for s in (self.body.stages if self.body else ()) for x in expr.walk(s.expr)]
        loads = [x for x in loads if x.op == "load" and x.value == number]
        if not loads or not all(any(y.op == "load" for i in x.args for y in expr.walk(i)) for x in loads):
            return _touched(operand)
        assert self.body is not None
        points = len(loads) * math.prod(self.body.domain)
        return min(_touched(operand), points * dtypes.DTYPES[operand.dtype].size)

    @property
    def bytes_written(self) -> int:
        return sum(_touched(o) for o in self.outputs)

    def text(self) -> str:
        """What the kernel computes, readable: its stages or its epilogue."""
        if self.kind == PAIR:
            return f"acc1: {self.parts[0].text()}; {expr.render(self.epilogue)}" if self.epilogue is not None else ""
        if self.parts:
            return " | ".join(p.text() for p in self.parts)
        if self.body is None:
            before = [f"left: {self.prologue.text()}"] if self.prologue is not None else []
            if self.row_scale is not None:
                before.append(f"acc of a row times {expr.render(self.row_scale)}, r0 = sum in{len(self.inputs) - 1}")
            after = [expr.render(self.epilogue)] if self.epilogue is not None else []
            return "; ".join([*before, *after, *(_stage_text(n, s) for n, s in enumerate(self.more))])
        return "; ".join(_stage_text(n, s) for n, s in enumerate(self.body.stages))


def _stage_text(number: int, s: Stage) -> str:
    if s.kind == "store":
        return f"out{s.output} = {expr.render(s.expr)}"
    return f"r{number} = {s.reduce + ' ' if s.reduce else ''}{expr.render(s.expr)}"


def _touched(o: Operand) -> int:
    """Bytes of the distinct elements a window covers."""
    elements = math.prod(n for n, s in zip(o.shape, o.strides, strict=True) if s != 0)
    return min(elements * dtypes.DTYPES[o.dtype].size, o.buffer.nbytes)


@dataclass
class Schedule:
    """An entry point ready for a target: kernels in launch order and every buffer they touch."""

    name: str
    kernels: list[Kernel]
    buffers: list[Buffer]
    inputs: list[tuple[str, Buffer]]
    outputs: list[tuple[str, Buffer]]
    arena_bytes: int = 0

    def memory(self, dtype: str, shape: tuple[int, ...], name: str, lasting: bool = False) -> Operand:
        """A new block of the arena, which is not planned yet, as an operand."""
        buffer = Buffer(max((b.id for b in self.buffers), default=-1) + 1, "arena", dtype, shape, name, lasting=lasting)
        self.buffers.append(buffer)
        return Operand(buffer, shape, contiguous_strides(shape))
