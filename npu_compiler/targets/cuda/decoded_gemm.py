"""Products of some rows on Hopper with weights in a block format, which warps decode on the way into shared memory:
the supported kernels, and the arguments of ``kernels/tma_decoder.h``.

Every tile decodes its weights. For more than ``MAX_ROWS``, a kernel that decodes them once to memory was faster on an
H200 (``simt/kernels/unpack.py``).
"""

from __future__ import annotations

from dataclasses import replace

from ...schedule.anchors import Gemm
from ...schedule.buffers import contiguous_strides
from ...schedule.kernel import Buffer, Operand
from ...weights.block_rows import PIECE, ROWS, BlockRows
from ...weights.format import find_layout
from ..simt.kernels.gemm import product_of
from ..simt.kernels.gemv_blocks import format_text, reads_blocks
from ..simt.kernels.operand_types import TYPES
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import blocks
from ..simt.lang.program import TileMap
from .tile_selection import COPIERS, DECODED_STEP, DECODERS, Plan, choose_decoded
from .tma_gemm import Operands, TmaGemm, supports_tma

MAX_ROWS = 128
CHUNK = 3  # pieces that a lane decodes together


def with_elements(kernel: Gemm) -> Gemm | None:
    """Return ``kernel`` with the elements of its weights, which are in no memory, as right operand; None if the weights
    are not in a block format."""
    left = kernel.inputs[0].dtype
    if not reads_blocks(kernel.weight.format) or not any((t.left, t.right) == (left, left) for t in TYPES):
        return None
    shape = 1, product_of(kernel).n, kernel.k
    elements = Operand(Buffer(-1, "weight", left, shape, "elements"), shape, contiguous_strides(shape))
    return replace(kernel, inputs=(*kernel.inputs[: kernel.rhs], elements, *kernel.inputs[kernel.rhs + 1 :]))


def supports_decoded(kernel: Gemm, dialect: Dialect) -> bool:
    """Whether :func:`emit_decoded_gemm` supports ``kernel``, and it is not slower than decoding the weights before."""
    if kernel.prologue is not None or not kernel.weight.format or kernel.m > MAX_ROWS or kernel.k <= DECODED_STEP:
        return False
    elements = with_elements(kernel)
    return elements is not None and supports_tma(elements) and _choose(kernel, elements, dialect) is not None


def emit_decoded_gemm(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_decoded`."""
    return DecodedGemm(kernel, dialect).emit()


def decoded_column_tiles(kernel: Gemm, dialect: Dialect) -> int:
    """Return the number of tiles along the columns of a product for which :func:`supports_decoded`, if it stores two
    results."""
    both = replace(kernel, outputs=(*kernel.outputs[:1], *kernel.outputs[:1]))
    return blocks(product_of(kernel).n, _plan(both, dialect).n)


def _words(layout: BlockRows) -> int:
    """Return the 32-bit words of a piece and its scales."""
    coded = layout.format
    return coded.bits + sum(coded.scale_fields) + sum(coded.head_fields)


def _choose(kernel: Gemm, elements: Gemm, dialect: Dialect) -> Plan | None:
    layout = find_layout(kernel.weight.format)[1]
    assert isinstance(layout, BlockRows)
    codes = DECODED_STEP // PIECE * _words(layout) * 4 // ROWS
    return choose_decoded(elements, kernel.weight.buffer.nbytes, codes, dialect)


def _plan(kernel: Gemm, dialect: Dialect) -> Plan:
    elements = with_elements(kernel)
    plan = _choose(kernel, elements, dialect) if elements is not None else None
    assert plan is not None
    return plan


class DecodedGemm(TmaGemm):
    """The function of ``kernel``, whose weights are in a block format."""

    def __init__(self, kernel: Gemm, dialect: Dialect):
        elements = with_elements(kernel)
        assert elements is not None
        super().__init__(elements, dialect, _plan(kernel, dialect), kernel)
        self.weights = kernel.weight
        self.operands = self.operands._replace(right=self.operands.left)
        self.decoders = min(DECODERS, self.plan.stages)
        self.threads += (self.decoders + COPIERS) * SUBGROUP

    def _decoder(self) -> str:
        format, layout = find_layout(self.weights.format)
        assert isinstance(layout, BlockRows)
        f, words = self.f, _words(layout)
        f.before.append(format_text(format, layout))
        f.include("tma_decoder.h")
        slots = self.plan.stages + self.plan.stages % 2
        codes = f.array("char", "codes", slots * (self.plan.n // ROWS) * (self.step // PIECE) * words * 4, size=1)
        barriers = [f.array("int64_t", name, slots) for name in ("copied", "decoded")]
        sizes = f"{format.name}, {self.weights.shape[0]}, {self.p.k // PIECE}, {words}, {slots}, {CHUNK}"
        return f"BlockDecoder<{sizes}>{{{f.pointer(self.kernel.rhs)}, {codes}, {', '.join(barriers)}}}"

    def _maps(self, s: Operands) -> tuple[TileMap, TileMap]:
        left, _ = super()._maps(s)
        return left, left  # TMA does not load the weights

    def _primed(self) -> int:
        return 0
