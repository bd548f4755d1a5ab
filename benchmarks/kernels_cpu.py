"""Speed of the CPU convolution kernels on every ResNet-50 shape, as a share of the FMA peak measured beside them.

    python benchmarks/kernels_cpu.py --dtype f16 --winograd [--batch N] [--threads N] [--warm] [--only TEXT]

It runs in short bursts, at real-time priority where that is permitted, so that other processes disturb it less. Weights
rotate through a region larger than the caches, as in a whole model, unless ``--warm``. All memory is in huge pages:
with 4 KB pages the address translation of cold weights costs up to a third of the speed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.targets.cpu.devices import device_at_hand
from npu_compiler.targets.cpu.winograd import CHANNELS, PANEL, winograd_tile

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "npu_compiler" / "targets" / "cpu" / "kernels"
FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden"
FLAGS += " -fno-exceptions -fno-rtti -fPIC -shared -w"
IR_DTYPE = {"float": "float32", "f16": "float16", "bf16": "bfloat16"}
REGION = 200 << 20  # bytes of weights to rotate through
BURST_S = 0.015
# input height = width, C, K, filter, stride, how often in ResNet-50
SHAPES = [
    (224, 3, 64, 7, 2, 1), (56, 64, 64, 3, 1, 3), (56, 128, 128, 3, 2, 1), (28, 128, 128, 3, 1, 3),
    (28, 256, 256, 3, 2, 1), (14, 256, 256, 3, 1, 5), (14, 512, 512, 3, 2, 1), (7, 512, 512, 3, 1, 2),
    (56, 64, 64, 1, 1, 1), (56, 64, 256, 1, 1, 4), (56, 256, 64, 1, 1, 2), (56, 256, 128, 1, 1, 1),
    (56, 256, 512, 1, 2, 1), (28, 128, 512, 1, 1, 4), (28, 512, 128, 1, 1, 3), (28, 512, 256, 1, 1, 1),
    (28, 512, 1024, 1, 2, 1), (14, 256, 1024, 1, 1, 6), (14, 1024, 256, 1, 1, 5), (14, 1024, 512, 1, 1, 1),
    (14, 1024, 2048, 1, 2, 1), (7, 512, 2048, 1, 1, 3), (7, 2048, 512, 1, 1, 2),
]  # fmt: skip

PRELUDE = """
#include "pool.cpp"
#include "winograd.h"
using namespace npu;
#define EXPORT extern "C" __attribute__((visibility("default")))
struct Job { const char *x, *w; char* y; const float* bias; int* counters; long reps, stride, region; };
template <class T> struct BiasRelu {
  T* out; const float* bias; long ld_out;
  template <class L> inline __attribute__((always_inline)) void operator()(vf acc, long row, long col, L lanes) const {
    st(out + row * ld_out + col, at_least(acc + ld(bias + col, lanes), vf{}), lanes);
  }
  template <class L> auto at(long col, L lanes) const {
    return [=, *this](vf acc, long row) { (*this)(acc, row, col, lanes); };
  }
  void prefetch(long row, long col) const { prefetch_panel(out + row * ld_out + col); }
};
EXPORT int start(int threads, long scratch) { return pool_start(threads, scratch); }
static void fma_loop(void*, Thread& th) {
  vf a[12] = {}, b = splat<vf>(1.0001f), c = splat<vf>(0.5f), sum = {};
  for (long i = 0; i < 400000; i++) {
#pragma GCC unroll 12
    for (int k = 0; k < 12; k++) mul_add(a[k], b, c);
  }
#pragma GCC unroll 12
  for (int k = 0; k < 12; k++) sum += a[k];
  th.scratch[0] = sum[0] > 0;
}
EXPORT void* memory(long bytes) { return pool_map(bytes); }
EXPORT double peak_flops() {
  uint64_t from = now_ns();
  pool_run(fma_loop, nullptr);
  return 400000.0 * 12 * VL * 2 * g_pool.n / (double)(now_ns() - from) * 1e9;
}
"""


@dataclass(frozen=True)
class Case:
    """One convolution of the batch; ``tile`` is its Winograd tile or 0."""

    index: int
    batch: int
    size: int
    c: int
    k: int
    r: int
    stride: int
    count: int
    dtype: str
    tile: int

    @property
    def out(self) -> int:
        """Height and width of the output."""
        return (self.size - 1) // self.stride + 1

    @property
    def flops(self) -> float:
        """Operations of the direct convolution."""
        return 2.0 * self.batch * self.out**2 * self.k * self.c * self.r**2

    @property
    def name(self) -> str:
        """The line's label: filter/stride, image size, channels, algorithm."""
        kind = f"F({self.tile}x{self.tile})" if self.tile else "direct"
        return f"{self.r}x{self.r}/{self.stride} {self.size:3} {self.c:4} -> {self.k:4} {kind}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        columns = -(-self.k // PANEL) * PANEL
        if self.tile:
            return (self.tile + 2) ** 2 * self.c * columns * 4
        return self.r**2 * (self.c + self.c % 2) * columns * (4 if self.dtype == "float" else 2)

    def source(self) -> str:
        """Return the C++ entry point of this case."""
        t, n = self.dtype, self.index
        dims = {"N": self.batch, "H": self.size, "W": self.size, "C": self.c, "K": self.k, "R": self.r, "S": self.r}
        dims |= {"stride_h": self.stride, "stride_w": self.stride, "pad_t": self.r // 2, "pad_l": self.r // 2}
        dims |= {"dil_h": 1, "dil_w": 1, "OH": self.out, "OW": self.out, "G": 1}
        fields = ", ".join(f"{k} = {v}" for k, v in dims.items())
        if self.tile:
            call = f"conv2d_winograd<D{n}, {self.tile}, {CHANNELS}>((const {t}*)j.x, (const float*)w, e, th, counters)"
            scratch = f"winograd_scratch_bytes<D{n}, {self.tile}>()"
        else:
            call = f"conv2d<D{n}>((const {t}*)j.x, (const {t}*)w, e, th, counters)"
            scratch = f"conv2d_scratch_bytes<D{n}, {t}, {t}>()"
        return f"""
struct D{n} {{ static constexpr long {fields}; }};
static void body{n}(void* p, Thread& th) {{
  Job& j = *(Job*)p;
  BiasRelu<{t}> e{{({t}*)j.y, j.bias, {self.k}}};
  for (long i = 0; i < j.reps; i++) {{
    const char* w = j.w + (j.region > j.stride ? i * j.stride % (j.region - j.stride) / 4096 * 4096 : 0);
    int* counters = j.counters + COUNTER_STRIDE * i;
    {call};
    barrier(th);
  }}
}}
EXPORT void run{n}(Job* job) {{ memset(job->counters, 0, 4 * COUNTER_STRIDE * job->reps); pool_run(body{n}, job); }}
EXPORT long scratch{n}() {{ return {scratch}; }}
"""


class Job(ctypes.Structure):
    """The argument of an entry point, as ``struct Job`` in ``PRELUDE``."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "w", "y", "bias", "counters")]
    _fields_ += [(name, ctypes.c_long) for name in ("reps", "stride", "region")]


def compile_cases(cases: list[Case]) -> ctypes.CDLL:
    """Compile all cases into one library and load it."""
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "bench.cpp"), Path(directory, "bench.so")
        source.write_text(PRELUDE + "".join(c.source() for c in cases))
        began = time.perf_counter()
        command = ["g++", *FLAGS.split(), "-iquote", str(KERNELS), str(source), "-o", str(library), "-lpthread"]
        subprocess.run(command, check=True)
        print(f"{len(cases)} kernels compiled in {time.perf_counter() - began:.1f} s")
        handle = ctypes.CDLL(str(library))
    handle.peak_flops.restype = ctypes.c_double
    handle.memory.restype = ctypes.c_void_p
    for c in cases:
        getattr(handle, f"scratch{c.index}").restype = ctypes.c_long
    return handle


def measure(handle: ctypes.CDLL, case: Case, buffers: list[int], cold: bool, bursts: int) -> tuple[list[float], float]:
    """Return the seconds per call of each burst, and the best FMA peak seen between the bursts."""
    run = getattr(handle, f"run{case.index}")

    def timed(reps: int) -> float:
        job = Job(*buffers, reps, case.weight_bytes, REGION if cold else 0)
        began = time.perf_counter()
        run(ctypes.byref(job))
        return (time.perf_counter() - began) / reps

    timed(1)
    reps = max(1, min(400, int(BURST_S / timed(1))))
    times, peak = [], 0.0
    for _ in range(bursts):
        time.sleep(0.004)
        peak = max(peak, handle.peak_flops())
        times.append(timed(reps))
    return times, peak


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=IR_DTYPE, default="float")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bursts", type=int, default=7)
    parser.add_argument("--winograd", action="store_true", help="use Winograd where the compiler would")
    parser.add_argument("--warm", action="store_true", help="the same weights every time")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    args = parser.parse_args()

    cases = []
    for i, (size, c, k, r, stride, count) in enumerate(SHAPES):
        out = (size - 1) // stride + 1
        eligible = args.winograd and r == 3 and stride == 1
        tile = winograd_tile(args.batch, out, out, c, k, IR_DTYPE[args.dtype], device_at_hand()) if eligible else 0
        case = Case(i, args.batch, size, c, k, r, stride, count, args.dtype, tile)
        if args.only in case.name:
            cases.append(case)
    handle = compile_cases(cases)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        print("no real-time priority: other processes disturb the figures")
    handle.start(args.threads, ctypes.c_long(max(getattr(handle, f"scratch{c.index}")() for c in cases)))
    activations = max(args.batch * max(c.size**2 * c.c, c.out**2 * c.k) for c in cases) * 4 + 4096
    sizes = (activations, REGION + (64 << 20), activations, 1 << 16, 4 * 64 * 401)
    buffers = [handle.memory(ctypes.c_long(size)) for size in sizes]

    total = flops = 0.0
    for case in cases:
        times, peak = measure(handle, case, buffers, not args.warm, args.bursts)
        median, best = statistics.median(times), min(times)
        peak *= 2 if args.dtype == "bf16" and not case.tile else 1  # vdpbf16ps does two products
        share, best_share = case.flops / median / peak, case.flops / best / peak
        print(f"{case.name:32} median {median * 1e3:8.4f} ms {case.flops / median * 1e-9:7.1f} GF/s", end=" ")
        print(f"{share:6.1%} of peak, best {best_share:6.1%}  x{case.count}")
        total += median * case.count
        flops += case.flops * case.count
    print(f"all convolutions: {total * 1e3:.2f} ms, {flops / total * 1e-9:.0f} GF/s")


if __name__ == "__main__":
    main()
