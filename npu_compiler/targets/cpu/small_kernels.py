"""C++ of the ``scan`` and ``sort`` kernels: a loop over rows that calls the row functions of ``small.h``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...schedule.kernel import Operand, Scan, Sort
from ...support import dtypes
from .devices import MEASURED, CPUCosts
from .plan import MAX_CHUNKS

SCANS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "logaddexp": "LogAddExp"}
TILE_ROWS = 4  # fewer dense rows are scanned one after the other


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
    rows = [d for d in range(len(shape)) if d != axis]
    last = len(shape) - 1
    lanes = isinstance(kernel, Scan) and axis != last and all(op.strides[last] == 1 for op in operands)
    beside = _tile_dim(kernel, axis) if isinstance(kernel, Scan) and not lanes else None
    if lanes:
        rows.remove(last)
    if beside is not None:
        rows.remove(beside)
    head = f"static NPU_NOINLINE int {name}(void* const* bufs, char* arena, npu::Thread& th, int* counter) {{"
    intro = [head, "  using namespace npu;", "  (void)bufs, (void)arena, (void)th, (void)counter;"]
    if math.prod(kernel.outputs[0].shape) == 0:
        return "\n".join([*intro, "  return 0;", "}\n"])
    count = math.prod(shape[d] for d in rows)
    n = shape[axis] if shape else 1
    if isinstance(kernel, Scan):
        row_ns = n * 2.0 * (shape[last] / 8 if lanes else shape[beside] / 8 if beside is not None else 1)
    else:
        row_ns = n * (2.0 + 2.0 * math.log2(n + 1))
    per_chunk = max(1, -(-count // MAX_CHUNKS), min(count, int(costs.chunk / row_ns)))
    lines += [
        f"  for (long c; (c = next_chunk(th, counter)) < {-(-count // per_chunk)};)",
        f"    for (long r = c * {per_chunk}; r < scalar_min((c + 1) * {per_chunk}, {count}L); r++) {{",
    ]
    places = [f"{n} + {_offset(op, rows, shape)}" for n, op in zip(names, operands, strict=True)]
    steps = [op.strides[axis] if shape else 0 for op in operands]
    if isinstance(kernel, Scan) and beside is not None:
        row = _scan_tiles(kernel, places, [op.strides[beside] for op in operands], shape[beside], n)
    else:
        row = _scan(kernel, places, steps, n, lanes) if isinstance(kernel, Scan) else _sort(kernel, places, steps, n)
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


def _tile_dim(kernel: Scan, axis: int) -> int | None:
    """Return the dim whose rows are scanned side by side, if rows along ``axis`` are dense; otherwise None. Sums of
    doubles gain nothing from it: a tile of them does not fit into the registers."""
    operands = (kernel.inputs[0], kernel.outputs[0])
    shape, most = operands[0].shape, 8 if kernel.op == "logaddexp" else 4
    dense = bool(shape) and all(op.strides[axis] == 1 and dtypes.DTYPES[op.dtype].size <= most for op in operands)
    dims = [d for d in range(len(shape)) if d != axis]
    longest = max(dims, key=lambda d: shape[d], default=None)
    return longest if dense and longest is not None and shape[longest] >= TILE_ROWS else None


def _scan_tiles(kernel: Scan, places: list[str], steps: list[int], rows: int, n: int) -> list[str]:
    first, second = (f"{p} + i * {s}, {s}" for p, s in zip(places, steps, strict=True))
    return [
        f"lanes<1, 0, {rows}>([&](long i, auto L, int) NPU_BODY {{",
        f"  scan_tiles<{SCANS[kernel.op]}>({first}, {second}, {n}, L);",
        "});",
    ]


def _scan(kernel: Scan, places: list[str], steps: list[int], n: int, lanes: bool) -> list[str]:
    op = SCANS[kernel.op]
    if not lanes:
        return [f"scan_row<{op}>({places[0]}, {steps[0]}, {places[1]}, {steps[1]}, {n});"]
    return [
        f"lanes<1, 0, {kernel.inputs[0].shape[-1]}>([&](long i, auto L, int) NPU_BODY {{",
        f"  scan_lanes<{op}>({places[0]} + i, {steps[0]}, {places[1]} + i, {steps[1]}, {n}, L);",
        "});",
    ]


def _sort(kernel: Sort, places: list[str], steps: list[int], n: int) -> list[str]:
    descending = "true" if kernel.descending else "false"
    pairs = ", ".join(f"{p}, {s}" for p, s in zip(places, steps, strict=True))
    return [f"sort_row<{descending}>({pairs}, {n}, {kernel.k}, th.scratch);"]
