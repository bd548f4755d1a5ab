"""C++ of the ``scan`` and ``sort`` kernels: a loop over rows that calls the row functions of ``small.h``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...schedule.kernel import Operand, Scan, Sort
from ...support import dtypes
from .devices import MEASURED, CPUCosts
from .plan import MAX_CHUNKS

SCANS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "logaddexp": "LogAddExp"}
SCANS |= {"argmax": "Max", "argmin": "Min"}  # with positions
TILE_ROWS = 4  # fewer dense rows are scanned one after the other
LANE_BLOCK = 64  # rows that are scanned side by side and are not divided among threads


def emit_small(kernel: Scan | Sort, name: str, pointer: Callable[[Operand], str], costs: CPUCosts = MEASURED) -> str:
    """Return the C++ function ``name`` of a ``scan`` or ``sort`` kernel (needs ``small.h``). Parameters, and the
    function's signature, are those of :func:`npu_compiler.targets.cpu.loops.emit_loops`."""
    operands = [kernel.inputs[0], *kernel.outputs]
    axis = kernel.axis
    shape = kernel.inputs[0].shape
    names = ["a0", "b0", "b1"][: len(operands)]
    lines = [
        f"  {'const ' if n == 'a0' else ''}auto* const {n} = {pointer(op)};"
        for n, op in zip(names, operands, strict=True)
    ]
    beside = _rows_beside(kernel)
    rows = [d for d in range(len(shape)) if d not in (axis, beside)]
    head = f"static NPU_NOINLINE int {name}(void* const* bufs, char* arena, npu::Thread& th, int* counter) {{"
    intro = [head, "  using namespace npu;", "  (void)bufs, (void)arena, (void)th, (void)counter;"]
    if math.prod(kernel.outputs[0].shape) == 0:
        return "\n".join([*intro, "  return 0;", "}\n"])
    n = shape[axis] if shape else 1
    blocks = 1 if beside is None else -(-shape[beside] // LANE_BLOCK)
    count = math.prod(shape[d] for d in rows) * blocks
    if isinstance(kernel, Scan):
        row_ns = n * 2.0 * (min(shape[beside], LANE_BLOCK) / 8 if beside is not None else 1)
    else:
        row_ns = n * (2.0 + 2.0 * math.log2(n + 1))
    per_chunk = max(1, -(-count // MAX_CHUNKS), min(count, int(costs.chunk / row_ns)))
    lines += [
        f"  for (long c; (c = next_chunk(th, counter)) < {-(-count // per_chunk)};)",
        f"    for (long q = c * {per_chunk}; q < scalar_min((c + 1) * {per_chunk}, {count}L); q++) {{",
        f"      const long r = q / {blocks};" if blocks > 1 else "      const long r = q;",
        "      (void)r;",
    ]
    places = [f"{n} + {_offset(op, rows, shape)}" for n, op in zip(names, operands, strict=True)]
    steps = [op.strides[axis] if shape else 0 for op in operands]
    if isinstance(kernel, Sort):
        row = _sort(kernel, places, steps, n)
    elif beside is None:
        row = [_scan(kernel, "row", places, steps, str(n))]
    else:
        next_rows = [op.strides[beside] for op in operands]
        across = [f"{p} + i * {s}" if s != 1 else f"{p} + i" for p, s in zip(places, next_rows, strict=True)]
        kind, steps = ("lanes", steps) if set(next_rows) == {1} else ("tiles", next_rows)
        loop = f"lanes<1, 0, {shape[beside]}>("
        if blocks > 1:
            lines.append(f"      const long first = q % {blocks} * {LANE_BLOCK};")
            loop = f"lanes<1>(first, scalar_min(first + {LANE_BLOCK}, {shape[beside]}L), "
        row = [
            loop + "[&](long i, auto L, int) NPU_BODY {",
            "  " + _scan(kernel, kind, across, steps, f"{n}, L"),
            "});",
        ]
    lines += ["      " + line for line in row]
    return "\n".join([*intro, *lines, "    }", "  return 0;", "}\n"])


def small_scratch_bytes(kernel: Scan | Sort) -> int:
    """Return the bytes of ``th.scratch`` that a ``scan`` or ``sort`` kernel uses on each thread."""
    if isinstance(kernel, Scan):
        return 0
    shape = kernel.inputs[0].shape
    entry = 16 if dtypes.DTYPES[kernel.inputs[0].dtype].size == 8 else 8
    return 2 * entry * (shape[kernel.axis] if shape else 1)


def _offset(op: Operand, rows: Sequence[int], shape: Sequence[int]) -> str:
    """Return the element offset of row ``r``, the flat position over ``rows``."""
    parts, step = [], 1
    for d in reversed(rows):
        if op.strides[d] and shape[d] > 1:
            at = f"r / {step}" if step > 1 else "r"
            parts.append(f"{at} % {shape[d]} * {op.strides[d]}")
        step *= shape[d]
    return " + ".join(reversed(parts)) or "0"


def _rows_beside(kernel: Scan | Sort) -> int | None:
    """Return the dim whose rows are scanned side by side, in the lanes of vectors, or None. Either all operands are
    dense along it, or rows are dense and tiles of them are transposed. Sums of doubles gain nothing from tiles, which
    do not fit into registers. Extremes with positions are faster row by row."""
    if not isinstance(kernel, Scan):
        return None
    x, operands = kernel.inputs[0], [kernel.inputs[0], *kernel.outputs]
    shape, axis, last = x.shape, kernel.axis, len(x.shape) - 1
    if axis != last and all(op.strides[last] == 1 for op in operands):
        return last
    most = 8 if kernel.op == "logaddexp" else 4
    dense = bool(shape) and all(op.strides[axis] == 1 for op in operands)
    longest = max((d for d in range(len(shape)) if d != axis), key=lambda d: shape[d], default=None)
    if not dense or longest is None or shape[longest] < TILE_ROWS or len(operands) > 2:
        return None
    return longest if dtypes.DTYPES[x.dtype].size <= most >= dtypes.DTYPES[kernel.outputs[0].dtype].size else None


def _scan(kernel: Scan, rows: str, places: list[str], steps: list[int], rest: str) -> str:
    """Return the call of ``scan_row``, ``scan_lanes`` or ``scan_tiles``; two results have a function of their own."""
    at = "_at" if len(kernel.outputs) > 1 else ""
    pairs = ", ".join(f"{p}, {s}" for p, s in zip(places, steps, strict=True))
    return f"scan_{rows}{at}<{SCANS[kernel.op]}>({pairs}, {rest});"


def _sort(kernel: Sort, places: list[str], steps: list[int], n: int) -> list[str]:
    descending = "true" if kernel.descending else "false"
    pairs = ", ".join(f"{p}, {s}" for p, s in zip(places, steps, strict=True))
    return [f"sort_row<{descending}>({pairs}, {n}, {kernel.k}, th.scratch);"]
