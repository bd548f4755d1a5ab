"""Attention of many queries on the matrix unit: sizes for ``kernels/flash.h``."""

from __future__ import annotations

import math

from ....schedule.anchors import Attention
from ....schedule.kernel import Operand
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Constants, Function, blocks
from ..lang.scalar import ctype

MIN_QUERIES = 16
MAX_SIZE = 160  # of a head: the results of 16 rows stay in the registers of a subgroup


def is_flash(kernel: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_flash` supports ``kernel``: heads of up to ``MAX_SIZE`` elements, and :func:`has_tiles`."""
    q, _, v = kernel.inputs[:3]
    out = kernel.outputs[0]
    fits = max(q.shape[3], v.shape[3]) <= MAX_SIZE and out.strides[3] == 1 and not any(s % 2 for s in out.strides[:3])
    return dialect.fragment_access and fits and has_tiles(kernel, dialect)


def has_tiles(kernel: Attention, dialect: Dialect) -> bool:
    """Whether the matrix unit can multiply tiles of queries and keys: half types, dense rows at multiples of 16 bytes,
    at least ``MIN_QUERIES`` queries."""
    q, k, v = kernel.inputs[:3]
    dense = all(o.strides[3] == 1 and has_aligned_rows(o) for o in (q, k, v))
    whole = q.shape[3] % 8 == v.shape[3] % 8 == 0
    return q.dtype in dialect.matrix_types and q.shape[2] >= MIN_QUERIES and not kernel.scaled and dense and whole


def has_aligned_rows(o: Operand) -> bool:
    """Whether the rows of operand [B, H, S, D], of a half type, begin at multiples of 16 bytes."""
    return not any(s % 8 for s in (*o.strides[:3], o.offset))


def on_matrix_unit(kernel: Attention, dialect: Dialect) -> bool:
    """Whether a kernel that keeps scores in registers supports ``kernel``: this one, or one of the target."""
    return is_flash(kernel, dialect) or dialect.special_for(kernel) is not None


def emit_flash(kernel: Attention, dialect: Dialect) -> Emission:
    """Return the function of an ``attention`` kernel for which :func:`is_flash`."""
    f, rows, keys, threads = Function(kernel, dialect, explicit_wait=True), 64, 64, 128
    q = kernel.inputs[0]
    mask, positions = mask_and_positions(kernel)
    types, sizes = flash_sizes(kernel, rows, keys, threads)
    arrays = [f.array(types["T"], name, 2 * keys * (int(sizes[n]) + 8)) for name, n in (("ks", "D"), ("vs", "DV"))]
    arrays.append(f.array("int", "ms", rows * keys // 2) if sizes["TILED"] else "nullptr")
    arrays.append(f.array("int", "limit", threads // 16) if sizes["LIMITED"] else "nullptr")
    operands = [f.pointer(n) if n is not None else "nullptr" for n in (0, 1, 2, mask, positions, ~0)]
    f.template("flash", "flash.h", types, sizes, *operands, *arrays)
    return f.finish(blocks(q.shape[2], rows) * q.shape[1] * q.shape[0], threads)


def mask_and_positions(kernel: Attention) -> tuple[int | None, int | None]:
    """Return the numbers of the inputs that are the mask and the queries' positions; None if the kernel reads none."""
    by_position = kernel.by_position
    own = len(kernel.inputs) - (2 if kernel.scaled else 0)
    mask = 3 if own > 3 and not by_position else None
    return mask, 3 if by_position else 4 if kernel.limited else None


def flash_sizes(kernel: Attention, rows: int, keys: int, threads: int) -> tuple[dict[str, str], Constants]:
    """Return the types and constants with which ``FlashRows`` is instantiated. ``rows``, ``keys``: of a tile.
    ``threads``: those that compute the range of keys. Heads are padded to products of 16 terms."""
    (q, k, v), out = kernel.inputs[:3], kernel.outputs[0]
    number, position = mask_and_positions(kernel)
    mask = kernel.inputs[number] if number is not None else None
    limits = kernel.inputs[position] if position is not None else None
    boolean = mask is not None and mask.dtype == "bool"
    # tiles of a dense boolean mask are loaded with the keys
    tiled = mask is not None and boolean and mask.strides[3] == 1
    tiled = tiled and mask is not None and not any(s % 16 for s in (*mask.strides[:3], mask.offset))
    scale = kernel.scale * math.log2(math.e)
    sizes: dict[str, bool | int | float] = dict(
        B=q.shape[0], H=q.shape[1], SQ=q.shape[2], SK=k.shape[2], KEY_SIZE=q.shape[3], VALUE_SIZE=v.shape[3],
        D=blocks(q.shape[3], 16) * 16, DV=blocks(v.shape[3], 16) * 16,
        HEADS_PER_KV=q.shape[1] // k.shape[1], ROWS=rows, KEYS=keys, THREADS=threads,
        LIMIT=limits.strides[0] if limits else 0, MASKED=mask is not None, BOOLEAN=boolean, TILED=tiled,
        BY_POSITION=kernel.by_position, CAUSAL=kernel.causal, LIMITED=kernel.limited,
        POSITIONS_ARE_INPUTS=bool(kernel.limited and limits and limits.buffer.is_input), SCALE=float(scale),
        SCALE_LATE=scale >= 0 and (mask is None or boolean),
        **strides("Q", q), **strides("K", k), **strides("V", v), **strides("O", out), **strides("M", mask),
    )  # fmt: skip
    return {"T": ctype(q.dtype), "Mask": ctype(mask.dtype) if mask else "bool8"}, sizes


def strides(letter: str, op: Operand | None) -> dict[str, int]:
    """Return the constants for the strides of an operand [B, H, S, D]; zeros if it is None."""
    return {f"{letter}_{dim}": step for dim, step in zip("BHSD", op.strides if op else (0,) * 4, strict=True)}
