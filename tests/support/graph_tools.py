"""Small graphs as the registry lowers them, and the checks that passes are held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from npu_compiler.graph import expr, interp
from npu_compiler.graph.expr import Expr, fn, index, load, where
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.pipeline import State, run_graph
from npu_compiler.schedule import checks
from npu_compiler.schedule import interp as kernel_interp
from npu_compiler.schedule.anchors import Gemm
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.support import dtypes

from .random_pointwise import ERROR

Arrays = dict[str, np.ndarray]
exp, rsqrt, tanh, log = fn("exp"), fn("rsqrt"), fn("tanh"), fn("log")


def data_for(graph: Graph) -> Arrays:
    rng, out = np.random.default_rng(1), {}
    for node in graph.nodes:
        if node.op in ("input", "weight", "state"):
            dtype, shape = node.out.dtype, node.out.shape
            if dtype == "bool":
                array = np.asarray(rng.random(shape) < 0.6)
                array[..., :1] = True  # no row is masked altogether
            elif dtypes.is_float(dtype):
                array = rng.uniform(0.2, 1.5, shape) * rng.choice([-1, 1], shape)
            else:
                array = rng.integers(0, 3, shape)
            key = node.attrs.get("name") or node.attrs["key"]
            if "var" in key:
                array = np.abs(array)
            out[key] = np.asarray(array).astype(dtypes.numpy_dtype(dtype))
    return out


def assert_close(got: Arrays, want: Arrays, dtype: str = "float32") -> None:
    for name, b in want.items():
        a = got[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        tolerance = 10 * ERROR[dtype] if dtypes.is_float(dtypes.name_of(b.dtype)) else 0
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), tolerance, tolerance, err_msg=name)


def kept(graph: Graph, apply: Callable[[Graph], object], dtype: str = "float32") -> Graph:
    """The graph after a pass, which must be well-formed and compute the same."""
    graph.clean()
    data = data_for(graph)
    want = interp.run(graph, data, data)
    apply(graph)
    checks.check_graph(graph)
    assert_close(interp.run(graph, data, data), want, dtype)
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


def compiled(graph: Graph, disable: tuple[str, ...] = (), dtype: str = "float32") -> tuple[State, list[Kernel]]:
    """The scheduled program, which must compute the same."""
    graph.clean()
    data = data_for(graph)
    want = interp.run(graph, data, data)
    state = run_graph(graph, disable=disable)
    assert state.schedule is not None
    checks.check_schedule(state.schedule, state.config.buffer_align, planned=True)
    assert_close(run_kernels(state, data, data), want, dtype)
    return state, state.schedule.kernels


def run_kernels(
    state: State, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Outputs and ``state:<key>`` updates of scheduled kernels, as ``interp.run`` gives them for the graph."""
    assert state.schedule is not None
    weights = weights or {}
    made = kernel_interp.load_time_values(state.graph.nodes, state.recipes, weights)
    return kernel_interp.run(state.schedule, inputs, weights, made)


def kinds(kernels: list[Kernel]) -> list[str]:
    """Of all kernels, those inside others included."""
    return [p.label for k in kernels for p in ((k.prologue,) if isinstance(k, Gemm) and k.prologue else ()) + k.members]


def relu(x: Value) -> Value:
    return x.graph.pointwise(lambda e: expr.maximum(e, 0.0), x)


def nchw(y: Value) -> Value:
    return y.permute(0, 3, 1, 2)


def conv(x: Value, name: str, k: int, bias: bool = False, size: int = 3, pad: int = 1, groups: int = 1) -> Value:
    """An NCHW convolution as the registry lowers it."""
    g = x.graph
    w = g.weight(f"{name}.weight", (k, x.shape[1] // groups, size, size), x.dtype)
    y = g.conv2d(x.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1), (1, 1), (pad,) * 4, (1, 1), groups)
    y = nchw(y).cast(x.dtype)
    return (y + g.weight(f"{name}.bias", (k,), x.dtype).reshape(k, 1, 1)).cast(x.dtype) if bias else y


def batch_norm(x: Value, name: str) -> Value:
    g, shape = x.graph, (1, x.shape[1], *[1] * (x.rank - 2))
    mean, var, gain, shift = (
        g.weight(f"{name}.{n}", shape[1:2], "float32").reshape(*shape) for n in ("mean", "var", "gain", "shift")
    )
    scale = g.pointwise(rsqrt, var + 1e-5)
    return ((x - mean) * scale * gain + shift).cast(x.dtype)


def softmax(x: Value, axis: int = -1) -> Value:
    e = x.graph.pointwise(exp, x - x.amax([axis % x.rank]))
    return e / e.sum([axis % x.rank])


def layer_norm(x: Value) -> Value:
    g, n = x.graph, x.shape[-1]
    c = x - x.mean([x.rank - 1])
    y = c * g.pointwise(rsqrt, (c * c).mean([x.rank - 1]) + 1e-5)
    return y * g.weight("gain", (n,), "float32") + g.weight("shift", (n,), "float32")


def linear(x: Value, n: int, name: str = "w") -> Value:
    return x.matmul(x.graph.weight(name, (x.shape[-1], n), x.dtype))


def padded(x: Value, pads: tuple[int, int, int, int], value: float = 0.0, guard: Expr | None = None) -> Value:
    """NCHW with (left, right, top, bottom) as ``constant_pad_nd`` has them."""
    left, right, top, bottom = pads
    n, c, h, w = x.shape
    row, column = index(2) - top, index(3) - left
    inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
    inside = inside if guard is None else inside & guard
    e = where(inside, load(0, x.dtype, [index(0), index(1), row, column]), value)
    return x.graph.elementwise((n, c, h + top + bottom, w + left + right), [x], e)
