"""Scans along rows: the choice of a template of ``kernels/scan.h`` and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....graph.graph import SCAN_EXTREMES
from ....schedule.kernel import Operand, Scan, ScanTotals
from ....support import dtypes
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import accumulator, combine, ctype, kind_of, wrap

THREADS = 256
MIN_COLUMNS = 16  # neighbouring rows that are neighbours in memory; each has a thread
MAX_VECTORS = 4  # of a lane in a tile
# Extremes of columns: the subgroups of a workgroup share rows of at least COLUMN_TILE elements, EACH for a thread.
EACH, COLUMN_TILE = 8, 32
SUBGROUP_ROW = 1024  # a workgroup, instead of a subgroup, scans longer rows
# Sections: of at least MIN_TILES tiles of a workgroup, or of MIN_COLUMN elements of a thread's row.
MIN_TILES, MIN_COLUMN, MIN_SECTIONS, MAX_SECTIONS = 1, 32, 4, 1024


@dataclass(frozen=True)
class ScanSizes:
    """How rows are scanned. ``columns``: a thread has a row; otherwise ``subgroups`` share one. A lane has ``vectors``
    vectors of ``width`` neighbours of a tile. ``sections``: of a row; the last may be shorter than ``section``."""

    rows: int
    n: int
    columns: bool
    subgroups: int
    width: int
    vectors: int
    section: int

    @property
    def sections(self) -> int:
        """The number of sections of a row."""
        return blocks(self.n, self.section)


def scan_sizes(x: Operand, axis: int, section: int = 0) -> ScanSizes:
    """Return how the rows of ``x`` along ``axis`` are scanned; 0: each in one ``section``."""
    n = x.shape[axis] if x.shape else 1
    rows = math.prod(x.shape) // n
    beside = math.prod(m for d, m in enumerate(x.shape) if d > axis)
    columns = beside >= MIN_COLUMNS or n < SUBGROUP
    width = 2 if dtypes.DTYPES[x.dtype].size == 8 else 4
    subgroups = 1 if n <= SUBGROUP_ROW else THREADS // SUBGROUP
    vectors = min(MAX_VECTORS, blocks(n, SUBGROUP * width * subgroups))
    return ScanSizes(rows, n, columns, subgroups, width, vectors, section or n)


def section_of(kernel: Scan, dialect: Dialect) -> int:
    """Return the length of the sections in which the rows of ``kernel`` are best scanned; 0: whole rows."""
    x, device = kernel.inputs[0], dialect.device
    if not math.prod(x.shape):
        return 0
    s = scan_sizes(x, kernel.axis)
    tile = MIN_COLUMN if s.columns else MIN_TILES * s.subgroups * s.vectors * s.width * SUBGROUP
    wanted = device.compute_units * (device.threads // (1 if s.columns else THREADS)) // s.rows // 2
    sections = min(s.n // tile, wanted, MAX_SECTIONS)
    if sections < MIN_SECTIONS or (s.subgroups == 1 and not s.columns):
        return 0
    return blocks(blocks(s.n, sections), tile) * tile


def register_dtype(dtype: str, op: str, dialect: Dialect) -> str:
    """Return the dtype of running totals: float64 for sums and products of float32, if the target has it; float32 for
    half types."""
    return "float64" if dtype == "float32" and op in ("sum", "prod") and dialect.has_double else dtypes.opmath(dtype)


def total_dtype(dtype: str, op: str, dialect: Dialect) -> str:
    """Return the dtype in which totals are stored; those of extremes with positions are positions."""
    return "int32" if op in SCAN_EXTREMES else register_dtype(dtype, op, dialect)


def emit_scan(kernel: Scan, dialect: Dialect) -> Emission:
    """Return the function of a ``scan`` kernel."""
    f, x, (y, *places) = Function(kernel, dialect), kernel.inputs[0], kernel.outputs
    if not math.prod(x.shape):
        return f.finish(0, THREADS)
    s = scan_sizes(x, kernel.axis, kernel.section)
    types, sizes = _instance(f, kernel, s)
    types |= {"Out": ctype(y.dtype), "Y": f.rows("y", y, kernel.axis)}
    if places:
        types |= {"P": f.rows("p", places[0], kernel.axis)}
    operands = [f.pointer(0), f.pointer(1) if kernel.section else "nullptr", f.pointer(~0)]
    operands.append(f.pointer(~1) if places else "nullptr")
    if s.columns and not kernel.section and s.n >= COLUMN_TILE and places:  # combining them in parts rounds nothing
        sizes |= {"EACH": EACH, "SUBGROUPS": THREADS // SUBGROUP}
        shared = _shared(f, kernel, types["R"], 2 * THREADS)
        f.template("scan_column_tiles", "scan.h", types, sizes, operands[0], *operands[2:], shared)
        return f.finish(blocks(s.rows, SUBGROUP), THREADS)
    if s.columns:
        f.template("scan_columns", "scan.h", types, sizes, *operands)
        return f.finish(blocks(s.rows * s.sections, THREADS), THREADS)
    sizes["STORES"] = all(_is_vectors(o, kernel.axis, s.width) for o in kernel.outputs)
    shared = _shared(f, kernel, types["R"], 2 * s.subgroups) if s.subgroups > 1 else "nullptr"
    f.template("scan_tiles", "scan.h", types, sizes, *operands, shared)
    return f.finish(blocks(s.rows * s.sections * s.subgroups * SUBGROUP, THREADS), THREADS)


def emit_scan_totals(kernel: ScanTotals, dialect: Dialect) -> Emission:
    """Return the function of a ``scan_totals`` kernel."""
    f, x = Function(kernel, dialect), kernel.inputs[0]
    s = scan_sizes(x, kernel.axis, kernel.section)
    types, sizes = _instance(f, kernel, s)
    if s.columns:
        f.template("scan_column_totals", "scan.h", types, sizes, f.pointer(0), f.pointer(~0))
        return f.finish(blocks(s.rows * s.sections, THREADS), THREADS)
    shared = _shared(f, kernel, types["R"], s.subgroups)
    f.template("scan_tile_totals", "scan.h", types, sizes, f.pointer(0), f.pointer(~0), shared)
    return f.finish(s.rows * s.sections, THREADS)


def _instance(f: Function, kernel: Scan | ScanTotals, s: ScanSizes) -> tuple[dict[str, str], dict[str, bool | int]]:
    """Return the types and constants that all templates of ``scan.h`` share."""
    x, op = kernel.inputs[0], kernel.op
    dtype = register_dtype(x.dtype, op, f.dialect)
    register = kind_of(dtype)
    start = accumulator(op, dtype)
    if op in SCAN_EXTREMES:
        register, start = f"Placed<{register}>", f"Placed<{register}>{{{start}, -1}}"
        sign = ">" if op == "argmax" else "<"
        step, merge = f"later_extreme(a, b, b.value {sign}= a.value)", f"extreme(a, b, b.value {sign} a.value)"
    else:
        step = combine(op, register, "a", "b")
        step = merge = step if dtypes.is_float(dtype) else wrap(step, dtype)
    f.include("scan.h")
    pair = f"{register} a, {register} b"
    functor = f.functor(
        "op", {}, start=(register, "", start), of=(register, pair, step), merge=(register, pair, merge)
    )  # fmt: skip
    total = ctype(total_dtype(x.dtype, op, f.dialect))
    types = {"T": ctype(x.dtype), "Total": total, "Out": ctype(dtype), "R": register, "Op": functor}
    types["X"] = f.rows("x", x, kernel.axis)
    sizes: dict[str, bool | int] = dict(
        PLACES=op in SCAN_EXTREMES,
        ROWS=s.rows, N=s.n, SECTIONS=s.sections, SECTION=s.section, THREADS=THREADS, SUBGROUPS=s.subgroups,
        WIDTH=s.width, VECTORS=s.vectors, LOADS=_is_vectors(x, kernel.axis, s.width),
    )  # fmt: skip
    return types, sizes


def _shared(f: Function, kernel: Scan | ScanTotals, register: str, count: int) -> str:
    """Declare an array of ``count`` running totals in shared memory. One with its position fills two words, or four."""
    words = 4 if dtypes.DTYPES[kernel.inputs[0].dtype].size == 8 else 2
    return f.array(register, "shared", count, 4 * words if kernel.op in SCAN_EXTREMES else 0)


def _is_vectors(op: Operand, axis: int, width: int) -> bool:
    """Whether rows along ``axis`` consist of aligned vectors of ``width`` neighbours."""
    others = (s for d, s in enumerate(op.strides) if d != axis and op.shape[d] > 1)
    return bool(op.shape) and op.strides[axis] == 1 and not any(v % width for v in (op.shape[axis], op.offset, *others))
