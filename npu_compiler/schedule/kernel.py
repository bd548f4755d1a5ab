"""Kernels over strided operands, with literal sizes: the scheduler's result and a target's input.

A kernel is one launch, and its class says what it computes. Targets generate :class:`Loops` from a :class:`LoopBody`
and have a hand-written kernel for each other class. Those that apply an ``epilogue`` expression to their results are
in :mod:`.anchors`.
Kernels are immutable and compared by identity; :meth:`Kernel.structural_key` compares what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from ..graph import expr
from ..graph.expr import Expr
from ..support import dtypes
from .buffers import Buffer, Operand, bytes_touched, overlap


@dataclass(frozen=True)
class Stage:
    """One step of a loop nest, executed in order for each row (one point of the non-reduced dims).

    'reduce': reduce ``expr`` over the reduced dims by ``reduce`` (sum prod max min argmax argmin), in a fixed order
    'temp':   compute ``expr`` at every point, for later stages; a target may recompute it
    'store':  write ``expr`` to output ``output`` at ``index`` (one Expr per output dim); once per row if ``per_row``

    Later stages read stage ``n`` as ``expr.stage(n, dtype)``. argmax and argmin give the flat int64 position over the
    reduced dims in order.
    """

    kind: str
    expr: Expr
    reduce: str = ""
    output: int = -1
    index: tuple[Expr, ...] = ()
    per_row: bool = False

    def text(self, number: int) -> str:
        """Return the stage as a readable assignment; ``number`` is its place in the loop nest."""
        if self.kind == "store":
            return f"out{self.output} = {expr.render(self.expr)}"
        return f"r{number} = {self.reduce + ' ' if self.reduce else ''}{expr.render(self.expr)}"


@dataclass(frozen=True)
class LoopBody:
    """A loop nest over ``domain``; ``axes`` are the reduced dims. ``serial``: rows must run in order on one thread."""

    domain: tuple[int, ...]
    axes: tuple[int, ...]
    stages: tuple[Stage, ...]
    serial: bool = False


# -- kernels --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """One launch.

    Attributes:
        kind: the class in a word, for dumps, profiles and artifacts.
        label: the purpose in a word; with ``number`` it makes the kernel's name.
        inputs: the loads of its expressions refer to them by position. Operands that a hand-written kernel reads
            itself come first.
        sources: names of the IR nodes that it implements.
        flops: floating-point operations.
        barrier_group: kernels of one group access different data and may run in any order; threads synchronise only
            between groups.
    """

    kind: ClassVar[str]

    label: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sources: tuple[str, ...] = ()
    flops: int = 0
    number: int = 0
    barrier_group: int = 0

    @property
    def name(self) -> str:
        """The name in dumps and profiles."""
        return f"k{self.number}_{self.label}"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs and outputs, in the order in which the kernel's function takes them."""
        return (*self.inputs, *self.outputs)

    @property
    def members(self) -> tuple[Kernel, ...]:
        """The independent kernels that share this launch: itself, unless it is :class:`FusedLoops`."""
        return (self,)

    def own_fields(self) -> list[tuple[str, Any]]:
        """Return names and values of the fields that the class adds to :class:`Kernel`: they state what it computes."""
        common = {f.name for f in fields(Kernel)}
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in common]

    def structural_key(self, layout: Callable[[Operand], Hashable]) -> Hashable:
        """Return a key that is equal for kernels that can share one function of the target.

        It consists of what they compute, the layouts of their operands, and which operands are the same or share a
        buffer. ``layout``: the properties of an operand besides dtype, format, shape and strides on which the target's
        function depends.
        """
        operands = (*self.inputs, *self.outputs)
        ids = [o.buffer.id for o in operands]
        windows = [
            (o.dtype, o.format, o.shape, o.strides, layout(o), operands.index(o), ids.index(o.buffer.id))
            for o in operands
        ]

        def key(value: Any) -> Hashable:
            if isinstance(value, Kernel):
                return value.structural_key(layout)
            return tuple(map(key, value)) if isinstance(value, tuple) else value

        own = tuple(key(value) for _, value in self.own_fields())
        return type(self), len(self.inputs), tuple(windows), own

    def on_buffers(self, new: Callable[[Buffer], Buffer]) -> Kernel:
        """Return the same kernel on other buffers; scratch memory stays."""

        def moved(value: Any) -> Any:
            if isinstance(value, Kernel):
                return value.on_buffers(new)
            if isinstance(value, Operand):
                return value if value.buffer.kind == "scratch" else replace(value, buffer=new(value.buffer))
            return tuple(map(moved, value)) if isinstance(value, tuple) else value

        nested = {name: moved(value) for name, value in self.own_fields()}
        return replace(self, inputs=moved(self.inputs), outputs=moved(self.outputs), **nested)

    @property
    def bytes_read(self) -> int:
        """Bytes of the distinct elements that are read; of tables, of the rows that are looked up."""
        return sum(map(bytes_touched, self.inputs))

    @property
    def bytes_written(self) -> int:
        """Bytes of the distinct elements that are written."""
        return sum(map(bytes_touched, self.outputs))

    def text(self) -> str:
        """Return a readable form of what the kernel computes: its stages or its epilogue."""
        return ""

    def parameters(self) -> dict[str, Any]:
        """Return the numbers, flags and names among its fields that differ from their defaults, for dumps."""
        usual = {f.name: f.default for f in fields(self)}
        plain = [(n, v) for n, v in self.own_fields() if not isinstance(v, Kernel | LoopBody | Expr)]
        return {n: v for n, v in plain if v != usual[n] and not (isinstance(v, tuple) and isinstance(v[0], Stage))}


K = TypeVar("K", bound=Kernel)


def recast(kernel: Kernel, to: type[K], **changes: Any) -> K:
    """Return a kernel of class ``to`` with ``changes``, and all other fields that both classes have in common."""
    kept = {f.name: getattr(kernel, f.name) for f in fields(to) if hasattr(kernel, f.name)}
    return to(**{**kept, **changes})


@dataclass(frozen=True, eq=False, kw_only=True)
class Loops(Kernel):
    """A loop nest, for which every target generates code."""

    kind = "loops"
    body: LoopBody

    @classmethod
    def copy(
        cls, source: Operand, out: Operand, sources: tuple[str, ...], label: str = "copy", number: int = 0
    ) -> Loops:
        """Return a kernel that stores ``source`` in ``out``, of the same shape, as elements of its dtype."""
        idx = expr.identity_index(source.shape)
        store = Stage("store", expr.load(0, source.dtype, idx).cast(out.dtype), output=0, index=idx)
        body = LoopBody(source.shape, (), (store,))
        return cls(label=label, number=number, inputs=(source,), outputs=(out,), body=body, sources=sources)

    @property
    def bytes_read(self) -> int:
        return sum(map(self._read, range(len(self.inputs))))

    def _read(self, number: int) -> int:
        """Return the bytes read of an input. If its indices depend on data, these are at most one element per point."""
        operand = self.inputs[number]
        loads = [x for s in self.body.stages for x in expr.walk(s.expr) if x.op == "load" and x.value == number]
        if not loads or not all(any(y.op == "load" for i in x.args for y in expr.walk(i)) for x in loads):
            return bytes_touched(operand)
        points = len(loads) * math.prod(self.body.domain)
        return min(bytes_touched(operand), points * dtypes.DTYPES[operand.dtype].size)

    def text(self) -> str:
        return "; ".join(s.text(n) for n, s in enumerate(self.body.stages))

    @property
    def overwrites_inputs(self) -> bool:
        """Whether a point stores an element that another point reads, although points run in any order. A point may
        overwrite what it alone reads: the same operand at the same index."""
        if self.body.serial:
            return False
        stores = [s for s in self.body.stages if s.kind == "store"]
        loads = [x for s in self.body.stages for e in (s.expr, *s.index) for x in expr.walk(e) if x.op == "load"]
        return any(
            overlap(read, written) and any(x.value == n and (read, x.args) != (written, s.index) for x in loads)
            for s in stores
            if (written := self.outputs[s.output])
            for n, read in enumerate(self.inputs)
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedLoops(Kernel):
    """Horizontal fusion: loop nests that access different data share one launch. The operands are those of the
    ``parts``, part after part."""

    kind = "fused_loops"
    parts: tuple[Loops, ...]

    @staticmethod
    def of(parts: Sequence[Kernel]) -> FusedLoops:
        """Return one kernel of several loop nests that access different data."""
        loops = tuple(p for p in parts if isinstance(p, Loops))
        assert len(loops) == len(parts) > 0
        return FusedLoops(
            label="_".join(dict.fromkeys(p.label for p in loops)),
            inputs=tuple(o for p in loops for o in p.inputs),
            outputs=tuple(o for p in loops for o in p.outputs),
            sources=tuple(dict.fromkeys(s for p in loops for s in p.sources)),
            flops=sum(p.flops for p in loops),
            number=loops[0].number,
            parts=loops,
        )

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(o for p in self.parts for o in p.operands)

    @property
    def members(self) -> tuple[Loops, ...]:
        return self.parts

    @property
    def bytes_read(self) -> int:
        return sum(p.bytes_read for p in self.parts)

    def text(self) -> str:
        return " | ".join(p.text() for p in self.parts)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScatterUpdates(Kernel):
    """A loop nest whose points are updates at data-dependent indices; the result does not depend on their order.

    ``body`` has one store: the update's value, and its place in the output, which is also the last input. ``computes``:
    'integers': adds the updates to the output. 'latest': raises the output, int32, to the largest of a place's
    updates, which are usually in ascending order. 'magnitudes': the output becomes the largest magnitude of a place's
    updates, as the bits of a float32. 'fixed_point': adds them to int64 sums, whose unit follows from the magnitudes,
    the last input but one, and leaves ``carry_bits`` for carries.
    """

    kind = "scatter_updates"
    body: LoopBody
    computes: str
    carry_bits: int = 0

    def text(self) -> str:
        return f"{self.computes}: {self.body.stages[0].text(0)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ScatterResult(Kernel):
    """Adds sums in fixed point to the last input, which may be the output itself. The other inputs are the magnitudes
    and the sums of :class:`ScatterUpdates`."""

    kind = "scatter_result"
    carry_bits: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack(Kernel):
    """Packs right operands [batch, k, n] that are computed at run time into panels."""

    kind = "pack"
    batch: int
    k: int
    n: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Unpack(Kernel):
    """Decodes a weight in a weight format to elements [1, n, k], for products that cannot read its layout. ``early``:
    it may run beside all kernels since the early one before it (see ``lifetimes`` in ``memory_planner.py``)."""

    kind = "unpack"
    n: int
    k: int
    early: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan(Kernel):
    """Running reductions by ``op`` (sum prod max min logaddexp) along ``axis``; argmax and argmin have a second output,
    the positions of the extremes. With ``section``, rows are scanned in sections of that many elements, and the last
    input has the reductions of all sections (:class:`ScanTotals`)."""

    kind = "scan"
    op: str
    axis: int
    section: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanTotals(Kernel):
    """Reductions by ``op`` of sections of ``section`` elements along ``axis``, as [rows, sections]. Those
    by argmax and argmin are positions in the row."""

    kind = "scan_totals"
    op: str
    axis: int
    section: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Sort(Kernel):
    """The first ``k`` elements of each row along ``axis`` in order, and their positions; the sort is stable. With
    ``section``, sections of that many elements are sorted instead, and the first ``run`` of each are kept."""

    kind = "sort"
    axis: int
    descending: bool
    k: int
    section: int = 0
    run: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class MergeRuns(Kernel):
    """Merges pairs of sorted runs of ``run`` elements and keeps the first ``kept`` of each pair. Inputs are values and
    positions [rows, total]; the outputs have the runs along ``axis``."""

    kind = "merge_runs"
    axis: int
    descending: bool
    run: int
    kept: int
