"""Kernels over strided operands, with literal sizes: the scheduler's result and a target's input.

A kernel is one launch, and its class says what it computes. Targets generate :class:`Loops` from a :class:`LoopBody`
and have a hand-written kernel for each other class. :class:`Gemm`, :class:`Conv2d` and :class:`Attention` with their
variants apply an ``epilogue`` expression to their results; :class:`Scan`, :class:`Sort` and :class:`Pack` do not.
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
from .buffers import Buffer, Operand, bytes_touched


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
        phase: kernels of one phase access different data and may run in any order; threads synchronise only between
            phases.
    """

    kind: ClassVar[str]

    label: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sources: tuple[str, ...] = ()
    flops: int = 0
    number: int = 0
    phase: int = 0

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

    @property
    def bytes_read(self) -> int:
        return sum(map(self._read, range(len(self.inputs))))

    def _read(self, number: int) -> int:
        """Return the bytes read of an input. If its indices are data, these are at most one element per point."""
        operand = self.inputs[number]
        loads = [x for s in self.body.stages for x in expr.walk(s.expr) if x.op == "load" and x.value == number]
        if not loads or not all(any(y.op == "load" for i in x.args for y in expr.walk(i)) for x in loads):
            return bytes_touched(operand)
        points = len(loads) * math.prod(self.body.domain)
        return min(bytes_touched(operand), points * dtypes.DTYPES[operand.dtype].size)

    def text(self) -> str:
        return "; ".join(s.text(n) for n, s in enumerate(self.body.stages))


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
class Anchor(Kernel):
    """A hand-written kernel whose ``epilogue`` maps each result, ``acc`` (float32), to the value that it stores; the
    epilogue's loads and indices range over the dims of ``outputs[0]``."""

    epilogue: Expr

    def text(self) -> str:
        return expr.render(self.epilogue)


@dataclass(frozen=True, eq=False, kw_only=True)
class Contraction(Anchor):
    """A :class:`Gemm` or convolution. With ``splits`` > 1 (split-K) the output is float32 [splits, M, N] and holds
    partial sums, which another kernel adds. ``tf32``: float32 operands are rounded to 10 bits of fraction.

    A row norm between two products can be computed in both. The first product then has ``extra_stages`` besides its
    epilogue: a 'reduce' stage, whose sums over each tile of columns are its last output, float32 [tiles, M], and a
    'store' stage. The second product has these sums as its last input; its ``acc`` is multiplied by ``row_scale``, a
    function of their total ``stage 0``."""

    splits: int = 1
    tf32: bool = False
    extra_stages: tuple[Stage, ...] = ()
    row_scale: Expr | None = None

    @property
    def rhs(self) -> int:
        """The position of the right operand, the weight, in ``inputs``."""
        return 1

    @property
    def weight(self) -> Operand:
        """The right operand of a product, the filters of a convolution."""
        return self.inputs[self.rhs]

    def text(self) -> str:
        before = []
        if self.row_scale is not None:
            before.append(f"acc of a row times {expr.render(self.row_scale)}, r0 = sum in{len(self.inputs) - 1}")
        after = [s.text(n) for n, s in enumerate(self.extra_stages)]
        return "; ".join([*before, expr.render(self.epilogue), *after])


@dataclass(frozen=True, eq=False, kw_only=True)
class Gemm(Contraction):
    """``batch`` products [m, k] @ [k, n].

    Rows of the left operand are ``lda`` elements apart, its matrices ``batch_stride``. ``shared``: all of them multiply
    one right operand. ``dual``: two products of the same rows, ``acc`` and ``acc1`` of the epilogue, whose columns
    alternate in the right operand. ``prologue`` computes the left operand inside the kernel, into scratch memory (its
    only output); its inputs replace the left operand in ``inputs``.
    """

    kind = "gemm"
    batch: int
    m: int
    n: int
    k: int
    lda: int
    batch_stride: int
    shared: bool
    dual: bool = False
    prologue: Loops | None = None

    @property
    def rhs(self) -> int:
        return len(self.prologue.inputs) if self.prologue is not None else 1

    @property
    def bytes_read(self) -> int:
        left = self.prologue.bytes_read if self.prologue is not None else bytes_touched(self.inputs[0])
        return left + sum(map(bytes_touched, self.inputs[self.rhs :]))

    def text(self) -> str:
        before = f"left: {self.prologue.text()}; " if self.prologue is not None else ""
        return before + Contraction.text(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Convolution(Contraction):
    """A channels-last convolution [N, H, W, C] -> [N, OH, OW, K] with filters of ``kernel_size`` (R, S) and
    ``channels`` (C, K); ``padding`` is (top, left, bottom, right). ``image``: the result's shape if the outputs hold
    partial sums."""

    kernel_size: tuple[int, int]
    channels: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    image: tuple[int, ...] = ()

    @property
    def result_shape(self) -> tuple[int, ...]:
        """[N, OH, OW, K]."""
        return self.image or self.outputs[0].shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv2d(Convolution):
    """A convolution as an implicit GEMM."""

    kind = "conv2d"


@dataclass(frozen=True, eq=False, kw_only=True)
class WinogradConv2d(Convolution):
    """3x3 filters with stride 1 by Winograd's algorithm. ``transform``: the filter transform G [tile + 2, 3]."""

    kind = "winograd"
    transform: tuple[tuple[float, ...], ...]

    @property
    def tile(self) -> int:
        """Number of results along each side of a tile."""
        return len(self.transform) - 2


@dataclass(frozen=True, eq=False, kw_only=True)
class DepthwiseConv2d(Convolution):
    """A convolution with one filter per channel."""

    kind = "depthwise"


@dataclass(frozen=True, eq=False, kw_only=True)
class DualConv2d(Convolution):
    """Two convolutions whose results have one shape. The results of ``residual``, after its own epilogue, are ``acc1``
    of the epilogue and are not stored in memory. The inputs of ``residual`` are the last of ``inputs``."""

    kind = "dual_conv2d"
    residual: Conv2d

    def text(self) -> str:
        return f"acc1: {self.residual.text()}; {expr.render(self.epilogue)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Anchor):
    """Attention over q [B, H, SQ, D], k and v [B, HK, SK, ..], and optionally a mask that broadcasts to [B, H, SQ, SK].

    ``causal``: a query sees keys up to its own position. ``limited``: input 4 holds the position int64 [SQ] of each
    query in the cache; later keys are not valid. ``by_position``: input 3 holds these positions instead of a mask.
    ``splits`` > 1 (split-K over the keys): the output holds partial results for :class:`CombineAttention`.
    """

    kind = "attention"
    scale: float
    causal: bool
    limited: bool
    by_position: bool = False
    splits: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class CombineAttention(Anchor):
    """Softmax-weighted sum of the partial results [splits, B, H, SQ, D + 2] of an :class:`Attention`."""

    kind = "combine_attention"


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeAttention(Anchor):
    """Attention of a single query position over a cache, with its producers: the kernel computes ``queries``, stores
    ``new_rows`` (key and value) in the cache, and combines the partial results of workgroups. Inputs: keys, values,
    position, then those of ``queries`` and ``new_rows``. Outputs: result, keys, values, partial results, and the
    counters of the workgroups that have arrived."""

    kind = "decode_attention"
    scale: float
    queries: Loops
    new_rows: tuple[Loops, Loops]

    @property
    def producers(self) -> tuple[Loops, ...]:
        """The loop nests that compute the queries and the new rows of the cache."""
        return (self.queries, *self.new_rows)

    @property
    def bytes_read(self) -> int:
        return super().bytes_read + self._parts_bytes

    @property
    def bytes_written(self) -> int:
        rows = sum(math.prod(r.body.domain) * dtypes.DTYPES[r.outputs[0].dtype].size for r in self.new_rows)
        return bytes_touched(self.outputs[0]) + rows + self._parts_bytes

    @property
    def _parts_bytes(self) -> int:
        """Bytes of the partial results; a single workgroup of a head has none."""
        parts = self.outputs[3]
        return bytes_touched(parts) if parts.shape[0] > 1 else 0

    def text(self) -> str:
        return " | ".join(p.text() for p in self.producers)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScatterSum(Kernel):
    """A loop nest whose points are updates, added to places that are data; the sums do not depend on their order.

    ``body`` has one store: the update's value, and its place in the output, which is also the last input. ``stage``:
    'integers': adds the updates to the output. 'magnitudes': the output becomes the largest magnitude of a place's
    updates, as the bits of a float32. 'fixed_point': adds them to int64 sums, whose unit follows from the magnitudes,
    the last input but one, and leaves ``carry_bits`` for carries.
    """

    kind = "scatter_sum"
    body: LoopBody
    stage: str
    carry_bits: int = 0

    def text(self) -> str:
        return f"{self.stage}: {self.body.stages[0].text(0)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ScatterResult(Kernel):
    """Adds sums in fixed point to the last input, which may be the output itself. The other inputs are the magnitudes
    and the sums of :class:`ScatterSum`."""

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
class Scan(Kernel):
    """Running reductions by ``op`` (sum prod max min) along ``axis``. With ``section``, rows are scanned in sections of
    that many elements, and the last input has the reductions of all sections (:class:`ScanTotals`)."""

    kind = "scan"
    op: str
    axis: int
    section: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanTotals(Kernel):
    """Reductions by ``op`` of sections of ``section`` elements along ``axis``, as [rows, sections]."""

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
