"""Compiles hand-made kernels into one shared object, runs them on numpy buffers; numpy's answer beside it."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npu_compiler.schedule.buffers import contiguous_strides
from npu_compiler.schedule.kernel import Buffer, Kernel, Operand
from npu_compiler.support import dtypes
from npu_compiler.targets.cpu import toolchain
from npu_compiler.targets.cpu.loops import emit_loops, scratch_bytes

KERNELS = Path(toolchain.__file__).parent / "kernels"
DRIVER = """
#define EXPORT extern "C" __attribute__((visibility("default")))
typedef int (*KernelFn)(void* const*, char*, npu::Thread&, int*);
static const KernelFn table[] = {%(names)s};
struct Launch { int kernel, reps; void* const* bufs; int failed; int counter[256 * npu::COUNTER_STRIDE]; };
static void launch(void* p, npu::Thread& th) {
  Launch& l = *(Launch*)p;
  for (int i = 0; i < l.reps; i++) {
    if (table[l.kernel](l.bufs, nullptr, th, &l.counter[i %% 256 * npu::COUNTER_STRIDE])) l.failed = 1;
    npu::barrier(th);
    int* used = &l.counter[(i + 128) %% 256 * npu::COUNTER_STRIDE];
    for (int k = 0; th.tid == 0 && k < npu::COUNTER_STRIDE; k++) used[k] = 0;
  }
}
EXPORT int run_%(unit)s(int kernel, void* const* bufs, int threads, int reps) {
  static Launch l;
  l = Launch{kernel, reps, bufs, 0, {}};
  if (!npu::pool_start(threads, %(scratch)d)) return -1;
  npu::pool_run(launch, &l);
  npu::pool_stop();
  return l.failed;
}
EXPORT uint64_t time_%(unit)s(int kernel, void* const* bufs, int threads, int reps) {
  static Launch l;
  l = Launch{kernel, reps, bufs, 0, {}};
  if (!npu::pool_start(threads, %(scratch)d)) return 0;
  npu::pool_run(launch, &l);
  l = Launch{kernel, reps, bufs, 0, {}};
  uint64_t start = npu::now_ns();
  npu::pool_run(launch, &l);
  uint64_t end = npu::now_ns();
  npu::pool_stop();
  return end - start;
}
"""


_numbers = itertools.count()


def operand(
    shape: Sequence[int],
    dtype: str = "float32",
    strides: Sequence[int] | None = None,
    offset: int = 0,
    extent: int | None = None,
) -> Operand:
    """An operand in a buffer of its own, just large enough for it (or ``extent`` elements)."""
    strides = contiguous_strides(shape) if strides is None else tuple(strides)
    if extent is None:
        extent = (
            offset + 1 + sum((n - 1) * max(s, 0) for n, s in zip(shape, strides, strict=True))
            if math.prod(shape)
            else 0
        )
    number = next(_numbers)
    return Operand(Buffer(number, "arena", dtype, (extent,), f"x{number}"), tuple(shape), strides, offset)


@dataclass
class Compiled:
    """Kernels in one shared object; ``run`` executes number ``k`` on the arrays of its buffers (by buffer id)."""

    library: ctypes.CDLL
    kernels: list[Kernel]
    per_unit: int

    def _pointers(self, k: int, buffers: dict[int, np.ndarray]) -> ctypes.Array:
        ids = buffer_ids(self.kernels[k])
        return (ctypes.c_void_p * max(1, len(ids)))(*(buffers[i].ctypes.data for i in ids))

    def run(self, k: int, buffers: dict[int, np.ndarray], threads: int = 1) -> int:
        call = getattr(self.library, f"run_u{k // self.per_unit}")
        return call(k % self.per_unit, self._pointers(k, buffers), threads, 1)

    def seconds(
        self, k: int, buffers: dict[int, np.ndarray], threads: int = 1, reps: int = 20, tries: int = 7
    ) -> float:
        """Best time of one launch."""
        call = getattr(self.library, f"time_u{k // self.per_unit}")
        call.restype = ctypes.c_uint64
        return (
            min(call(k % self.per_unit, self._pointers(k, buffers), threads, reps) for _ in range(tries)) / reps * 1e-9
        )


def buffer_ids(kernel: Kernel) -> list[int]:
    return list(dict.fromkeys(o.buffer.id for o in (*kernel.inputs, *kernel.outputs)))


def source(kernel: Kernel, name: str) -> str:
    ids = buffer_ids(kernel)
    outputs = {id(o) for o in kernel.outputs}

    def pointer(o: Operand) -> str:
        const = "" if id(o) in outputs else "const "
        return f"(({const}{ctype(o.dtype)}*)bufs[{ids.index(o.buffer.id)}] + {o.offset})"

    return emit_loops(kernel, name, pointer)


def ctype(dtype: str) -> str:
    return dtypes.DTYPES[dtype].ctype


def compile_kernels(kernels: list[Kernel], per_unit: int = 40, march: str = "native") -> Compiled:
    units = {"threads": '#include "pool.cpp"\n'}
    for u, start in enumerate(range(0, len(kernels), per_unit)):
        part = kernels[start : start + per_unit]
        texts = [source(k, f"k{i}") for i, k in enumerate(part)]
        scratch = max(scratch_bytes(k) for k in part)
        driver = DRIVER % {"names": ", ".join(f"k{i}" for i in range(len(part))), "unit": f"u{u}", "scratch": scratch}
        prelude = '#include "loops.h"\n#include "small.h"\n'  # in the order of real programs
        units[f"u{u}"] = prelude + "\n".join(texts) + driver
    with tempfile.NamedTemporaryFile(suffix=".so") as f:
        f.write(toolchain.build_shared(units, KERNELS, march=march))
        f.flush()
        return Compiled(ctypes.CDLL(f.name), kernels, per_unit)


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    dt = dtypes.numpy_dtype(dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtypes.is_float(dtype):
        return rng.standard_normal(shape).astype(dt)
    low = 0 if dtype == "uint8" else -20
    return rng.integers(low, 21, shape).astype(dt)


def fenced(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy that touches an unmapped page at its end (or start): reading past it ends the process."""
    page = mmap.PAGESIZE
    body = -(-max(array.nbytes, 1) // page) * page
    area = mmap.mmap(-1, body + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for edge in (start, start + page + body):
        if libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = page + (body - array.nbytes if at_end else 0)
    copy = np.frombuffer(area, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy
