"""Schedules -> C++ -> one shared object. Equal kernels are emitted once; units compile in parallel.

A kernel is a function of its operand pointers only (``bufs[i]``: inputs, then outputs). Kernels that differ only in the
buffers they access therefore share one function; a table in the main unit binds operands to buffers for each call.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path

import numpy as np

from ...artifact.program import ABI_VERSION, LAYOUT_MARKER
from ...graph.graph import Node
from ...schedule.anchors import Gemm
from ...schedule.fold_cache_scales import fold_cache_scales_if
from ...schedule.fold_position_masks import FOLD_POSITION_MASKS
from ...schedule.horizontal_fusion import common_rewrites
from ...schedule.kernel import FusedLoops, Kernel, Loops, Operand, Scan, Sort
from ...schedule.pack_in_products import pack_in_products_if
from ...schedule.rewrite import ScheduleRewrite
from ...schedule.schedule import Schedule
from ...support import dtypes, env
from ...support.errors import Reason
from .. import Emitted, Selectable, entry_symbols
from .anchors import HEADERS, emit_anchor
from .compilers import compile_flags, find_compiler, required_features
from .devices import CONFIG, CPUCosts, CPUDevice, device_at_hand
from .limbs import limbs_are_faster
from .loops import ARGUMENTS, emit_loops, scratch_bytes
from .readers import reader_of
from .small_kernels import emit_small, small_scratch_bytes
from .toolchain import build_shared
from .winograd import filter_transform, winograd_tile

KERNELS = Path(__file__).with_name("kernels")

_HEADER = '#include "loops.h"\n#include "small.h"\n'
# A unit of its own: every program after the first has its object from the cache.
_RUNTIME = {"runtime.cpp": '#include "program.cpp"\n'}


class CPUTarget(Selectable[CPUDevice]):
    """The CPU code generator."""

    name = "cpu"
    config = CONFIG
    device_at_hand = staticmethod(device_at_hand)

    def compiler(self) -> str:
        compiler = find_compiler(self.device.machine, self.device.system)
        return f"{compiler.kind} {compiler.version}"

    def supports(self, kernel: Kernel) -> Reason | None:
        if isinstance(kernel, Loops | FusedLoops | Scan | Sort) or type(kernel) in HEADERS:
            return None
        return Reason("no_kernel", f"the CPU target has no {kernel.kind} kernel")

    def winograd(self, conv: Node) -> np.ndarray | None:
        a, (x, w) = conv.attrs, conv.inputs
        if (
            x.dtype in ("uint8", "float64")
            or w.shape[1:3] != (3, 3)
            or a["stride"] not in ((1, 1), (2, 2))
            or a["dilation"] != (1, 1)
            or a["groups"] != 1
        ):
            return None
        n, oh, ow, k = conv.out.shape
        stride = a["stride"][0]
        tile = winograd_tile(n, oh, ow, x.shape[3], k, x.dtype, self.device, stride)
        return filter_transform(tile, stride) if tile else None

    def in_limbs(self, conv: Node) -> bool:
        return limbs_are_faster(conv, self.device)

    @property
    def rewrites(self) -> tuple[ScheduleRewrite, ...]:
        return (
            *common_rewrites(self.config),
            fold_cache_scales_if(lambda k: True),
            FOLD_POSITION_MASKS,
            pack_in_products_if(self._packs),
        )

    def _packs(self, dtype: str) -> bool:
        """Whether the register tile multiplies panels of ``dtype``, as they are: not with tiles of AMX, and not if
        pairs become floats because their dot product is slow. Small float32 matrices take longer in limbs."""
        if "amx_tile" in self.device.features:
            return dtype in ("float32", "float64")
        return dtypes.is_float(dtype) and not (dtype == "bfloat16" and self.device.flags)

    def emit(self, schedules: list[Schedule], *, build: bool = True) -> Emitted:
        device, units = self.device, _Units(self.device.costs)
        calls = {s.name: [units.add(k) for k in s.kernels] for s in schedules}
        symbols = entry_symbols(schedules)
        sources = units.sources(env.compile_jobs())
        sources |= _RUNTIME
        sources["main.cpp"] = _main_unit(schedules, calls, symbols, units)
        result = Emitted(sources, b"", (), symbols)
        if build:
            march, machine, system = device.march, device.machine, device.system
            result.binary = build_shared(
                sources, KERNELS, march=march, machine=machine, system=system, more_flags=device.flags
            )
            result.requires = tuple(sorted(required_features(march, machine=machine, system=system)))
            flags = [*compile_flags(march, machine=machine, system=system), *device.flags]
            result.build = {"compiler": self.compiler(), "flags": " ".join(flags)}
        return result


class _Units:
    """Kernel functions by text; :meth:`add` returns the name of the function that computes a kernel."""

    def __init__(self, costs: CPUCosts) -> None:
        self.costs = costs
        self.names: dict[str, str] = {}  # text with a placeholder name -> name
        self.weight: dict[str, int] = {}  # text -> its relative compile time
        self.emitted: dict[Hashable, tuple[str, int]] = {}  # structural key -> text and relative compile time
        self.headers: dict[str, str] = {}  # text -> the header of its micro-kernel, or ''
        self.formats: dict[str, str] = {}  # text -> the weight format that it reads, or ''

    def add(self, kernel: Kernel) -> str:
        """Return the name of the function that computes ``kernel``; emit it if it is new."""
        key = kernel.structural_key(lambda o: o.offset)
        if key not in self.emitted:
            self.emitted[key] = _emit(kernel, self.costs)
        text, weight = self.emitted[key]
        if text not in self.names:
            label = re.sub(r"\W", "_", kernel.label)
            self.names[text] = f"{label}_{len(self.names)}"
            self.weight[text] = weight
            self.headers[text] = HEADERS.get(type(kernel), "")
            self.formats[text] = kernel.weight.format if isinstance(kernel, Gemm) else ""
        return self.names[text]

    def sources(self, count: int) -> dict[str, str]:
        """The kernels spread over ``count`` translation units of about equal compile time, anchors first."""
        bins: list[list[str]] = [[] for _ in range(count)]
        load = [0] * count
        for text in sorted(self.names, key=lambda t: -self.weight[t]):
            at = load.index(min(load))
            bins[at].append(text)
            load[at] += self.weight[text]
        out = {}
        for i, texts in enumerate(b for b in bins if b):
            headers = sorted({self.headers[t] for t in texts} - {""})
            head = _HEADER + "".join(f'#include "{h}"\n' for h in headers)
            head += "".join(reader_of(f).text for f in sorted({self.formats[t] for t in texts} - {""}))
            body = "\n".join(t.replace("@NAME@", self.names[t]) for t in sorted(texts, key=lambda t: self.names[t]))
            out[f"kernels_{i}.cpp"] = f"{head}using namespace npu;\n\n{body}"
        return out


def pointer(kernel: Kernel, op: Operand, output: bool = False) -> str:
    """Return the C++ expression of the pointer to an operand, from the table ``bufs``."""
    at = len(kernel.inputs) + kernel.outputs.index(op) if output else kernel.inputs.index(op)
    ctype = dtypes.DTYPES[op.dtype].ctype
    return f"(({'' if output else 'const '}{ctype}*)bufs[{at}])"


def _emit(kernel: Kernel, costs: CPUCosts) -> tuple[str, int]:
    """Return the text of a kernel's function under the name @NAME@, and its relative compile time."""

    def place(op: Operand) -> str:
        return pointer(kernel, op, output=any(op is o for o in kernel.outputs))

    if isinstance(kernel, FusedLoops):
        return _emit_fused(kernel, costs), len(kernel.parts)
    if isinstance(kernel, Loops):
        text = emit_loops(kernel, "@NAME@", place, costs).replace("static NPU_NOINLINE int", "int", 1)
        return f"{text}extern const long @NAME@_scratch = {scratch_bytes(kernel, costs)};\n", 1
    if isinstance(kernel, Scan | Sort):
        text = emit_small(kernel, "@NAME@", place, costs).replace("static NPU_NOINLINE int", "int", 1)
        return f"{text}extern const long @NAME@_scratch = {small_scratch_bytes(kernel)};\n", 2
    return f"// kind {kernel.kind}\n" + emit_anchor(kernel, "@NAME@", place, costs), 4


def _emit_fused(kernel: FusedLoops, costs: CPUCosts) -> str:
    """Return a function that calls one function per part, each with its own operands and its own chunk counter."""
    text, calls, first = "", [], 0
    for n, part in enumerate(kernel.parts):

        def place(op: Operand, part: Kernel = part) -> str:
            return pointer(part, op, output=any(op is o for o in part.outputs))

        text += emit_loops(part, f"@NAME@_{n}", place, costs, own_chunks=False)
        calls.append(f"@NAME@_{n}(bufs + {first}, arena, th, counter + {n})")
        first += len(part.operands)
    scratch = max(scratch_bytes(part, costs, own_chunks=False) for part in kernel.parts)
    return (
        f"{text}int @NAME@({ARGUMENTS}) {{\n  return {' | '.join(calls)};\n}}\n"
        f"extern const long @NAME@_scratch = {scratch};\n"
    )


def _main_unit(schedules: list[Schedule], calls: dict[str, list[str]], symbols: dict[str, str], units: _Units) -> str:
    """Return the unit with the tables of ``program.h`` and the functions that the runtime calls."""
    functions = sorted(set(units.names.values()))
    parts = ['#include "program.h"', "using namespace npu;"]
    parts += [f"int {f}(void* const*, char*, Thread&, int*); extern const long {f}_scratch;" for f in functions]
    gemms = {f for s in schedules for k, f in zip(s.kernels, calls[s.name], strict=True) if isinstance(k, Gemm)}
    parts += [f"void {f}_prefetch(const void*, const Thread&);" for f in sorted(gemms)]
    for s in schedules:
        parts.append(_entry(s, calls[s.name], symbols[s.name], units.costs))
    scratch = "".join(f"&{f}_scratch, " for f in functions)
    parts.append(
        _EXPORTS.replace("@SCRATCH@", scratch).replace("@ABI@", str(ABI_VERSION)).replace("@MARKER@", LAYOUT_MARKER)
    )
    return "\n".join(parts)


def _is_short(s: Schedule, costs: CPUCosts) -> bool:
    """Whether the calling thread should run the whole entry point, because it is shorter than a thread wake-up."""
    us = sum(k.flops / costs.flops_per_us + (k.bytes_read + k.bytes_written) / costs.bytes_per_us for k in s.kernels)
    return us <= costs.wake_us


def _entry(s: Schedule, names: list[str], symbol: str, costs: CPUCosts) -> str:
    refs: list[str] = []
    rows: list[str] = []
    groups = [k.barrier_group for k in s.kernels] + [-1]
    for i, (kernel, name) in enumerate(zip(s.kernels, names, strict=True)):
        operands = kernel.operands
        last = "true" if groups[i + 1] != kernel.barrier_group else "false"
        rhs = kernel.rhs if isinstance(kernel, Gemm) else 1
        prefetch = f"{name}_prefetch" if isinstance(kernel, Gemm) else "nullptr"
        rows.append(f"{{{name}, {len(refs)}, {len(operands)}, {last}, {prefetch}, {rhs}}}")
        for op in operands:
            byte = op.offset * dtypes.DTYPES[op.dtype].size
            arena = op.buffer.kind == "arena"
            refs.append(f"{{{-1 if arena else op.buffer.id}, {op.buffer.offset + byte if arena else byte}L}}")
    count = len(rows)
    most = max((len(k.operands) for k in s.kernels), default=0)
    alone = "true" if _is_short(s, costs) else "false"
    return f"""
static const Ref {symbol}_refs[] = {{{", ".join(refs) or "{0, 0}"}}};
static const Call {symbol}_calls[] = {{{", ".join(rows) or "{nullptr, 0, 0, true, nullptr, 0}"}}};
alignas(64) static int {symbol}_counters[{max(count, 1)} * COUNTER_STRIDE];
static const Entry {symbol}_entry = {{{symbol}_refs, {symbol}_calls, {symbol}_counters, {count}, {most}, {alone}}};
extern "C" __attribute__((visibility("default"))) int {symbol}(void* const* buffers, char* arena, double* times) {{
  return run({symbol}_entry, buffers, arena, times);
}}
"""


_EXPORTS = """
static const long* const scratch[] = {@SCRATCH@nullptr};

// Saving the program overwrites this with a digest of its metadata. The loader refuses a binary whose metadata differs.
extern "C" __attribute__((visibility("default"), used)) const char npu_layout[65] = "@MARKER@";
extern "C" __attribute__((visibility("default"))) int npu_abi(void) { return @ABI@; }
extern "C" __attribute__((visibility("default"))) long npu_scratch_bytes(void) {
  long bytes = 0;
  for (int i = 0; scratch[i]; i++)
    if (*scratch[i] > bytes) bytes = *scratch[i];
  return bytes;
}
extern "C" __attribute__((visibility("default"))) int npu_start(int threads) {
  return pool_start(threads, npu_scratch_bytes());
}
extern "C" __attribute__((visibility("default"))) void npu_stop(void) { pool_stop(); }
"""

TARGET = CPUTarget()
