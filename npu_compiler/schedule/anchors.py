"""Kernels with a hand-written main loop and an ``epilogue`` expression: contractions, convolutions and attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..graph import expr
from ..graph.expr import Expr
from ..support import dtypes
from .buffers import Operand, bytes_touched
from .kernel import Kernel, Loops, Stage


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
    ``rounded``: the elements of the right operand, a weight, are so already.

    A row norm between two products can be computed in both. The first product then has ``extra_stages`` besides its
    epilogue: a 'reduce' stage, whose sums over each tile of columns are its last output, float32 [tiles, M], and a
    'store' stage. The second product has these sums as its last input; its ``acc`` is multiplied by ``row_scale``, a
    function of their total ``stage 0``."""

    splits: int = 1
    tf32: bool = False
    rounded: bool = False
    extra_stages: tuple[Stage, ...] = ()
    row_scale: Expr | None = None

    @property
    def rhs(self) -> int:
        """The position of the right operand, the weight, in ``inputs``."""
        return 1

    @property
    def left(self) -> Operand:
        """The left operand of a product, the image of a convolution."""
        return self.inputs[0]

    @property
    def weight(self) -> Operand:
        """The right operand of a product, the filters of a convolution."""
        return self.inputs[self.rhs]

    @property
    def n_major(self) -> bool:
        """Whether neighbours in memory are columns of the right operand, not terms of a sum: in a product of two
        activations [M, K] and [K, N]."""
        return False

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
    only output); its inputs replace the left operand in ``inputs``. ``packs``: the right operand is [batch, k, n] as it
    is in memory, and the kernel packs it.
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
    packs: bool = False

    @property
    def rhs(self) -> int:
        return len(self.prologue.inputs) if self.prologue is not None else 1

    @property
    def left(self) -> Operand:
        return self.prologue.outputs[0] if self.prologue is not None else self.inputs[0]

    @property
    def n_major(self) -> bool:
        return not self.weight.format and self.weight.strides[1] == 1 < self.weight.strides[2]

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
    """A convolution as an implicit GEMM. ``limbs``: how many bfloat16 numbers each element of the filters is stored
    as, whose products with those of the inputs are summed; 1 if the filters are stored as they are."""

    kind = "conv2d"
    limbs: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class WinogradConv2d(Convolution):
    """3x3 filters with equal strides by Winograd's algorithm. ``transform``: the filter transform G [points, 3]; a
    tile has as many inputs along each side."""

    kind = "winograd"
    transform: tuple[tuple[float, ...], ...]

    @property
    def tile(self) -> int:
        """Number of results along each side of a tile."""
        return (len(self.transform) - 3) // self.stride[0] + 1


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
class B2bConv2d(Kernel):
    """Two convolutions back to back: the results of ``first`` are stored, and are the left operand of ``second``. The
    inputs are those of ``first``, then the other inputs of ``second``; the outputs are those of both."""

    kind = "b2b_conv2d"
    first: Conv2d | DualConv2d
    second: Conv2d

    def text(self) -> str:
        return f"out0: {self.first.text()}; out1: {self.second.text()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledConv2d(Kernel):
    """A convolution whose results only ``pool`` reads: a loop nest over windows of pixels. The results of ``conv`` are
    not stored in memory."""

    kind = "pooled_conv2d"
    conv: Conv2d
    pool: Loops

    def text(self) -> str:
        return f"in0: {self.conv.text()}; {self.pool.text()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmWithLoops(Kernel):
    """A product whose results only the loop nests ``consumers`` read, such as rotary embeddings of queries and keys.
    The results of ``product`` are not stored in memory. The inputs are those of ``product``, then the other operands
    that the consumers read, each once; the outputs are those of the consumers. ``halves``: the inputs whose rows
    consist of two equal halves, such as the tables of rotary embeddings."""

    kind = "gemm_with_loops"
    product: Gemm
    consumers: tuple[Loops, ...]
    halves: tuple[int, ...] = ()

    def text(self) -> str:
        return f"in0: {self.product.text()}; {' | '.join(c.text() for c in self.consumers)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Anchor):
    """Attention over q [B, H, SQ, D], k and v [B, HK, SK, ..], and optionally a mask that broadcasts to [B, H, SQ, SK].

    ``causal``: a query sees keys up to its own position. ``limited``: input 4 holds the position int64 [SQ] of each
    query in the cache; later keys are not valid. ``by_position``: input 3 holds these positions instead of a mask.
    ``scaled``: k and v are int8 or float8, and the last two inputs are the scales float32 [B, HK, SK, 1] of their rows.
    ``splits`` > 1 (split-K over the keys): the output holds partial results for :class:`CombineAttention`.
    """

    kind = "attention"
    scale: float
    causal: bool
    limited: bool
    by_position: bool = False
    scaled: bool = False
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
