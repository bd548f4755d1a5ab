"""Products of some rows on Hopper with weights in a format, which warps decode on the way into shared memory: the
supported kernels, and the arguments of ``kernels/tma_decoder.h``.

Every tile decodes its weights. For more than ``MAX_ROWS`` (``MAX_BLOCK_ROWS`` in block formats), a kernel that decodes
them once to memory was faster on an H200 (``simt/kernels/unpack.py``).
"""

from __future__ import annotations

from dataclasses import replace

from ...schedule.anchors import Gemm
from ...schedule.buffers import contiguous_strides
from ...schedule.kernel import Buffer, Kernel, Operand
from ...weights.block_rows import PIECE, ROWS, BlockRows
from ...weights.format import find_layout
from ...weights.formats.bf16c12.rows4 import FourRows, Rows4
from ..simt.kernels.gemm import product_of
from ..simt.kernels.gemv_blocks import format_text, reads_blocks
from ..simt.kernels.operand_types import TYPES
from ..simt.lang.dialect import SUBGROUP, Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import blocks
from ..simt.lang.program import TileMap
from .tile_selection import DECODED_STEP, Codes, Plan, choose_decoded, decoders, device_of
from .tma_gemm import Operands, TmaGemm, supports_tma

MAX_ROWS, MAX_BLOCK_ROWS = 256, 128
CHUNK = 3  # pieces that a lane decodes together
COPIERS = 2  # warps that copy codes of a block format


def with_elements(kernel: Gemm) -> Gemm | None:
    """Return ``kernel`` with the elements of its weights, which are in no memory, as right operand; None if the weights
    are not in a format that warps decode."""
    left, layout = kernel.inputs[0].dtype, find_layout(kernel.weight.format)[1]
    if not any((t.left, t.right) == (left, left) for t in TYPES):
        return None
    if not isinstance(layout, BlockRows) and not (isinstance(layout, Rows4) and left == "bfloat16"):
        return None
    shape = 1, product_of(kernel).n, kernel.k
    elements = Operand(Buffer(-1, "weight", left, shape, "elements"), shape, contiguous_strides(shape))
    return replace(kernel, inputs=(*kernel.inputs[: kernel.rhs], elements, *kernel.inputs[kernel.rhs + 1 :]))


def supports_decoded(kernel: Gemm, dialect: Dialect) -> bool:
    """Whether :func:`emit_decoded_gemm` supports ``kernel``, and it is not slower than decoding the weights before."""
    if kernel.prologue is not None or not kernel.weight.format or kernel.k <= DECODED_STEP:
        return False
    if kernel.m > (MAX_BLOCK_ROWS if reads_blocks(kernel.weight.format) else MAX_ROWS):
        return False
    elements = with_elements(kernel)
    return elements is not None and supports_tma(elements) and decoded_plan(kernel, dialect) is not None


def emit_decoded_gemm(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_decoded`."""
    return DecodedGemm(kernel, dialect, _plan(kernel, dialect)).emit()


def decoded_column_tiles(kernel: Gemm, dialect: Dialect) -> int:
    """Return the number of tiles along the columns of a product for which :func:`supports_decoded`, if it stores two
    results."""
    both = replace(kernel, outputs=(*kernel.outputs[:1], *kernel.outputs[:1]))
    return blocks(product_of(kernel).n, _plan(both, dialect).n)


def _words(layout: BlockRows) -> int:
    """Return the 32-bit words of a piece and its scales."""
    coded = layout.format
    return coded.bits + sum(coded.scale_fields) + sum(coded.head_fields)


def _codes(kernel: Gemm, dialect: Dialect) -> Codes:
    layout, costs = find_layout(kernel.weight.format)[1], device_of(dialect).tma
    assert costs is not None
    nbytes = kernel.weight.buffer.nbytes
    if isinstance(layout, BlockRows):
        return Codes(nbytes, DECODED_STEP // PIECE * _words(layout) * 4 // ROWS, COPIERS, 1, costs.decode)
    return Codes(nbytes, DECODED_STEP * 3 // 2, 1, 2, costs.decode_rows4)


def decoded_plan(kernel: Gemm, dialect: Dialect, head: int = 0) -> Plan | None:
    """Return the fastest plan of a product for which :func:`supports_decoded`, or None. ``head``: the columns of a head
    if threads store pairs of its columns together."""
    elements = with_elements(kernel)
    assert elements is not None
    return choose_decoded(elements, _codes(kernel, dialect), dialect, head)


def _plan(kernel: Gemm, dialect: Dialect) -> Plan:
    plan = decoded_plan(kernel, dialect)
    assert plan is not None
    return plan


class DecodedGemm(TmaGemm):
    """The function of ``kernel``, whose weights are in a format, with the tile sizes of ``plan``. ``source``: the
    kernel whose operands the function takes, if they are not those of ``kernel``."""

    def __init__(self, kernel: Gemm, dialect: Dialect, plan: Plan, source: Kernel | None = None):
        elements = with_elements(kernel)
        assert elements is not None
        super().__init__(elements, dialect, plan, source or kernel)
        self.weights = kernel.weight
        self.operands = self.operands._replace(right=self.operands.left)
        codes = _codes(kernel, dialect)
        self.slots = codes.slots(self.plan.stages)
        self.codes = self.slots * codes.column * self.plan.n
        self.team, self.decoders = codes.team, decoders(self.plan, codes)
        self.threads += (self.decoders + codes.copiers) * SUBGROUP

    def _decoder(self, codes: str) -> str:
        f, format, layout = self.f, *find_layout(self.weights.format)
        fours, weights = self.weights.shape[0], f.pointer(self.kernel.rhs)
        if isinstance(layout, BlockRows):
            f.before.append(format_text(format, layout))
            f.include("block_codes.h")
            kind = f"BlockCodes<{format.name}, {fours}, {self.p.k // PIECE}, {_words(layout)}, {CHUNK}>"
            values = weights
        else:
            four = FourRows(self.p.k)
            f.include("rows4_codes.h")
            plane = self.p.k * 2  # bytes: of codes, and of the low bytes of two rows
            box = DECODED_STEP, four.planes // plane, self._loaded_columns // ROWS
            planes = f.tile_map(self.kernel.rhs, TileMap((self.p.k, box[1], fours), (plane, four.planes), box, 0))
            kind = f"Rows4Codes<{fours}, {four.extras}, {four.max_outliers}, {CHUNK}>"
            values = f"{planes}, {weights} + {fours * four.planes}ll"
        barriers = (f.array("int64_t", name, self.slots) for name in ("copied", "decoded"))
        # not from a function that returns the struct: NVRTC 13 then takes the weights for shared memory
        return f"Decoder<{kind}, {self.slots}>{{{kind}{{{values}}}, {codes}, {', '.join(barriers)}}}"

    def _maps(self, s: Operands) -> tuple[TileMap, TileMap]:
        left, _ = super()._maps(s)
        return left, left  # the weights have a map of their own, if any

    def _primed(self) -> int:
        return 0
