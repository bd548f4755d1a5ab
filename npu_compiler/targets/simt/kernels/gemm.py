"""Matrix products and convolutions: the choice of a template and of its sizes.

Products of few rows stream the weights (``gemv.py``); others compute tiles of the result (``kernels/gemm.h``). A
convolution is an implicit product. The left operand is [batch, M, K], or an image [N, H, W, C] for a convolution; the
right operand is [batch or 1, N, K] with any strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ....schedule.anchors import Conv2d, Gemm
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks, constants
from .epilogue import Epilogue, Functor
from .gemv import emit_gemv, is_gemv
from .gemv_bf16c12 import emit_gemv_bf16c12
from .gemv_blocks import emit_gemv_blocks, reads_blocks
from .grouped import emit_grouped, supports_grouped
from .operand_types import FLOATS, SPLIT_FLOATS, OperandType, as_b16, operand_type


def reads(layout: str) -> bool:
    """Whether there is a reader for weights in the layout of that name; '': elements."""
    return layout in ("", "bf16c12.rows4") or reads_blocks(layout)


@dataclass(frozen=True)
class Product:
    """The sizes of a product in elements: ``batch`` times [M, K] by [K, N], with K split into ``splits`` parts.
    ``products`` 2: columns alternate between two products, which the epilogue combines into one result."""

    batch: int
    m: int
    n: int
    k: int
    splits: int = 1
    products: int = 1


def emit_gemm(kernel: Gemm, dialect: Dialect) -> Emission:
    """Return the function of a :class:`Gemm`."""
    if kernel.weight.format:
        return (emit_gemv_blocks if reads_blocks(kernel.weight.format) else emit_gemv_bf16c12)(kernel, dialect)
    if is_gemv(kernel):
        return emit_gemv(kernel, dialect)
    return _tiles(kernel, dialect)


def emit_conv(kernel: Conv2d, dialect: Dialect) -> Emission:
    """Return the function of a :class:`Conv2d`: an implicit matrix product, whose K runs over taps and channels; of few
    channels per group, the sums of a thread."""
    if supports_grouped(kernel, dialect):
        return emit_grouped(kernel, dialect)
    return _tiles(kernel, dialect)


def product_of(kernel: Gemm | Conv2d) -> Product:
    """Return the sizes of a matrix product or convolution."""
    if isinstance(kernel, Conv2d):
        return conv_product(kernel)
    products = 1 + kernel.dual
    return Product(kernel.batch, kernel.m, kernel.n * products, kernel.k, kernel.splits, products)


def conv_product(kernel: Conv2d) -> Product:
    """Return the sizes of the implicit product: a batch is a group, a row is a pixel of the result."""
    n, oh, ow, _ = kernel.result_shape
    (r, s), (c, k), groups = kernel.kernel_size, kernel.channels, kernel.groups
    return Product(groups, n * oh * ow, k // groups, r * s * c // groups, kernel.splits)


class _Side(NamedTuple):
    """One operand: its number, struct template and constants. See ``kernels/gemm.h``."""

    number: int
    template: str
    constants: dict[str, bool | int]


def _rows(kernel: Gemm, p: Product) -> _Side:
    """Return the left operand of a matmul."""
    op, a = kernel.inputs[0], kernel
    row, batch, size = a.lda, a.batch_stride if p.batch > 1 else 0, dtypes.DTYPES[op.dtype].size
    vectors = not any(n % (16 // size) for n in (p.k, row, a.batch_stride, op.offset))
    sizes = dict(ROWS=p.m, K=p.k, ALONG_K=True, VECTORS=vectors, ROW=row, STEP=1, BATCH=batch)
    return _Side(0, "Matrix", sizes)


def _image(kernel: Conv2d, p: Product) -> _Side:
    """Return the left operand of a convolution: a row is an output pixel, K runs over taps and channels."""
    op, a = kernel.inputs[0], kernel
    _, h, w, c = op.shape
    image, line, pixel, _ = op.strides  # rows of pixels may overlap
    _, oh, ow, _ = kernel.result_shape
    channels = c // a.groups
    each = 16 // dtypes.DTYPES[op.dtype].size
    vectors = not any(n % each for n in (channels, *op.strides[:3], op.offset))
    dense = (image, line) == (h * w * pixel, w * pixel)
    plain = dense and a.kernel_size == (1, 1) and a.stride == (1, 1) and tuple(a.padding) == (0, 0, 0, 0)
    sizes = dict(
        ROWS=p.m, K=p.k, ALONG_K=True, VECTORS=vectors, H=h, W=w, OH=oh, OW=ow, CHANNELS=channels, IMAGE=image,
        LINE=line, PIXEL=pixel, KERNEL_W=a.kernel_size[1], STRIDE_H=a.stride[0], STRIDE_W=a.stride[1],
        PAD_TOP=a.padding[0], PAD_LEFT=a.padding[1], DILATION_H=a.dilation[0], DILATION_W=a.dilation[1],
        PLAIN=plain,
    )  # fmt: skip
    return _Side(0, "Image", sizes)


def _weights(kernel: Gemm | Conv2d, p: Product) -> _Side:
    """Return the right operand: a row is an output column."""
    op = kernel.inputs[kernel.rhs]
    if len(op.shape) == 4:  # convolution: [groups, columns, taps, channels], dense
        batch, row, step = p.n * p.k, p.k, 1
    else:
        batch, row, step = op.strides if op.shape[0] > 1 else (0, *op.strides[1:])
    row = 0 if p.n == 1 else row
    dense = step == 1 or p.k == 1
    each = 16 // dtypes.DTYPES[op.dtype].size
    vectors = dense and not any(x % each for x in (p.k, row, batch, op.offset))
    batch = batch if p.batch > 1 else 0
    sizes = dict(ROWS=p.n, K=p.k, ALONG_K=dense, VECTORS=vectors, ROW=row, STEP=step, BATCH=batch)
    return _Side(kernel.rhs, "Matrix", sizes)


# -- tiles ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """A workgroup computes ``m`` x ``n`` results, ``k`` terms at a time, with ``subgroups_m`` x ``subgroups_n``
    subgroups."""

    m: int
    n: int
    k: int
    subgroups_m: int = 1
    subgroups_n: int = 1

    @property
    def threads(self) -> int:
        """The threads of a workgroup."""
        return self.subgroups_m * self.subgroups_n * SUBGROUP


class SimpleTile(NamedTuple):
    """A workgroup computes ``m`` x ``n`` results in float arithmetic, a thread ``rows`` x ``columns`` of them.
    ``rate``: results that a compute unit computes in the same time, as a fraction of the largest tile's."""

    m: int
    n: int
    rows: int
    columns: int
    rate: float

    @property
    def threads(self) -> int:
        """The threads of a workgroup."""
        return self.m // self.rows * (self.n // self.columns)


SIMPLE_TERMS = 16  # of a step, whose sums are added up before they are added to others
SIMPLE_TILES = (
    SimpleTile(128, 128, 8, 8, 1.0),
    SimpleTile(64, 64, 4, 4, 0.7),
    SimpleTile(128, 32, 4, 4, 0.7),
)


def choose_tile(p: Product, dialect: Dialect) -> Tile:
    """Return the largest tile for the matrix unit that still keeps every compute unit of the device busy."""
    small = Tile(64, 64, 32, 2, 2)
    if dialect.device.shared_bytes < 64 << 10:
        return small
    for tile in (Tile(128, 128, 32, 2, 4), Tile(128, 64, 32, 4, 2), Tile(64, 128, 32, 2, 4)):
        count = blocks(p.m, tile.m) * blocks(p.n, tile.n) * p.batch * p.splits
        if count >= dialect.device.compute_units and p.m > tile.m // 2 and p.n > tile.n // 2:
            return tile
    return Tile(32, 64, 64, 1, 4) if p.m <= 32 else Tile(64, 64, 64, 2, 2)


# Tiles of split float32 products; the workgroups of each that fit on a compute unit; the results that this computes in
# the same time, as a fraction of the largest tile's.
SPLIT_TILES = ((Tile(128, 128, 32, 2, 4), 1, 1.0), (Tile(128, 64, 32, 4, 2), 1, 0.9), (Tile(64, 64, 32, 2, 2), 2, 0.8))


def choose_split_tile(p: Product, dialect: Dialect) -> Tile:
    """Return the tile of a split float32 product that gives the busiest compute unit the least work."""

    def cost(t: tuple[Tile, int, float]) -> float:
        tile, resident, rate = t
        waves = blocks(_groups(p, tile), dialect.device.compute_units)
        return waves * tile.m * tile.n / (rate if waves >= resident else rate / resident * waves)

    return min(SPLIT_TILES, key=cost)[0]


def uses_matrix_unit(kernel: Gemm | Conv2d, dialect: Dialect) -> bool:
    """Whether the matrix unit multiplies the operands of ``kernel``."""
    dtype = kernel.left.dtype
    tf32 = dtype == "float32" == kernel.weight.dtype and bool(dialect.matrix_tf32)
    if tf32 and not kernel.tf32:
        p = product_of(kernel)
        return p.m > WGMMA_ROWS and p.n > WGMMA_ROWS
    return tf32 or (dtype in dialect.matrix_types and as_b16(kernel) is not None)


def _tiles(kernel: Gemm | Conv2d, dialect: Dialect) -> Emission:
    """Return the function that computes tiles of the result, on the matrix unit if it supports the operands' type."""
    if not uses_matrix_unit(kernel, dialect):
        return _simple_gemm(kernel, dialect)
    split = kernel.inputs[0].dtype == "float32"
    kind = SPLIT_FLOATS if split else operand_type(kernel)
    assert kind is not None
    kernel = kernel if split else as_b16(kernel) or kernel
    p = product_of(kernel)
    groups = kernel.groups if isinstance(kernel, Conv2d) else 1
    narrow = groups > 1 and p.n <= NARROW < p.m and dialect.device.shared_bytes >= 64 << 10
    if p.m > WGMMA_ROWS and dialect.wgmma_widths and not narrow and not split:
        tile = min(wgmma_tiles(dialect), key=lambda t: wgmma_cost(p, t, dialect))
        return _matrix_gemm(kernel, dialect, p, kind, tile, "wgmma_gemm", tile.k, wgmma_stages(tile))
    choose = choose_split_tile if split else choose_tile
    tile = Tile(128, 16 if p.n <= 16 else 32, 32, 4, 1) if narrow else choose(p, dialect)
    size = dtypes.DTYPES[kernel.inputs[0].dtype].size
    ld = tile.k + 16 // size  # avoids bank conflicts between rows that are read together
    room = dialect.device.shared_bytes // ((tile.m + tile.n) * ld * size)
    stages = max(2, min(dialect.stages, room, blocks(blocks(p.k, tile.k), p.splits) + 1))
    return _matrix_gemm(kernel, dialect, p, kind, tile, "split_gemm" if split else "mma_gemm", ld, stages)


def _sizes(kernel: Gemm | Conv2d, p: Product, tile: Tile) -> dict[str, bool | int]:
    """Return the constants that all templates of ``kernels/gemm.h`` share."""
    return dict(
        M=p.m, N=p.n, K=p.k, BATCH=p.batch, GROUPED=isinstance(kernel, Conv2d), SPLITS=p.splits, PRODUCTS=p.products,
        TILE_M=tile.m, TILE_N=tile.n, TILE_K=tile.k, THREADS=tile.threads,
    )  # fmt: skip


def _operands(kernel: Gemm | Conv2d, f: Function, p: Product, b16: str = "") -> list[str]:
    """Define the constants of the operands, and return their arguments. ``b16``: the C++ type of b16 elements
    (see ``operand_types.py``)."""
    left, arguments = _image(kernel, p) if isinstance(kernel, Conv2d) else _rows(kernel, p), []
    for name, side in (("@NAME@_left", left), ("@NAME@_right", _weights(kernel, p))):
        own, pointer = dtypes.DTYPES[kernel.inputs[side.number].dtype].ctype, f.pointer(side.number)
        ctype = b16 or own
        f.before.append(constants(name, {"T": ctype}, side.constants))
        arguments += [f"{side.template}<{name}>()", pointer if ctype == own else f"(DEVICE const {ctype}*){pointer}"]
    return arguments


def _epilogue(kernel: Gemm | Conv2d, f: Function, p: Product, widest: int = 8) -> str:
    """Define the functor of the epilogue, whose vectors divide a row, and return the expression that instantiates
    it."""
    members = Members(f, "@NAME@_epilogue")
    epilogue = Epilogue(kernel, members)
    width = min(epilogue.width, widest)
    while p.n // p.products % width:
        width //= 2
    made = Functor(epilogue, members, width, p.products)
    made.store()
    return made.finish()


def _groups(p: Product, tile: Tile) -> int:
    """Return the number of workgroups: one for each tile of each part of K."""
    return blocks(p.m, tile.m) * blocks(p.n, tile.n) * p.batch * p.splits


def choose_simple_tile(p: Product, dialect: Dialect) -> SimpleTile:
    """Choose the tile of a product in float arithmetic: the one that gives the busiest compute unit the
    least work."""
    compute_units, small = dialect.device.compute_units, dialect.device.shared_bytes < 64 << 10

    def cost(t: SimpleTile) -> float:
        count = blocks(p.m, t.m) * blocks(p.n, t.n) * p.batch * p.splits
        return blocks(count, compute_units) * t.m * t.n / t.rate

    return min((t for t in SIMPLE_TILES if not (small and t.m * t.n > 64 * 64)), key=cost)


def _simple_gemm(kernel: Gemm | Conv2d, dialect: Dialect) -> Emission:
    """Return a function that computes tiles of the result in the arithmetic of the sums."""
    f, p = Function(kernel, dialect), product_of(kernel)
    simple = choose_simple_tile(p, dialect)
    tile = Tile(simple.m, simple.n, SIMPLE_TERMS, subgroups_n=simple.threads // SUBGROUP)
    operands, total = _operands(kernel, f, p), (operand_type(kernel) or FLOATS).sum_ctype
    shared = [f.array(total, name, 2 * SIMPLE_TERMS * (n + 4)) for name, n in (("as", tile.m), ("bs", tile.n))]
    epilogue = _epilogue(kernel, f, p, 4 // p.products if p.n % 4 == 0 else 1)
    sizes = _sizes(kernel, p, tile) | dict(ROWS=simple.rows, COLUMNS=simple.columns)
    f.template("simple_gemm", "simple_gemm.h", {"Sum": total}, sizes, *operands, *shared, epilogue)
    return f.finish(_groups(p, tile), tile.threads)


NARROW = 32  # columns of a convolution's group for which other tiles are mostly empty
WGMMA_ROWS = 16  # wgmma is faster for left operands with more rows


def _matrix_gemm(
    kernel: Gemm | Conv2d, dialect: Dialect, p: Product, kind: OperandType, tile: Tile, name: str, ld: int, stages: int
) -> Emission:  # fmt: skip
    """Return a function for the matrix unit: an instance of template ``name``, with ``ld`` elements between rows in
    shared memory. 8-bit operands of ``kernel`` are viewed as b16."""
    f, header = Function(kernel, dialect), "gemm.h" if name == "mma_gemm" else f"{name}.h"
    operands = _operands(kernel, f, p, kind.ctype)
    size = dtypes.DTYPES[kernel.inputs[0].dtype].size
    count = max(stages * (tile.m + tile.n) * ld * size, tile.m * (tile.n + 4) * 4) // 4  # operands, and then results
    memory = f.array("int", "memory", blocks(count, 4) * 4)
    matrix = dialect.matrix_tf32 if kind is SPLIT_FLOATS else dialect.matrix
    fragment = dict(zip(("FRAG_M", "FRAG_N", "FRAG_K"), matrix, strict=True))
    sizes = _sizes(kernel, p, tile) | dict(
        SUBGROUPS_M=tile.subgroups_m, SUBGROUPS_N=tile.subgroups_n, STAGES=stages, LD=ld, **fragment
    )  # fmt: skip
    sizes |= dict(SMALL=not kernel.tf32) if kind is SPLIT_FLOATS else {}
    types = {"T": kind.ctype, "Sum": kind.sum_ctype, "Frag": kind.fragment}
    f.template(name, header, types, sizes, *operands, memory, _epilogue(kernel, f, p))
    return f.finish(_groups(p, tile), tile.threads)


def wgmma_tiles(dialect: Dialect) -> list[Tile]:
    """Return the tile sizes of ``wgmma_gemm``."""
    return [Tile(m, n, 64, m // 16, 1) for m in (128, 64) for n in dialect.wgmma_widths if m * n != 64 * 256]


def wgmma_stages(t: Tile) -> int:
    """Return the stages of the ring buffer. Workgroups of the largest tile have a compute unit to themselves, others
    share one."""
    return 3 if 64 * 64 < t.m * t.n < 128 * 256 else 4


def wgmma_cost(p: Product, t: Tile, dialect: Dialect) -> float:
    """Return the estimated time of a product in microseconds, from the costs of the device."""
    c = dialect.device.wgmma
    assert c is not None
    steps = blocks(blocks(p.k, t.k), p.splits)
    together = max(1, dialect.device.shared_bytes // (wgmma_stages(t) * (t.m + t.n) * t.k * 2))
    rate = dict(c.rates).get(t.m * t.n, c.rate)
    multiply, store = c.step * steps * t.m * t.n / (128 * 256) / rate, t.m * t.n * c.result
    count = blocks(p.m, t.m) * blocks(p.n, t.n) * p.batch * p.splits
    alone = multiply + store + c.start
    return blocks(count, dialect.device.compute_units * together) * max(together * multiply, together * store, alone)
