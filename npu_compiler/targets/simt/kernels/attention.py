"""Attention in float arithmetic, for any mask and any strides: sizes for ``kernels/attention.h``."""

from __future__ import annotations

from dataclasses import dataclass

from ....schedule.anchors import Attention, CombineAttention
from ....schedule.kernel import Operand
from ....support import dtypes
from ..lang.device import GPU
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype
from .flash import emit_flash, is_flash, mask_and_positions, strides

THREADS = 256
CHUNK = 256  # keys per iteration
MAX_ROWS = 8  # query rows of a workgroup
# With MANY_TILES workgroups for a compute unit, a thread processes at least FEW_KEYS keys: adding up the threads'
# partial sums takes as long as some keys.
MANY_TILES, FEW_KEYS = 4, 4
PARTS_AT_ONCE = 4  # the most groups of threads that share the parts of one result
MAX_THREADS = 1024  # of a workgroup
MAX_SPLIT_SIZE = MAX_THREADS  # of heads whose parts can be combined: a thread computes an element
PARTIALS_BYTES = 24 << 10  # the most shared memory for partial sums
ROW_BYTES = 512  # shared memory for what a workgroup has of each row: maximum, sum, factor, and padding


def emit_attention(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel. Its output is the result [B, H, SQ, DV] or, if it is split into S
    parts, the float32 parts [S, B, H, SQ, DV + 2] (values, maximum, sum)."""
    if is_flash(kernel, dialect):
        return emit_flash(kernel, dialect)
    f, (q, k, v), out = Function(kernel, dialect), kernel.inputs[:3], kernel.outputs[0]
    (b, h, sq, d), (hk, sk), dv = q.shape, k.shape[1:3], v.shape[3]
    queries = h // hk * sq
    tile = tile_for(queries, k, v, dialect.device)
    number, positions = mask_and_positions(kernel)
    mask = kernel.inputs[number] if number is not None else None
    types = {"Q": ctype(q.dtype), "K": ctype(k.dtype), "V": ctype(v.dtype), "Out": ctype(out.dtype)}
    types["Mask"] = ctype(mask.dtype) if mask else "bool8"
    sizes = dict(
        B=b, H=h, HK=hk, SQ=sq, SK=sk, D=d, DV=dv, SPLITS=kernel.splits, **tile.sizes(k, v),
        **strides("Q", q), **strides("O", out if kernel.splits == 1 else None), **strides("M", mask),
        LIMIT=kernel.inputs[positions].strides[0] if positions else 0, MASKED=mask is not None,
        BY_POSITION=kernel.by_position, CAUSAL=kernel.causal, LIMITED=kernel.limited, SCALED=kernel.scaled,
        SCALE=float(kernel.scale),
    )  # fmt: skip
    scales = (len(kernel.inputs) - 2, len(kernel.inputs) - 1) if kernel.scaled else (None, None)
    operands = [f.pointer(n) if n is not None else "nullptr" for n in (0, 1, 2, number, positions, ~0, *scales)]
    f.template("attention", "attention.h", types, sizes, *operands, *tile.arrays(f))
    return f.finish(blocks(queries, tile.rows) * kernel.splits * hk * b, tile.threads)


@dataclass(frozen=True)
class Tile:
    """How the ``threads`` of a workgroup share ``rows`` query rows and ``chunk`` keys at a time. ``key_lanes`` lanes
    share a row of keys or values, ``item`` elements each. Partial sums of ``rows_per_pass`` rows fit in shared
    memory."""

    threads: int
    rows: int
    chunk: int
    key_lanes: int
    item: int
    rows_per_pass: int

    def sizes(self, keys: Operand, values: Operand) -> dict[str, bool | int]:
        """Return the constants of ``Attention`` that depend on the tile and on the operands' layout."""
        return dict(
            THREADS=self.threads, ROWS=self.rows, CHUNK=self.chunk, KEY_LANES=self.key_lanes, ITEM=self.item,
            ROWS_PER_PASS=self.rows_per_pass, **strides("K", keys), **strides("V", values),
            K_VECTORS=self._vectors(keys), V_VECTORS=self._vectors(values),
        )  # fmt: skip

    def arrays(self, f: Function) -> list[str]:
        """Declare the arrays in shared memory: scores, maxima, sums, rescaling factors, partial sums."""
        lengths = {"score": self.rows * self.chunk, "row_max": self.rows, "row_sum": self.rows, "rescale": self.rows}
        lengths["partials"] = self.rows_per_pass * (self.threads // SUBGROUP) * self.key_lanes * self.item
        return [f.array("float", name, n) for name, n in lengths.items()]

    def _vectors(self, op: Operand) -> bool:
        """Whether rows of ``op`` can be read 16 bytes at a time, or 8 of 8-bit numbers."""
        width = min(16 // dtypes.DTYPES[op.dtype].size, 8)
        aligned = op.strides[-1] == 1 and not any(n % width for n in (op.shape[3], op.offset, *op.strides[:-1]))
        return aligned and self.item % width == 0


def tile_for(queries: int, keys: Operand, values: Operand, device: GPU) -> Tile:
    """Return the tile of a workgroup that processes up to ``queries`` query rows."""
    widest, rows, key_lanes, item = max(keys.shape[3], values.shape[3]), min(MAX_ROWS, queries), 1, 8
    while key_lanes * item < widest:
        key_lanes *= 2
    if key_lanes > SUBGROUP:
        key_lanes, item = SUBGROUP, blocks(widest, SUBGROUP * 4) * 4
    chunk = min(CHUNK, blocks(keys.shape[2], SUBGROUP) * SUBGROUP)
    memory = device.shared_bytes - rows * chunk * 4 - ROW_BYTES
    threads, row = THREADS, key_lanes * item * 4  # bytes of a subgroup's partial sums of a row
    if keys.shape[0] * keys.shape[1] * blocks(queries, rows) >= device.compute_units * MANY_TILES:
        while threads > SUBGROUP and threads * FEW_KEYS > keys.shape[2] * key_lanes:
            threads //= 2
    while threads > SUBGROUP and threads // SUBGROUP * row > memory:
        threads //= 2
    rows_per_pass = max(1, min(rows, min(memory, PARTIALS_BYTES) // (threads // SUBGROUP * row)))
    return Tile(threads, rows, chunk, key_lanes, item, rows_per_pass)


def emit_combine_attention(kernel: CombineAttention, dialect: Dialect) -> Emission:
    """Return the function of ``combine_attention``: float32 parts [S, B, H, SQ, D + 2] to [B, H, SQ, D]."""
    f, parts, out = Function(kernel, dialect), kernel.inputs[0], kernel.outputs[0]
    splits, b, h, sq, width = parts.shape
    d = width - 2
    row = blocks(d, SUBGROUP) * SUBGROUP
    at_once = min(PARTS_AT_ONCE, MAX_THREADS // row)
    threads = at_once * row
    sizes = dict(SPLITS=splits, B=b, H=h, SQ=sq, D=d, PARTS_AT_ONCE=at_once, THREADS=threads, **strides("O", out))
    lengths = {"weight": splits, "inverse_sum": 1, "partials": at_once * d}
    arrays = [f.array("float", name, n) for name, n in lengths.items()]
    pointers = f.pointer(0), f.pointer(~0)
    f.template("attention_combine", "attention.h", {"Out": ctype(out.dtype)}, sizes, *pointers, *arrays)
    return f.finish(b * h * sq, threads)
