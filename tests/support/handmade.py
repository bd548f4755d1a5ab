"""A small program written by hand against the native interface: what the artifact and runtime tests run.

Entry ``main``: x float32[3,4], idx int64[3] -> y = relu(x * w + b), z = y[i, idx[i]]; w comes from a recipe.
Entry ``step``: x float32[4] -> twice = 2 x, total (the state, x added to it), same (x itself), half (from the arena);
state ``total`` is updated in place, state ``last`` becomes ``twice``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import (
    ABI_VERSION,
    LAYOUT_MARKER,
    BufferSpec,
    CompiledProgram,
    EntryPoint,
    IOSpec,
    KernelCall,
    WeightSpec,
)
from npu_compiler.artifact.serialize import stamp_layout
from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.targets.cpu import toolchain

_TEMPLATE = r"""
#include <stdint.h>
#include <time.h>
#define API extern "C" __attribute__((visibility("default")))
static double now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#define TICK(k) do { if (times) times[k] = now(); } while (0)
static int running;
API __attribute__((used)) const char npu_layout[65] = "@MARKER@";
API int npu_abi(void) { return @ABI@; }
API int npu_start(int threads) { return running = threads < 3 ? threads : 3; }
API void npu_stop(void) { running = 0; }
API int npu_main(void* const* b, char* arena, double* times) {
  const float *x = (const float*)b[0], *w = (const float*)b[4], *bias = (const float*)b[5];
  const int64_t* idx = (const int64_t*)b[1];
  float *y = (float*)b[2], *z = (float*)b[3], *t = (float*)(arena + 64);
  if (running < 1) return -1;
  TICK(0);
  for (int i = 0; i < 12; i++) t[i] = x[i] * w[i % 4];
  TICK(1);
  for (int i = 0; i < 12; i++) { float v = t[i] + bias[i % 4]; y[i] = v > 0 ? v : 0; }
  TICK(2);
  for (int i = 0; i < 3; i++) {
    if (idx[i] < 0 || idx[i] >= 4) return 3;
    z[i] = y[4 * i + idx[i]];
  }
  TICK(3);
  return 0;
}
API int npu_step(void* const* b, char* arena, double* times) {
  const float* x = (const float*)b[7];
  float *twice = (float*)b[8], *total = (float*)b[9], *half = (float*)arena;
  TICK(0);
  for (int i = 0; i < 4; i++) { twice[i] = 2 * x[i]; half[i] = x[i] / 2; }
  TICK(1);
  for (int i = 0; i < 4; i++) total[i] += x[i];
  TICK(2);
  return 0;
}
"""

SOURCE = _TEMPLATE.replace("@MARKER@", LAYOUT_MARKER).replace("@ABI@", str(ABI_VERSION))

BUFFERS = [
    BufferSpec(0, "input", "float32", (3, 4), "x"),
    BufferSpec(1, "input", "int64", (3,), "idx"),
    BufferSpec(2, "output", "float32", (3, 4), "y"),
    BufferSpec(3, "output", "float32", (3,), "z"),
    BufferSpec(4, "weight", "float32", (4,), "w.folded"),
    BufferSpec(5, "const", "float32", (4,), "bias"),
    BufferSpec(6, "arena", "float32", (3, 4), "scaled", 64),
    BufferSpec(7, "input", "float32", (4,), "x"),
    BufferSpec(8, "output", "float32", (4,), "twice"),
    BufferSpec(9, "state", "float32", (4,), "total"),
    BufferSpec(10, "state", "float32", (4,), "last"),
    BufferSpec(11, "arena", "float32", (4,), "half", 0),
]


def recipes() -> Graph:
    """w.folded = float32(layer.weight) * norm.weight * rsqrt(norm.var + 1e-05); bias is a constant."""
    g = Graph("recipes")
    weight = g.weight("layer.weight", (4,), "float16")
    gain, var = g.weight("norm.weight", (4,), "float32"), g.weight("norm.var", (4,), "float32")
    scale = g.pointwise(lambda a, v: a * expr.fn("rsqrt")(v + 1e-5), gain, var)
    g.outputs = [("w.folded", weight.cast("float32") * scale), ("bias", g.const(np.array([0, 1, -1, 0.5]), "float32"))]
    return g


def _call(name: str, kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...], text: str) -> KernelCall:
    return KernelCall(name, kind, inputs, outputs, text, (f"aten.{name}",), 24, 64, 48)


def _entries() -> dict[str, EntryPoint]:
    main = EntryPoint(
        "main", "npu_main",
        (IOSpec("x", (3, 4), "float32", 0), IOSpec("idx", (3,), "int64", 1)),
        (IOSpec("y", (3, 4), "float32", 2), IOSpec("z", (3,), "float32", 3)),
        (
            _call("scale", "loops", (0, 4), (6,), "out0 = in0[i0, i1] * in1[i1]"),
            _call("bias_relu", "loops", (6, 5), (2,), "out0 = maximum(in0[i0, i1] + in1[i1], 0.0)"),
            _call("gather", "loops", (2, 1), (3,), "out0 = in0[i0, in1[i0]]"),
        ),
        arena_bytes=112,
    )  # fmt: skip
    step = EntryPoint(
        "step", "npu_step",
        (IOSpec("x", (4,), "float32", 7),),
        (
            IOSpec("twice", (4,), "float32", 8), IOSpec("total", (4,), "float32", 9),
            IOSpec("same", (2, 2), "float32", 7), IOSpec("half", (4,), "float32", 11),
            IOSpec("again", (4,), "float32", 8),
        ),
        (
            _call("double", "loops", (7,), (8, 11), "two stores"),
            _call("add", "loops", (7, 9), (9,), "out0 = in0 + in1"),
        ),
        arena_bytes=16, updates=(("total", 9), ("last", 8)),
    )  # fmt: skip
    return {"main": main, "step": step}


@cache
def binary(source: str) -> bytes:
    return toolchain.build_shared({"program": source}, Path(toolchain.__file__).parent / "kernels")


def program(**changes: Any) -> CompiledProgram:
    """The program above; ``changes`` replace fields after it was built."""
    made = CompiledProgram(
        name="handmade", target="cpu", dtype="float32", entries=_entries(), buffers=list(BUFFERS),
        weights=[WeightSpec("layer.weight", (4,), "float16"), WeightSpec("norm.weight", (4,), "float32"),
                 WeightSpec("norm.var", (4,), "float32")],
        recipes=recipes(), sources={}, binary=b"", requires=(), build={"compiler": "by hand", "flags": ["-O3"]},
    )  # fmt: skip
    made.sources, made.binary = {"program": SOURCE}, binary(SOURCE)
    stamp_layout(made)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def weights() -> dict[str, np.ndarray]:
    """A state_dict for it, with one tensor it does not need."""
    return {
        "layer.weight": np.array([1, -2, 3, 0.5], np.float16),
        "norm.weight": np.array([1, 2, 0.5, -1], np.float32),
        "norm.var": np.array([1, 4, 0.25, 1], np.float32),
        "unused": np.zeros(3, np.float32),
    }


def inputs() -> dict[str, np.ndarray]:
    return {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4), "idx": np.array([0, 3, 2], np.int64)}


def expected(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ``main`` computes, in float64."""
    w = {k: v.astype(np.float64) for k, v in weights().items()}
    folded = w["layer.weight"] * w["norm.weight"] / np.sqrt(w["norm.var"] + 1e-5)
    y = np.maximum(given["x"].astype(np.float64) * folded + np.array([0, 1, -1, 0.5]), 0)
    return {"y": y, "z": y[np.arange(3), given["idx"]]}


def every_op() -> Graph:
    """Recipes that use each primitive once; their weights are those of :func:`every_weight`."""
    g = Graph("every op")
    a, m = g.weight("a", (2, 3, 4), "float32"), g.weight("m", (4, 5), "float32")
    image, kernel = g.weight("image", (1, 5, 5, 4), "float32"), g.weight("kernel", (6, 3, 3, 2), "float32")
    q, k = g.weight("q", (1, 4, 3, 8), "float32"), g.weight("k", (1, 2, 5, 8), "float32")
    order = g.const(np.array([2, 0, 1]), "int64")
    picked = g.elementwise(
        (3, 4),
        [a, order],
        expr.load(0, "float32", [expr.const(1, "int64"), expr.load(1, "int64", [expr.index(0)]), expr.index(1)]),
    )
    mask = g.const(np.array([[True, True, False, True, True]]), "bool")
    values, places = g.sort(a, 2, True, 3)
    blocks = g.add("quantize", [g.weight("rows", (2, 64), "float32")], [((2, 68), "uint8")], format="q8_0").out
    made = {
        "pointwise": g.pointwise(
            lambda x, y: expr.where(x > y, expr.fn("exp")(x), x * y), a, m.slice(1, 0, 1).reshape(4)
        ),
        "gather": picked,
        "reduce": a.sum([0, 2]),
        "argmax": g.reduce("argmax", a, [1, 2]),
        "permute": a.permute(2, 0, 1),
        "expand": a.sum([2]).expand(2, 3, 7),
        "slice": a.slice(2, 3, 4).slice(1, 0, 3, 2),
        "matmul": a.matmul(m),
        "conv2d": g.conv2d(image, kernel, (2, 1), (1, 0, 1, 2), (1, 2), 2),
        "attention": g.attention(q, k, k, mask, 0.3, True),
        "concat": g.concat([a, a.slice(1, 1, 3)], 1),
        "scatter": g.scatter(
            a, picked.reshape(3, 4), [order],
            [expr.const(0, "int64"), expr.load(0, "int64", [expr.index(0)]), expr.index(1)], "add",
        ),
        "scan": g.scan("max", a, 1),
        "sort": values,
        "sort.places": places,
        "pack": g.add(
            "pack", [kernel.reshape(1, 6, 9, 2)], [((1, 2, 9, 1, 4, 2), "float32")], panel=4, layout="vnni2"
        ).out,
        "quantize": blocks,
        "dequantize": g.add(
            "dequantize", [blocks], [((2, 64), "float16")], format="q8_0", k=64, dtype="float16"
        ).out,
        "halves": a.cast("bfloat16"),
        "infinite": g.const(np.array(-np.inf), "float32").expand(2, 2),
    }  # fmt: skip
    g.outputs = list(made.items())
    return g


def every_weight() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = [n for n in every_op().nodes if n.op == "weight"]
    return {n.attrs["key"]: rng.standard_normal(n.out.shape).astype(np.float32) for n in weights}


def rich_program() -> CompiledProgram:
    """:func:`program` with :func:`every_op` beside its own recipes: much for a damaged file to get wrong."""
    made, extra = program(), every_op()
    own = made.recipes
    for node in own.nodes:
        copy = extra.add(node.op, node.inputs, [(v.shape, v.dtype) for v in node.outputs], **node.attrs)
        own.outputs = [(name, copy.out if v is node.out else v) for name, v in own.outputs]
        for user in own.nodes:
            user.inputs = [copy.out if v is node.out else v for v in user.inputs]
    buffers = [BufferSpec(100 + i, "const", v.dtype, v.shape, name) for i, (name, v) in enumerate(extra.outputs)]
    extra.outputs += own.outputs
    made.recipes = extra
    made.buffers = made.buffers + buffers
    made.weights = made.weights + [WeightSpec(k, v.shape, "float32") for k, v in every_weight().items()]
    made.binary = binary(SOURCE)
    stamp_layout(made)
    return made


def check(outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> None:
    """Results of ``main`` are as in numpy."""
    wanted = expected(inputs)
    assert outputs.keys() == wanted.keys()
    for name, array in outputs.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, wanted[name], rtol=2e-7, atol=1e-6)
