"""Attention on the matrix unit: sizes for ``kernels/flash.h``."""

from __future__ import annotations

import math

from ....schedule.anchors import Attention
from ....schedule.kernel import Operand
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Constants, Function, blocks
from ..lang.scalar import ctype

MIN_QUERIES = 16  # with fewer, loading the keys takes longer than multiplying them
MAX_SIZE = 160  # of a head: the results of 16 rows stay in the registers of a subgroup
ROWS, KEYS, SUBGROUPS = 64, 64, 4  # of a workgroup; 16 rows of a subgroup


def is_flash(kernel: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_flash` supports ``kernel``: heads of up to ``MAX_SIZE`` elements, and :func:`has_tiles`."""
    q, _, v = kernel.inputs[:3]
    out = kernel.outputs[0]
    stored = kernel.splits > 1 or (out.strides[3] == 1 and not any(s % 2 for s in out.strides[:3]))
    fits = max(q.shape[3], v.shape[3]) <= MAX_SIZE
    return dialect.fragment_access and fits and stored and has_tiles(kernel, dialect)


def flash_heads(q: Operand, k: Operand) -> int:
    """Return how many heads' rows a workgroup processes together: all that share keys if this takes fewer tiles."""
    heads, queries = q.shape[1] // k.shape[1], q.shape[2]
    return heads if blocks(heads * queries, ROWS) < heads * blocks(queries, ROWS) else 1


def flash_tiles(q: Operand, k: Operand) -> int:
    """Return the number of tiles of query rows."""
    heads = flash_heads(q, k)
    return q.shape[0] * (q.shape[1] // heads) * blocks(heads * q.shape[2], ROWS)


def has_tiles(kernel: Attention, dialect: Dialect) -> bool:
    """Whether the matrix unit can multiply tiles of queries and keys: half types, dense rows at multiples of 16
    bytes."""
    q, k, v = kernel.inputs[:3]
    dense = all(o.strides[3] == 1 and has_aligned_rows(o) for o in (q, k, v))
    whole = q.shape[3] % 8 == v.shape[3] % 8 == 0
    return q.dtype in dialect.matrix_types and q.shape[2] > 0 and not kernel.scaled and dense and whole


def has_aligned_rows(o: Operand) -> bool:
    """Whether the rows of operand [B, H, S, D] begin at multiples of 16 bytes."""
    size = dtypes.DTYPES[o.dtype].size
    return not any(s * size % 16 for s in (*o.strides[:3], o.offset))


def on_matrix_unit(kernel: Attention, dialect: Dialect) -> bool:
    """Whether ``kernel`` has many queries, and a kernel that keeps scores in registers supports it: this one, or one of
    the target."""
    many = kernel.inputs[0].shape[2] >= MIN_QUERIES
    return many and (is_flash(kernel, dialect) or dialect.special_for(kernel) is not None)


def emit_flash(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel for which :func:`is_flash`."""
    f, (q, k), threads = Function(kernel, dialect, explicit_wait=True), kernel.inputs[:2], SUBGROUPS * SUBGROUP
    mask, positions = mask_and_positions(kernel)
    heads = flash_heads(q, k)
    shares = {1: 4, 2: 2}.get(blocks(heads * q.shape[2], 16), 1)
    types, sizes = flash_sizes(kernel, ROWS // shares, KEYS, threads, heads, shares)
    arrays = [f.array(types["T"], name, 2 * KEYS * (int(sizes[n]) + 8)) for name, n in (("ks", "D"), ("vs", "DV"))]
    mask_bytes = 2 * ROWS // shares * (KEYS * dtypes.DTYPES[kernel.inputs[mask].dtype].size + 16) if mask else 0
    arrays.append(f.array("int", "ms", mask_bytes // 4) if sizes["TILED"] else "nullptr")
    arrays.append(f.array("int", "limit", 2 * SUBGROUPS) if sizes["LIMITED"] else "nullptr")
    operands = [f.pointer(n) if n is not None else "nullptr" for n in (0, 1, 2, mask, positions, ~0)]
    f.template("flash", "flash.h", types, sizes, *operands, *arrays)
    return f.finish(flash_tiles(q, k) * kernel.splits, threads)


def mask_and_positions(kernel: Attention) -> tuple[int | None, int | None]:
    """Return the numbers of the inputs that are the mask and the queries' positions; None if the kernel reads none."""
    by_position = kernel.by_position
    own = len(kernel.inputs) - (2 if kernel.scaled else 0)
    mask = 3 if own > 3 and not by_position else None
    return mask, 3 if by_position else 4 if kernel.limited else None


def flash_sizes(
    kernel: Attention, rows: int, keys: int, threads: int, heads: int = 1, shares: int = 1
) -> tuple[dict[str, str], Constants]:
    """Return the types and constants with which ``FlashRows`` is instantiated. ``rows``, ``keys``: of a tile.
    ``threads``: those that compute the range of keys. ``heads``: whose rows are processed together. ``shares``:
    subgroups that share the keys of a tile. Heads are padded to products of 16 terms."""
    (q, k, v), out = kernel.inputs[:3], kernel.outputs[0]
    number, position = mask_and_positions(kernel)
    mask = kernel.inputs[number] if number is not None else None
    limits = kernel.inputs[position] if position is not None else None
    boolean = mask is not None and mask.dtype == "bool"
    tiled = pairs = False
    if mask is not None and mask.strides[3] == 1:
        # tiles of a dense mask are loaded with the keys
        tiled = (boolean or mask.strides[2] != 0) and has_aligned_rows(mask)
        pairs = not any(s % 2 for s in (*mask.strides[:3], mask.offset, mask.shape[3]))
    scale = kernel.scale * math.log2(math.e)
    sizes: dict[str, bool | int | float] = dict(
        B=q.shape[0], H=q.shape[1], SQ=q.shape[2], SK=k.shape[2], KEY_SIZE=q.shape[3], VALUE_SIZE=v.shape[3],
        D=blocks(q.shape[3], 16) * 16, DV=blocks(v.shape[3], 16) * 16,
        HEADS_PER_KV=q.shape[1] // k.shape[1],
        GROUP=heads, SHARES=shares, SPLITS=kernel.splits, ROWS=rows, KEYS=keys, THREADS=threads,
        LIMIT=limits.strides[0] if limits else 0, MASKED=mask is not None, BOOLEAN=boolean, TILED=tiled,
        MASK_PAIRS=pairs,
        BY_POSITION=kernel.by_position, CAUSAL=kernel.causal, LIMITED=kernel.limited,
        POSITIONS_ARE_INPUTS=bool(kernel.limited and limits and limits.buffer.is_input), SCALE=float(scale),
        SCALE_LATE=scale > 0 and (mask is None or boolean),
        **strides("Q", q), **strides("K", k), **strides("V", v), **strides("O", out if kernel.splits == 1 else None),
        **strides("M", mask),
    )  # fmt: skip
    return {"T": ctype(q.dtype), "Mask": ctype(mask.dtype) if mask else "bool8", "Out": ctype(out.dtype)}, sizes


def strides(letter: str, op: Operand | None) -> dict[str, int]:
    """Return the constants for the strides of an operand [B, H, S, D]; zeros if it is None."""
    return {f"{letter}_{dim}": step for dim, step in zip("BHSD", op.strides if op else (0,) * 4, strict=True)}
