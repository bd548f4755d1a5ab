"""Attention in float arithmetic, for any mask and any strides: sizes for ``kernels/attention.h``."""

from __future__ import annotations

from ....schedule.kernel import Attention, CombineAttention, Operand
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import ctype
from .flash import emit_flash, is_flash, mask_and_positions, strides

THREADS = 256
CHUNK = 256  # keys per iteration
MAX_ROWS = 8  # query rows of a workgroup
PARTS_AT_ONCE = 4  # groups of threads that share the parts of one result
PARTIALS_BYTES = 24 << 10  # shared memory for partial sums


def emit_attention(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel. Its output is the result [B, H, SQ, DV] or, if it is split into S
    parts, the float32 parts [S, B, H, SQ, DV + 2] (values, maximum, sum)."""
    if is_flash(kernel, dialect):
        return emit_flash(kernel, dialect)
    return _Attention(kernel, dialect).emit()


class _Attention:
    def __init__(self, kernel: Attention, dialect: Dialect):
        self.kernel, self.f = kernel, Function(kernel, dialect)
        q, k, v = kernel.inputs[:3]
        self.b, self.h, self.sq, self.d = q.shape
        self.hk, self.sk, self.dv = k.shape[1], k.shape[2], v.shape[3]
        self.splits = kernel.splits
        self.queries = self.h // self.hk * self.sq
        self.by_position = kernel.by_position
        self.rows = min(MAX_ROWS, self.queries)
        # `key_lanes` lanes share a row of keys or values, `item` elements each
        self.item = 8
        self.key_lanes = 1
        while self.key_lanes * self.item < max(self.d, self.dv):
            self.key_lanes *= 2
        if self.key_lanes > SUBGROUP:
            self.key_lanes, self.item = SUBGROUP, blocks(max(self.d, self.dv), SUBGROUP * 4) * 4

    def emit(self) -> Emission:
        f, kernel, per = self.f, self.kernel, THREADS // SUBGROUP
        q, k, v, out = *kernel.inputs[:3], kernel.outputs[0]
        number, positions = mask_and_positions(kernel)
        mask = kernel.inputs[number] if number is not None else None
        chunk = min(CHUNK, blocks(self.sk, SUBGROUP) * SUBGROUP)
        rows_per_pass = max(1, min(self.rows, PARTIALS_BYTES // (per * self.key_lanes * self.item * 4)))
        types = {"Q": ctype(q.dtype), "K": ctype(k.dtype), "V": ctype(v.dtype), "Out": ctype(out.dtype)}
        types["Mask"] = ctype(mask.dtype) if mask else "bool8"
        sizes = dict(
            B=self.b, H=self.h, HK=self.hk, SQ=self.sq, SK=self.sk, D=self.d, DV=self.dv, THREADS=THREADS,
            ROWS=self.rows, CHUNK=chunk, KEY_LANES=self.key_lanes, ITEM=self.item, SPLITS=self.splits,
            ROWS_PER_PASS=rows_per_pass,
            **strides("Q", q), **strides("K", k), **strides("V", v),
            **strides("O", out if self.splits == 1 else None), **strides("M", mask),
            LIMIT=kernel.inputs[positions].strides[0] if positions else 0,
            MASKED=mask is not None, BY_POSITION=self.by_position, CAUSAL=kernel.causal, LIMITED=kernel.limited,
            K_VECTORS=self._vectors(k, self.d), V_VECTORS=self._vectors(v, self.dv), SCALE=float(kernel.scale),
        )  # fmt: skip
        operands = [f.pointer(n) if n is not None else "nullptr" for n in (0, 1, 2, number, positions, ~0)]
        lengths = dict(score=self.rows * chunk, row_max=self.rows, row_sum=self.rows, rescale=self.rows)
        lengths["partials"] = rows_per_pass * per * self.key_lanes * self.item
        arrays = [f.array("float", name, n) for name, n in lengths.items()]
        f.template("attention", "attention.h", types, sizes, *operands, *arrays)
        return f.finish(blocks(self.queries, self.rows) * self.splits * self.hk * self.b, THREADS)

    def _vectors(self, op: Operand, dim: int) -> bool:
        """Whether rows of ``op`` can be read 16 bytes at a time."""
        size = dtypes.DTYPES[op.dtype].size
        aligned = op.strides[-1] == 1 and not any(n * size % 16 for n in (dim, op.offset, *op.strides[:-1]))
        return aligned and self.item % (16 // size) == 0


def emit_combine_attention(kernel: CombineAttention, dialect: Dialect) -> Emission:
    """Return the function of ``combine_attention``: float32 parts [S, B, H, SQ, D + 2] to [B, H, SQ, D]."""
    f, parts, out = Function(kernel, dialect), kernel.inputs[0], kernel.outputs[0]
    splits, b, h, sq, width = parts.shape
    d = width - 2
    threads = PARTS_AT_ONCE * blocks(d, SUBGROUP) * SUBGROUP
    sizes = dict(SPLITS=splits, B=b, H=h, SQ=sq, D=d, PARTS_AT_ONCE=PARTS_AT_ONCE, THREADS=threads, **strides("O", out))
    lengths = {"weight": splits, "inverse_sum": 1, "partials": PARTS_AT_ONCE * d}
    arrays = [f.array("float", name, n) for name, n in lengths.items()]
    pointers = f.pointer(0), f.pointer(~0)
    f.template("attention_combine", "attention.h", {"Out": ctype(out.dtype)}, sizes, *pointers, *arrays)
    return f.finish(b * h * sq, threads)
