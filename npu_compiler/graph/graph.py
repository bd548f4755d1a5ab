"""The core graph: every ATen op is lowered to it, and passes rewrite it.

About a dozen primitive ops express everything. All shapes are static and every value is conceptually contiguous;
``reshape``/``permute``/``expand``/``slice`` are views that the scheduler resolves to strides.

====================  ==============================================================================================
``input``             a graph input; attrs name, spec dtype
``weight``            a state_dict entry; attrs key
``state``             a mutable buffer, allocated once by the runtime; attrs key
``const``             attrs data (numpy array)
``pointwise``         attrs expr: an Expr whose loads read the inputs; domain = output shape
``reduce``            attrs kind (sum prod max min argmax argmin), axes, expr, domain; output keeps reduced dims as 1
``reshape``           attrs shape
``permute``           attrs perm
``expand``            attrs shape (same rank; size-1 dims are repeated)
``slice``             attrs starts, steps (one per dim; steps > 0), shape
``matmul``            [..., M, K] x [..., K, N]; batch dims broadcast; returns float32 (or float64, int64; of 8-bit
                      integers int32)
``conv2d``            x [N,H,W,C], w [K,R,S,C/groups]; attrs stride, padding (t,l,b,r), dilation, groups; float32, of
                      8-bit integers int32
``attention``         q [B,H,SQ,D], k/v [B,HK,SK,D], optional mask broadcastable to [B,H,SQ,SK] (bool or float);
                      attrs scale, causal, limited (a further operand int64 [SQ]: the mask hides every key beyond it)
``concat``            attrs axis
``scatter``           base, src, *index operands -> a copy of base with src written into it; attrs mode ('set', or
                      the scalar op that combines both), idx (one Expr per base dim over the domain of src; its loads
                      number the index operands from 0)
``scan``              attrs kind (sum prod max min logaddexp), axis: running reduction, same shape; kinds argmax and
                      argmin: outputs (running extreme, its last int64 position)
``sort``              attrs axis, descending, k: outputs (values, int64 indices) of the first k in order; stable
``quantize``          weights only: attrs format; a matrix [N, K] as the blocks of a weight format, uint8 [N, bytes]
``dequantize``        weights only: attrs format, k, dtype; the elements [N, k] of blocks
``pack``              weights only: attrs panel, layout; reorders a matmul/conv weight for a target's micro-kernel
====================  ==============================================================================================

Values know their graph, so a lowering reads like maths: ``x * scale + shift``, ``x.sum(axes)``, ``x.permute(0, 2, 1)``.
Arithmetic on half types is done, and returned, in float32 (``dtypes.opmath``); the registry casts an op's results to
the dtype the IR declares, and fusion removes roundings between ops of one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..support import dtypes
from ..support.ordering import depth_first
from . import expr
from .expr import Expr

LEAVES = frozenset(("input", "weight", "state", "const"))
VIEWS = frozenset(("reshape", "permute", "expand", "slice"))
LOOPS = frozenset(("pointwise", "reduce"))
SCATTER_MODES = ("set", "add", "mul", "maximum", "minimum")
# Scans of an extreme together with its position: the kind -> that of the extreme alone.
SCAN_EXTREMES = {"argmax": "max", "argmin": "min"}


class Value:
    """One tensor of the core graph: static ``shape``, ``dtype``, produced by ``node`` as its output ``index``."""

    __slots__ = ("dtype", "graph", "index", "node", "shape")

    def __init__(self, graph: Graph, node: Node, index: int, shape: tuple[int, ...], dtype: str):
        self.graph, self.node, self.index, self.shape, self.dtype = graph, node, index, shape, dtype

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def op(self) -> str:
        """The primitive that produces this value."""
        return self.node.op

    def __repr__(self) -> str:
        return f"%{self.node.id}{f'.{self.index}' if self.index else ''}:{self.dtype}{list(self.shape)}"

    # -- views ------------------------------------------------------------------------------------------------------
    def reshape(self, *shape: int) -> Value:
        """View with another shape of the same number of elements; one dim may be -1."""
        return self.graph.reshape(self, shape)

    def permute(self, *perm: int) -> Value:
        """View with dims in the order ``perm``: dim i of the result is dim ``perm[i]`` of this value."""
        return self.graph.permute(self, perm)

    def transpose(self, a: int, b: int) -> Value:
        """View with dims ``a`` and ``b`` exchanged."""
        perm = list(range(self.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return self.permute(*perm)

    def expand(self, *shape: int) -> Value:
        """Broadcast to ``shape``; new leading dims are added, -1 keeps a dim."""
        return self.graph.expand(self, shape)

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """View of ``start:stop:step`` along ``axis``; see :meth:`Graph.slice`."""
        return self.graph.slice(self, axis, start, stop, step)

    # -- arithmetic ---------------------------------------------------------------------------------------------------
    def cast(self, dtype: str) -> Value:
        """Convert to ``dtype``; returns itself if it has that dtype."""
        return self if dtype == self.dtype else self.graph.pointwise(lambda x: x.cast(dtype), self, opmath=False)

    def sum(self, axes: Sequence[int]) -> Value:
        """Sum over ``axes``, which stay as size 1; integers and bools give int64, half types float32."""
        return self.graph.reduce("sum", self, axes)

    def mean(self, axes: Sequence[int]) -> Value:
        """Mean over ``axes``, which stay as size 1; NaN over no elements."""
        n = math.prod(self.shape[a] for a in axes)
        return self.graph.reduce("sum", self, axes) / float(n)  # the mean of no elements is 0 / 0

    def amax(self, axes: Sequence[int]) -> Value:
        """Maximum over ``axes``, which stay as size 1; NaN propagates."""
        return self.graph.reduce("max", self, axes)

    def amin(self, axes: Sequence[int]) -> Value:
        """Minimum over ``axes``, which stay as size 1; NaN propagates."""
        return self.graph.reduce("min", self, axes)

    def matmul(self, other: Value) -> Value:
        """Matrix product [..., M, K] @ [..., K, N]; see :meth:`Graph.matmul`."""
        return self.graph.matmul(self, other)

    def __add__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a + b, self, o)

    def __radd__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a + b, o, self)

    def __sub__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a - b, self, o)

    def __rsub__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a - b, o, self)

    def __mul__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a * b, self, o)

    def __rmul__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a * b, o, self)

    def __truediv__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a / b, self, o)

    def __rtruediv__(self, o: Any) -> Value:
        return self.graph.pointwise(lambda a, b: a / b, o, self)

    def __neg__(self) -> Value:
        return self.graph.pointwise(lambda a: -a, self)


class Node:
    """One primitive op. ``sources`` names the IR nodes that it implements; rewrites keep it."""

    __slots__ = ("attrs", "id", "inputs", "op", "outputs", "sources")

    def __init__(self, id: int, op: str, inputs: list[Value], attrs: dict[str, Any], sources: tuple[str, ...]):
        self.id, self.op, self.inputs, self.attrs, self.sources = id, op, inputs, attrs, sources
        self.outputs: list[Value] = []

    @property
    def out(self) -> Value:
        """The only output of a node that has one."""
        return self.outputs[0]

    @property
    def label(self) -> str:
        """The IR node that it computes, else its primitive."""
        return self.sources[-1] if self.sources else self.op

    @property
    def domain(self) -> tuple[int, ...]:
        """Iteration domain of a pointwise or reduce node."""
        return self.attrs["domain"] if self.op == "reduce" else self.out.shape

    def __repr__(self) -> str:
        shown = {k: (expr.render(v) if isinstance(v, Expr) else v) for k, v in self.attrs.items() if k != "data"}
        return f"{', '.join(map(repr, self.outputs))} = {self.op}({', '.join(map(repr, self.inputs))}) {shown}"


class Graph:
    """A program under compilation. ``nodes`` is topologically ordered; ``outputs`` pairs names with values."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.outputs: list[tuple[str, Value]] = []
        self.updates: list[tuple[str, Value]] = []  # (state key, value after the run)
        self.sources: tuple[str, ...] = ()  # given to every node built from now on
        self._next = 0

    # -- construction -------------------------------------------------------------------------------------------------
    def add(
        self, op: str, inputs: Iterable[Value], outputs: Sequence[tuple[tuple[int, ...], str]], **attrs: Any
    ) -> Node:
        """Append a node of primitive ``op``; ``outputs`` has (shape, dtype) of each result. Nothing is checked here."""
        node = Node(self._next, op, list(inputs), attrs, self.sources)
        self._next += 1
        node.outputs = [Value(self, node, i, tuple(s), d) for i, (s, d) in enumerate(outputs)]
        self.nodes.append(node)
        return node

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        """Append a graph input."""
        return self.add("input", (), [(tuple(shape), dtype)], name=name).out

    def weight(self, key: str, shape: Sequence[int], dtype: str) -> Value:
        """Append a state_dict entry, read only."""
        return self.add("weight", (), [(tuple(shape), dtype)], key=key).out

    def state(self, key: str, shape: Sequence[int], dtype: str) -> Value:
        """Append a mutable buffer that keeps its contents from run to run."""
        return self.add("state", (), [(tuple(shape), dtype)], key=key).out

    def const(self, data: Any, dtype: str | None = None) -> Value:
        """Append a constant: ``data`` is anything that numpy makes an array of, ``dtype`` an IR name or None."""
        arr = np.asarray(data)
        if dtype is not None:
            arr = arr.astype(dtypes.numpy_dtype(dtype))
        return self.add("const", (), [(arr.shape, dtypes.name_of(arr.dtype))], data=arr).out

    def pointwise(self, f: Callable[..., Expr], *args: Any, opmath: bool = True, promote: bool = True) -> Value:
        """Apply scalar function ``f`` with numpy broadcasting over Values and Python scalars.

        ``promote`` casts the arguments to their common dtype by PyTorch's rules (dimensioned tensors outrank 0-d ones,
        which outrank Python numbers); ``opmath`` then widens half types to float32. Python scalars reach ``f`` as they
        are.
        """
        values = [a for a in args if isinstance(a, Value)]
        shape = broadcast_shapes(*(v.shape for v in values))
        common = result_type(args) if promote else None
        inputs: list[Value] = []
        exprs: list[Any] = []
        for a in args:
            if not isinstance(a, Value):
                exprs.append(expr.const(a, dtypes.opmath(common) if opmath else common) if common else a)
                continue
            e = expr.load(len(inputs), a.dtype, expr.broadcast_index(a.shape, len(shape)))
            inputs.append(a)
            target = common or a.dtype
            exprs.append(e.cast(dtypes.opmath(target) if opmath else target))
        return self.elementwise(shape, inputs, f(*exprs))

    def elementwise(self, shape: Sequence[int], inputs: Sequence[Value], e: Expr) -> Value:
        """Append a pointwise node with an explicit expression over ``shape``; each load has one index per operand dim.

        A load whose index may be out of range must be in a branch of a ``where`` that is not taken there.
        """
        return self.add("pointwise", inputs, [(tuple(shape), e.dtype)], expr=e).out

    def reduce(self, kind: str, x: Value, axes: Sequence[int], e: Expr | None = None) -> Value:
        """Reduce over ``axes``, which stay as size 1. Sums and products of integers and bools are int64, of half types
        float32."""
        e = expr.load(0, x.dtype, expr.identity_index(x.shape)) if e is None else e
        return self.reduce_expr(kind, [x], e, x.shape, axes)

    def reduce_expr(
        self, kind: str, inputs: Sequence[Value], e: Expr, domain: Sequence[int], axes: Sequence[int]
    ) -> Value:
        """Reduce expression ``e`` of ``inputs`` over ``axes`` of ``domain``; they stay as size 1 in the result."""
        axes = tuple(sorted(a % len(domain) for a in axes)) if domain else ()
        if kind in ("sum", "prod"):
            e = e.cast("int64" if dtypes.category(e.dtype) < 2 else dtypes.opmath(e.dtype))
        shape = tuple(1 if d in axes else n for d, n in enumerate(domain))
        dtype = "int64" if kind in ("argmax", "argmin") else e.dtype
        return self.add("reduce", inputs, [(shape, dtype)], kind=kind, axes=axes, expr=e, domain=tuple(domain)).out

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """View with ``shape``, which has the same number of elements; one dim may be -1. Raises ``ValueError``."""
        shape = list(shape)
        if -1 in shape:
            rest = math.prod(n for n in shape if n != -1)
            shape[shape.index(-1)] = x.numel // rest if rest else 0
        assert math.prod(shape) == x.numel, f"cannot reshape {list(x.shape)} to {shape}"
        return (
            x
            if tuple(shape) == x.shape
            else self.add("reshape", [x], [(tuple(shape), x.dtype)], shape=tuple(shape)).out
        )

    def permute(self, x: Value, perm: Sequence[int]) -> Value:
        """View with dims in the order ``perm``; negative dims count from the end."""
        perm = tuple(p % x.rank for p in perm)
        if perm == tuple(range(x.rank)):
            return x
        return self.add("permute", [x], [(tuple(x.shape[p] for p in perm), x.dtype)], perm=perm).out

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """View with size-1 dims of ``x`` repeated to ``shape``; leading dims are added, -1 keeps a dim."""
        x = self.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
        shape = tuple(o if n == -1 else n for n, o in zip(shape, x.shape, strict=True))
        assert all(n == o or o == 1 for n, o in zip(shape, x.shape, strict=True)), f"cannot expand {x.shape} to {shape}"
        return x if shape == x.shape else self.add("expand", [x], [(shape, x.dtype)], shape=shape).out

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Elements ``start:stop:step`` of one axis; Python's rules for negative and out-of-range bounds, step > 0."""
        axis %= x.rank
        start, stop, step = slice(start, stop, step).indices(x.shape[axis])
        shape = list(x.shape)
        shape[axis] = len(range(start, stop, step))
        if tuple(shape) == x.shape:
            return x
        starts, steps = [0] * x.rank, [1] * x.rank
        starts[axis], steps[axis] = start, step
        return self.add(
            "slice", [x], [(tuple(shape), x.dtype)], starts=tuple(starts), steps=tuple(steps), shape=tuple(shape)
        ).out

    def matmul(self, a: Value, b: Value) -> Value:
        """[..., M, K] @ [..., K, N]; both at least 2-d, of one dtype or 8-bit integers; result in
        :func:`.dtypes.accumulator` of it."""
        assert dtypes.multiply(a.dtype, b.dtype) and a.rank >= 2 and b.rank >= 2 and a.shape[-1] == b.shape[-2], (a, b)
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return self.add("matmul", [a, b], [((*batch, a.shape[-2], b.shape[-1]), dtypes.accumulator(a.dtype))]).out

    def conv2d(
        self, x: Value, w: Value, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Value:
        """Channels-last convolution: x [N,H,W,C], w [K,R,S,C/groups], padding (top, left, bottom, right)."""
        n, h, wd, _ = x.shape
        k, r, s, _ = w.shape
        t, le, b, ri = padding
        oh = (h + t + b - dilation[0] * (r - 1) - 1) // stride[0] + 1
        ow = (wd + le + ri - dilation[1] * (s - 1) - 1) // stride[1] + 1
        return self.add(
            "conv2d", [x, w], [((n, oh, ow, k), dtypes.accumulator(x.dtype))],
            stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=groups,
        ).out  # fmt: skip

    def attention(self, q: Value, k: Value, v: Value, mask: Value | None, scale: float, causal: bool) -> Value:
        """softmax(q @ k^T * scale + mask) @ v: q [B,H,SQ,D], k [B,HK,SK,D], v [B,HK,SK,DV], mask broadcastable to
        [B,H,SQ,SK] (bool: true keeps; float: added). HK divides H. Returns [B,H,SQ,DV]."""
        out = ((*q.shape[:3], v.shape[3]), q.dtype)
        inputs = [q, k, v] + ([mask] if mask is not None else [])
        return self.add("attention", inputs, [out], scale=scale, causal=causal, limited=False).out

    def concat(self, xs: Sequence[Value], axis: int) -> Value:
        """Join values of one dtype along ``axis``; their other dims agree."""
        axis %= xs[0].rank
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        return self.add("concat", xs, [(tuple(shape), xs[0].dtype)], axis=axis).out

    def scatter(self, base: Value, src: Value, index: Sequence[Value], idx: Sequence[Expr], mode: str = "set") -> Value:
        """Copy ``base`` and store ``src`` at the indices ``idx``, expressions over the domain of src. ``mode``: one
        of :data:`SCATTER_MODES`; all but 'set' are scalar ops that combine an element and ``src``."""
        return self.add("scatter", [base, src, *index], [(base.shape, base.dtype)], idx=tuple(idx), mode=mode).out

    def scan(self, kind: str, x: Value, axis: int) -> Value:
        """Running 'sum', 'prod', 'max', 'min' or 'logaddexp' along ``axis``; same shape and dtype as ``x``. Totals of
        half types are float32."""
        return self.add("scan", [x], [(x.shape, x.dtype)], kind=kind, axis=axis % x.rank).out

    def scan_extreme(self, kind: str, x: Value, axis: int) -> tuple[Value, Value]:
        """Return the running maximum ('argmax') or minimum ('argmin') along ``axis``, and the int64 position of its
        last occurrence so far. A NaN is more extreme than any number."""
        outs = [(x.shape, x.dtype), (x.shape, "int64")]
        node = self.add("scan", [x], outs, kind=kind, axis=axis % x.rank)
        return node.outputs[0], node.outputs[1]

    def sort(self, x: Value, axis: int, descending: bool, k: int | None = None) -> tuple[Value, Value]:
        """Return the first ``k`` values along ``axis`` in order (None: all) and their int64 positions. Stable."""
        axis %= x.rank
        shape = list(x.shape)
        shape[axis] = shape[axis] if k is None else k
        outs = [(tuple(shape), x.dtype), (tuple(shape), "int64")]
        node = self.add("sort", [x], outs, axis=axis, descending=descending, k=shape[axis])
        return node.outputs[0], node.outputs[1]

    # -- analysis and rewriting
    def results(self) -> list[Value]:
        """Return all values that must be computed: outputs and state updates."""
        return [v for _, v in self.outputs] + [v for _, v in self.updates]

    def users(self) -> dict[Value, list[Node]]:
        """Return the nodes that read each value, in order, once per use. Graph outputs are not listed."""
        table: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in node.inputs:
                table.setdefault(v, []).append(node)
        return table

    def replace(self, new: dict[Value, Value]) -> None:
        """Redirect every use of the keys to their values (chains are followed), then clean up."""

        def final(v: Value) -> Value:
            while v in new:
                v = new[v]
            return v

        for node in self.nodes:
            node.inputs = [final(v) for v in node.inputs]
        self.outputs = [(n, final(v)) for n, v in self.outputs]
        self.updates = [(k, final(v)) for k, v in self.updates]
        self.clean()

    def clean(self) -> None:
        """Remove dead nodes and restore a topological order. Graph inputs and states always stay."""
        roots = [n for n in self.nodes if n.op in ("input", "state")] + [v.node for v in self.results()]
        self.nodes = depth_first(roots, lambda node: [v.node for v in node.inputs])


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of numpy's broadcasting. Raises ``ValueError`` if the shapes do not fit."""
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for s in shapes:
        for d, n in enumerate(s, rank - len(s)):
            if n != 1:
                if out[d] not in (1, n):
                    raise ValueError(f"shapes {[list(x) for x in shapes]} do not broadcast")
                out[d] = n
    return tuple(out)


def result_type(args: Iterable[Any]) -> str:
    """Return PyTorch's result dtype of Values and Python scalars: tensors with dims outrank 0-d tensors, which outrank
    numbers."""
    levels: list[str | None] = [None, None, None]
    for a in args:
        if isinstance(a, Value):
            level, dtype = (0 if a.rank else 1), a.dtype
        else:
            level, dtype = 2, "bool" if isinstance(a, bool) else "int64" if isinstance(a, int) else "float32"
        held = levels[level]
        levels[level] = dtype if held is None else dtypes.promote(held, dtype)
    result: str | None = None
    for level_type in levels:
        if level_type is None:
            continue
        if result is None or dtypes.category(level_type) > dtypes.category(result):
            result = level_type
    assert result is not None
    return result
