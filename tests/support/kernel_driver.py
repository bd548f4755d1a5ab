"""Compiles small C++ drivers around the CPU kernels and calls them through ctypes, as a compiled program does."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from npu_compiler.support import env
from npu_compiler.support.cache import make_folders
from npu_compiler.targets.cpu.compilers import _identity
from npu_compiler.targets.cpu.host import host_cpu
from npu_compiler.targets.cpu.toolchain import _Headers

from .amx_model import HAS_AMX, MODEL

KERNELS = Path(__file__).parents[2] / "npu_compiler" / "targets" / "cpu" / "kernels"
FLAGS = (
    "-std=c++17 -Og -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden -fno-exceptions -fno-rtti"
    " -fPIC -w"
).split()
# Every code path this machine can run: its own, AVX2, and the portable one (baseline x86-64: 4 lanes, no F16C).
ARCHS = ["native", "haswell", "x86-64"] if platform.machine() == "x86_64" else ["native"]
# More archs for build(): "native" with the model of AMX, or with the kernels for CPUs with a slow `vdpbf16ps`.
AMX, SLOW_DOT = "amx", "slow-dot"
NUMPY = {
    "float": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
    "bool8": np.bool_, "double": np.float64,
}  # fmt: skip
CXX = shutil.which("g++")

PRELUDE = """
#include "attention.h"
#include "conv.h"
#include "depthwise.h"
#include "pool.cpp"
#include "transpose.h"
#include "winograd.h"
using namespace npu;
#define EXPORT extern "C" __attribute__((visibility("default")))
struct Args {
  const void *x, *w, *extra; float* out; const float *bias, *residual;
  int counters[64]; long keys, first;
};
// bias, then a residual of the same layout: exercises row, column and lane arguments.
struct Store {
  const Args& a; long ld_out;
  template <class L> inline __attribute__((always_inline)) void operator()(vf acc, long row, long col, L lanes) const {
    acc += ld(a.bias + col, lanes) + ld(a.residual + row * ld_out + col, lanes);
    st(a.out + row * ld_out + col, acc, lanes);
  }
  template <class L> inline __attribute__((always_inline)) void operator()(vd acc, long row, long col, L lanes) const {
    acc += cvt<vd>(ld(a.bias + col, lanes)) + cvt<vd>(ld(a.residual + row * ld_out + col, lanes));
    st((double*)a.out + row * ld_out + col, acc, lanes);
  }
  template <class L> auto at(long col, L lanes) const {
    return [=, *this](auto acc, long row) { (*this)(acc, row, col, lanes); };
  }
  void prefetch(long row, long col) const { prefetch_panel(a.residual + row * ld_out + col); }
};
EXPORT int start(int threads, long scratch) { return pool_start(threads, scratch); }
EXPORT void stop() { pool_stop(); }
"""


@dataclass(frozen=True)
class Library:
    """A compiled driver: calls ``name(args)`` on the pool."""

    handle: ctypes.CDLL

    def start(self, threads: int) -> None:
        assert self.handle.start(threads, ctypes.c_long(self.handle.scratch())) == threads

    def run(
        self,
        name: str,
        *arrays: np.ndarray | None,
        out: np.ndarray,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        keys: int = 0,
        first: int = 0,
    ) -> np.ndarray:
        pointers = [None if a is None else a.ctypes.data for a in (*arrays, *[None] * (3 - len(arrays)))]
        extra = [None if a is None else a.ctypes.data for a in (out, bias, residual)]
        args = (ctypes.c_void_p * 40)(*pointers, *extra)
        args[38], args[39] = keys or None, first or None
        getattr(self.handle, name)(args)
        return out


@lru_cache(maxsize=len(ARCHS) + 2)
def _prelude(arch: str) -> Path:
    """The folder of a precompiled PRELUDE, of which g++ would read 40,000 lines again for every driver. The processes
    of a run share it."""
    text = f'#include "{MODEL}"\n{PRELUDE}' if arch == AMX else PRELUDE
    texts = text, MODEL.read_text(), _Headers(KERNELS).digest(text)
    made_of = hashlib.sha256(repr((texts, FLAGS, _march(arch), _identity([CXX or "g++"]), host_cpu())).encode())
    folder = env.cache_dir() / "precompiled" / f"driver-{made_of.hexdigest()[:16]}"
    if not folder.exists():
        make_folders(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            part = Path(made, "part")
            part.mkdir()
            (part / "prelude.h").write_text(text)
            _compile(arch, "-x", "c++-header", part / "prelude.h", "-o", part / "prelude.h.gch")
            with contextlib.suppress(OSError):  # another process was faster
                part.rename(folder)
    return folder


def _march(arch: str) -> list[str]:
    flags = [f"-march={arch if arch in ARCHS else 'native'}"]
    return [*flags, "-DNPU_SLOW_BF16_DOT=1"] if arch == SLOW_DOT else flags


def _compile(arch: str, *arguments: str | Path) -> None:
    subprocess.run([CXX or "g++", *FLAGS, *_march(arch), "-iquote", KERNELS, *arguments], check=True)


def build(directory: Path, arch: str, bodies: list[str], scratch: list[str]) -> Library:
    """Compiles the cases into one shared object."""
    text = ['#include "prelude.h"', *bodies, "EXPORT long scratch() { long most = 0;"]
    text += [f"  most = max_of(most, {s});" for s in scratch] + ["  return most; }"]
    source, library = directory / "driver.cpp", directory / "driver.so"
    source.write_text("\n".join(text))
    _compile(arch, "-iquote", _prelude(arch), source, "-shared", "-o", library, "-lpthread")
    return Library(ctypes.CDLL(str(library)))


def struct(name: str, base: str = "", **values: int | float | bool) -> str:
    def text(v: int | float | bool) -> str:
        return str(v).lower() if isinstance(v, bool) else f"{v!r}f" if isinstance(v, float) else str(v)

    def kind(v: int | float | bool) -> str:
        return "bool" if isinstance(v, bool) else "float" if isinstance(v, float) else "long"

    fields = " ".join(f"static constexpr {kind(v)} {k} = {text(v)};" for k, v in values.items())
    return f"struct {name}{f' : {base}' if base else ''} {{ {fields} }};"


def entry(name: str, call: str, alone: bool = False) -> str:
    run = f"pool_run(body_{name}, p, {str(alone).lower()});"
    return (
        f"static void body_{name}(void* p, Thread& th) {{ Args& a = *(Args*)p; {call} }}\n"
        f"EXPORT void {name}(void* p) {{ memset(((Args*)p)->counters, 0, 256); {run} }}"
    )


def pack(w: np.ndarray, dtype: str) -> np.ndarray:
    """[..., K, N] -> panels [..., ceil(N/32), K, 32], or [..., ceil(N/32), ceil(K/2), 32, 2] for bf16."""
    *lead, k, n = w.shape
    pair = 2 if dtype == "bf16" else 1
    full = np.zeros((*lead, -(-k // pair) * pair, -(-n // 32) * 32), w.dtype)
    full[..., :k, :n] = w
    panels = full.reshape(*lead, full.shape[-2] // pair, pair, full.shape[-1] // 32, 32)
    d = len(lead)
    return np.ascontiguousarray(panels.transpose(*range(d), d + 2, d, d + 3, d + 1))


def pack_conv(w: np.ndarray, groups: int, dtype: str) -> np.ndarray:
    """[K, R, S, C/G] -> for each group [ceil(K/G/32)][R][S][C/G][32], or [..][ceil(C/G/2)][32][2] for bf16."""
    k, r, s, c = w.shape
    per_tap = pack(w.reshape(groups, k // groups, r, s, c).transpose(0, 2, 3, 4, 1), dtype)  # [G, R, S, panels, ...]
    return np.ascontiguousarray(np.moveaxis(per_tap, 3, 1))


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def room(arch: str, *operands: str) -> int:
    """The factor of the error that ``check`` allows: products of float16 on AMX leave one of four parts out."""
    tiles = arch == AMX or (arch == "native" and HAS_AMX)
    return 2 if tiles and set(operands) == {"f16"} else 1


def check(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> None:
    """Sums in float32, or in float64 if the result is: the error stays within a few units in the last place of the sum
    of magnitudes."""
    error, unit = np.abs(got.astype(np.float64) - want), 16 * np.finfo(got.dtype).eps
    assert np.isfinite(got).all()
    assert (error <= unit * (magnitude + 0.5)).all(), f"worst {np.max(error / (magnitude + 1e-30)):.2e}"
