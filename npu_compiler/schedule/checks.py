"""The checks of ``NPU_VERIFY`` after every phase and rewrite: 1 checks the invariants of graph, groups, kernels and
memory plan; 2 also runs the graph and then the kernels on random inputs and compares results with the first graph's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..graph import affine, expr, interp, verify
from ..graph.graph import LEAVES, LOOPS, VIEWS, Graph, Node, Value
from ..passes.fuse import Group
from ..passes.load_time import static_values
from ..support import dtypes
from ..support.errors import CompileError, IncompressibleError
from . import interp as kernel_interp
from .kernel import Buffer, Loops, Operand
from .memory_planner import in_place, lifetimes
from .schedule import Schedule

MAX_WORK = 1 << 26  # operations (interp.cost) that the numpy check may take
# Of results of the same kernels, or kernels rewritten: sums may be in another order, roundings in other places.
KERNEL_TOLERANCE = {"float64": 1e-6, "float32": 3e-4, "float16": 0.02, "bfloat16": 0.1}
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}  # by the narrowest type in the graph


def check_graph(graph: Graph) -> None:
    """Check types, order, and the bounds of every load that no ``where`` guards. Raises ``ValueError``."""
    verify.check_graph(graph)
    for node in graph.nodes:
        if node.op in LOOPS and 0 not in node.domain:
            check_loads(node)


def check_loads(node: Node) -> None:
    """Check that indices outside of ``where`` branches stay inside their operands, unless they depend on data.

    Raises ``ValueError``.
    """
    ranges = {d: (0, n - 1) for d, n in enumerate(node.domain)}
    stack, seen = [node.attrs["expr"]], set()
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if e.op == "load":
            for i, n in zip(e.args, node.inputs[e.value].shape, strict=True):
                from_data = any(x.op == "load" for x in expr.walk(i))
                bound = affine.interval(i, ranges) if not from_data else None
                if bound is not None and not 0 <= bound[0] <= bound[1] < n:
                    raise ValueError(f"{node!r}: {expr.render(e)} reads {bound[0]} to {bound[1]} of {n}")
        stack.extend(e.args[:1] if e.op == "where" else e.args)


def check_groups(graph: Graph, groups: Sequence[Group]) -> None:
    """Check that every node that computes something is in one group, and that the order of groups can run.

    Raises ``ValueError``.
    """
    static = static_values(graph)
    made: set[Node] = set()
    for group in groups:
        for node in group.nodes:
            if node in made:
                raise ValueError(f"{node!r} is in two kernels")
            made.add(node)
        for node in group.nodes:
            for v in node.inputs:
                while v.op in VIEWS and v not in static:
                    v = v.node.inputs[0]
                if v not in static and v.op not in LEAVES and v.node not in made:
                    raise ValueError(f"{node!r} reads {v!r} before a kernel computes it")
    for node in graph.nodes:
        if node.op not in LEAVES | VIEWS and node.outputs[0] not in static and node not in made:
            raise ValueError(f"{node!r} is in no kernel")


def check_schedule(schedule: Schedule, align: int = 1, planned: bool = False) -> None:
    """Check that operands stay inside their buffers, that memory is written before it is read, and that no loop nest
    overwrites what it still reads. With ``planned`` also that buffers that live at the same time do not overlap and
    are aligned to ``align`` bytes.

    Raises ``ValueError``.
    """
    written: set[int] = set()
    for k in schedule.kernels:
        for op in k.inputs:
            if op.buffer.kind in ("arena", "output") and op.buffer.id not in written:
                raise ValueError(f"kernel {k.name} reads {op.buffer.name} before it is written")
        for op in (*k.inputs, *k.outputs):
            _check_operand(k.name, op)
        for p in k.members:
            if isinstance(p, Loops):
                _check_loops(k.name, p)
        written |= {op.buffer.id for op in k.outputs}
    if planned:
        _check_plan(schedule, align)


def _check_loops(name: str, nest: Loops) -> None:
    if nest.overwrites_inputs:
        raise ValueError(f"kernel {name} overwrites elements that other points of its loop nest read")
    for s in nest.body.stages:
        reduced = {x.value for x in expr.walk(s.expr) if x.op == "index"} & set(nest.body.axes) if s.per_row else ()
        if reduced:
            raise ValueError(f"kernel {name} uses index i{min(reduced)} once a row, where it has no value")


def _check_operand(name: str, op: Operand) -> None:
    last = op.offset + sum((n - 1) * s for n, s in zip(op.shape, op.strides, strict=True))
    size = int(np.prod(op.buffer.shape, dtype=np.int64))
    if 0 not in op.shape and not (op.offset >= 0 and min(op.strides, default=0) >= 0 and last < size):
        raise ValueError(f"kernel {name}: {op} leaves its buffer")


def _check_plan(schedule: Schedule, align: int) -> None:
    life, taken = lifetimes(schedule.kernels), in_place(schedule.kernels)
    arena = [b for b in schedule.buffers if b.kind == "arena"]
    for i, a in enumerate(arena):
        if a.offset % align or a.offset + a.nbytes > schedule.arena_bytes:
            raise ValueError(f"{a} is misaligned or outside of the arena of {schedule.arena_bytes} bytes")
        for b in arena[:i]:
            (f, la), (g, lb) = life[a.id], life[b.id]
            shared = a.offset == b.offset and taken.get(a.id, a.id) == taken.get(b.id, b.id)
            if f <= lb and g <= la and _overlap(a, b) and not shared:
                raise ValueError(f"{a} and {b} live at the same time and overlap")


def _overlap(a: Buffer, b: Buffer) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


@dataclass
class Reference:
    """Random inputs, and the results that later graphs and kernels must reproduce.

    The results are those of the first graph that was seen, and then of the first whose weights are quantized, because
    that changes them. Graphs that numpy would run for too long are not compared.
    """

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[str, np.ndarray] | None = None
    tolerance: float = 0.0
    seen: bool = False
    quantized: bool = False
    load_time: dict[str, np.ndarray] | None = None  # contents of weight buffers; None before there is a schedule

    def check(self, graph: Graph) -> None:
        """Raise ``ValueError`` if the graph's results differ from the first one's by more than rounding."""
        quantized = any(n.op == "quantize" for n in graph.nodes)
        if not self.seen or quantized != self.quantized:
            self.seen, self.quantized, self.results = True, quantized, None
            self._fill(graph)
            self.tolerance = _tolerance(TOLERANCE, graph)
            if sum(interp.cost(n).operations for n in graph.nodes) <= MAX_WORK:
                self.results = self._run(graph)
        elif self.results is not None:
            results = self._run(graph)
            if results is not None:
                self._compare(results)

    def check_schedule(self, schedule: Schedule, graph: Graph, recipes: list[tuple[str, Value]]) -> None:
        """Raise ``ValueError`` if the kernels' results differ from the graph's, or from those of the kernels seen
        before. Schedules that numpy cannot run, or that read out of range, are not compared."""
        if self.results is None:
            return
        first = self.load_time is None
        try:
            if self.load_time is None:
                self.load_time = kernel_interp.load_time_values(graph.nodes, recipes, self.weights)
            results = kernel_interp.run(schedule, self.inputs, self.weights, self.load_time)
        except (IndexError, IncompressibleError, NotImplementedError):
            self.results = None
            return
        self._compare(results)
        if first:  # from here on kernels are compared with kernels
            self.results = {name: results[name] for name in self.results}
            self.tolerance = _tolerance(KERNEL_TOLERANCE, graph)

    def _compare(self, results: Mapping[str, np.ndarray]) -> None:
        for name, want in (self.results or {}).items():
            if not _close(results[name], want, self.tolerance):
                raise ValueError(f"output {name!r} differs from its value before this step")

    def _fill(self, graph: Graph) -> None:
        rng = np.random.default_rng(0)
        for node in graph.nodes:
            if node.op in LEAVES and node.op != "const":
                dtype, shape = dtypes.numpy_dtype(node.out.dtype), node.out.shape
                if dtypes.is_float(node.out.dtype):
                    low = 0.1 if len(shape) < 2 else -1.0  # vectors may be variances
                    array = rng.uniform(low, 1.0, shape).astype(dtype)
                else:
                    array = rng.integers(0, 2, shape).astype(dtype)
                held = self.inputs if node.op == "input" else self.weights
                held[node.attrs.get("name") or node.attrs["key"]] = array

    def _run(self, graph: Graph) -> dict[str, np.ndarray] | None:
        try:
            return interp.run(graph, self.inputs, self.weights)
        except IndexError:  # 0 and 1 are not legal indices of this model
            return None


def _close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not dtypes.is_float(dtypes.name_of(a.dtype)):  # integers may depend on a rounding: a few may differ
        return a.size == 0 or float(np.mean(a != b)) < 0.05
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.max(np.abs(wide_b[np.isfinite(wide_b)]), initial=1.0))
    return bool(np.allclose(wide_a, wide_b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _tolerance(table: Mapping[str, float], graph: Graph) -> float:
    types = {v.dtype for n in graph.nodes for v in n.outputs}
    return max((t for name, t in table.items() if name in types), default=0.0)


def check_step(
    step: str,
    graph: Graph,
    groups: Sequence[Group],
    schedule: Schedule | None,
    recipes: list[tuple[str, Value]],
    align: int,
    reference: Reference | None,
) -> None:
    """Run all checks that apply after the phase or rewrite ``step``. Raises :class:`CompileError`, which names it."""
    try:
        if schedule is None:
            check_graph(graph)
            if reference is not None:
                reference.check(graph)
            if groups:
                check_groups(graph, groups)
        else:
            check_schedule(schedule, align, planned=step == "phase 'memory'")
            if reference is not None:
                reference.check_schedule(schedule, graph, recipes)
    except ValueError as error:
        raise CompileError(f"internal error after {step}: {error}; please report it") from error
