"""Groups -> kernels over buffers: views become strides, every value gets memory, loop bodies get their stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..graph import expr
from ..graph.expr import Expr
from ..graph.graph import Graph, Node, Value
from ..passes.fuse import CHEAP, Group
from ..target_config import CompileChoices, TargetConfig
from ..weights.format import WeightFormat
from .contractions import Contractions, Winograd
from .destination_passing import destinations, part_of, parts, shared_tables
from .kernel import Buffer, LoopBody, Loops, Operand, Scan, Sort, Stage
from .operands import decoded
from .schedule import Schedule


class Scheduler(Contractions):
    """Schedules one graph. ``recipes`` collects the load-time values that fill weight buffers, by buffer name."""

    def __init__(
        self,
        graph: Graph,
        groups: list[Group],
        config: TargetConfig,
        choices: CompileChoices,
        winograd: Winograd = lambda node: None,
        format: WeightFormat | None = None,
        one_row: frozenset[str] = frozenset(),
        in_limbs: Callable[[Node], bool] = lambda node: False,
    ):
        super().__init__(graph, config, choices, winograd, format, one_row, in_limbs)
        self.groups = groups

    def run(self) -> Schedule:
        """Return the schedule of all groups, with the copies and state updates that it needs."""
        graph = self.graph
        inputs = []
        for node in graph.nodes:
            if node.op == "input":
                buffer = self._buffer("input", node.out.dtype, node.out.shape, node.attrs["name"])
                inputs.append((node.attrs["name"], buffer))
                self._put(node.out, buffer)
            elif node.op == "state":
                self._put(node.out, self._buffer("state", node.out.dtype, node.out.shape, node.attrs["key"]))
        self.wanted = destinations(graph, self.static)
        packs, panel = self.config.packs_weights, self.config.panel
        tables = shared_tables(graph, self.groups, self.static, panel) if packs else {}
        self.tables = {t: m for t, m in tables.items() if self._format_layout(m) is None}
        made: dict[str, Buffer] = {}
        for group in self.groups:
            self._schedule_group(group, made)
        outputs = [(name, made[name] if name in made else self._copy_out(name, v)) for name, v in graph.outputs]
        self._update_states()
        return Schedule(graph.name, self.kernels, self.buffers, inputs, outputs)

    # -- kernels
    def _schedule_group(self, group: Group, made: dict[str, Buffer]) -> None:
        if group.loops:
            self._loops(group, made)
        else:
            schedule = {
                "matmul": self._matmul, "conv2d": self._conv2d, "attention": self._attention, "concat": self._concat,
                "scatter": self._scatter, "scan": self._scan, "sort": self._sort,
            }[group.anchor.op]  # fmt: skip
            schedule(group, made)

    def _loops(self, group: Group, made: dict[str, Buffer]) -> None:
        results = set(self.graph.results())
        loops = _LoopsBuilder(group)
        for node in group.nodes:

            def through(load: Expr, node: Node = node) -> Expr:
                v = node.inputs[load.value]
                return loops.known[v] if v in loops.known else self._element(v, load.args, node, loops.number)

            e = expr.drop_roundings(expr.substitute(node.attrs["expr"], loads=through))
            users = self.users.get(node.out, [])
            readers = sum(u in loops.members for u in users)
            stored = readers < len(users) or node.out in results
            loops.compute(node, e, readers + stored)
            if stored:
                loops.store(node, self._allocate(node.out, made, node.label))
        self._kernel(loops.kernel())

    def _element(self, v: Value, at: tuple[Expr, ...], node: Node, number: Callable[[Operand], int]) -> Expr:
        """Return element ``at`` of ``v``, which a loop of ``node`` reads from memory. ``number``: that of an operand
        among the inputs of the kernel."""
        if v in self.tables:
            packed, index = self._from_panels(v, at)
            return expr.load(number(packed), v.dtype, index)
        if (found := self._from_blocks(v, node)) is not None:
            packed, layout = found
            return decoded(layout, number(packed), packed.shape[1], at).cast(v.dtype)
        return expr.load(number(self.operand(v)), v.dtype, at)

    def _concat(self, group: Group, made: dict[str, Buffer]) -> None:
        node = group.anchor
        if node.out not in self.place:
            self._allocate(node.out, made, node.label)
        whole = self.place[node.out]
        for v, start in parts(node):
            target = part_of(whole, node, v.shape, start)
            if v.numel and self.operand(v) != target:
                self._kernel(Loops.copy(self.operand(v), target, node.sources))

    def _scatter(self, group: Group, made: dict[str, Buffer]) -> None:
        node = group.anchor
        base, src, *index = node.inputs
        out = self._scatter_target(node, made)
        if out != self.operand(base):
            self._kernel(Loops.copy(self.operand(base), out, node.sources))
        inputs = [self.operand(v) for v in index]
        e = expr.load(0, src.dtype, expr.identity_index(src.shape))
        read = [src]
        if len(group.nodes) > 1:  # computed where it is written
            e, read = group.nodes[1].attrs["expr"], group.nodes[1].inputs
        first = len(inputs)
        inputs += [self.operand(v) for v in read]
        e = expr.substitute(e, loads=lambda x: expr.load(first + x.value, x.dtype, x.args)).cast(base.dtype)
        idx = node.attrs["idx"]
        if node.attrs["mode"] != "set":
            inputs.append(out)
            e = expr.call(node.attrs["mode"], expr.load(len(inputs) - 1, base.dtype, idx), e)
        serial = bool(index)  # duplicate indices must be applied in order
        body = LoopBody(src.shape, (), (Stage("store", e, output=0, index=idx),), serial)
        self._kernel(
            Loops(
                label="scatter",
                inputs=tuple(inputs),
                outputs=(out,),
                body=body,
                sources=group.sources,
                flops=src.numel,
            )
        )

    def _scatter_target(self, node: Node, made: dict[str, Buffer]) -> Operand:
        """Return the base's memory if the scatter is its only reader and may overwrite it (a value of the arena, or a
        state that this scatter updates), else new memory."""
        base = node.inputs[0]
        memory = self.place.get(base)
        if memory is None or node.out in self.wanted or base in self.results or len(self.users[base]) > 1:
            return self._allocate(node.out, made, node.label)
        if memory.buffer.kind == "arena" or (
            memory.buffer.kind == "state" and self._becomes(node.out, memory.buffer.name)
        ):
            self.place[node.out] = memory
            return memory
        return self._allocate(node.out, made, node.label)

    def _becomes(self, v: Value, key: str) -> bool:
        """Whether ``v``, or the result of further scatters into it, is the contents of state ``key`` after the run."""
        while (key, v) not in self.updates:
            users = self.users.get(v, [])
            if v in self.results or len(users) != 1 or users[0].op != "scatter" or users[0].inputs[0] is not v:
                return False
            v = users[0].out
        return self.results.count(v) == 1 and v not in self.wanted

    def _scan(self, group: Group, made: dict[str, Buffer]) -> None:
        a = group.anchor.attrs
        self._row_kernel(group, made, Scan, op=a["kind"], axis=a["axis"])

    def _sort(self, group: Group, made: dict[str, Buffer]) -> None:
        self._row_kernel(group, made, Sort, **group.anchor.attrs)

    def _row_kernel(self, group: Group, made: dict[str, Buffer], kind: type[Scan | Sort], **own: Any) -> None:
        """Add a scan or a sort, which have no epilogue."""
        node = group.anchor
        outputs = tuple(self._allocate(v, made, node.label) for v in node.outputs)
        inputs, flops = (self._dense(node.inputs[0]),), node.inputs[0].numel
        self._kernel(kind(label=kind.kind, inputs=inputs, outputs=outputs, sources=node.sources, flops=flops, **own))


class _LoopsBuilder:
    """Collects the operands and stages of a group's loops kernel, node by node. ``known``: the expressions of the
    values so far."""

    def __init__(self, group: Group):
        self.group, self.members = group, set(group.nodes)
        self.known: dict[Value, Expr] = {}
        self._inputs: list[Operand] = []
        self._outputs: list[Operand] = []
        self._stages: list[Stage] = []

    def number(self, op: Operand) -> int:
        """Return the number of an operand among the inputs, to which it is added if it is new."""
        if op not in self._inputs:
            self._inputs.append(op)
        return self._inputs.index(op)

    def compute(self, node: Node, e: Expr, uses: int) -> None:
        """Compute ``e``, the value of a node, in a stage of its own if it is a reduction, or if there are several
        ``uses`` and it is not cheap."""
        if node.op == "reduce":
            e = self._computed(Stage("reduce", e, reduce=node.attrs["kind"]), node)
        elif self._is_per_row(node):  # its dims that others reduce have one element
            e = expr.substitute(e, dict.fromkeys(self.group.axes, expr.const(0, "int64")))
        elif uses > 1 and expr.cost(e) > CHEAP:
            e = self._computed(Stage("temp", e), node)
        self.known[node.out] = e

    def store(self, node: Node, out: Operand) -> None:
        """Store the value of a node in ``out``."""
        self._outputs.append(out)
        index, per_row = expr.identity_index(node.out.shape), self._is_per_row(node)
        number = len(self._outputs) - 1
        self._stages.append(Stage("store", self.known[node.out], output=number, index=index, per_row=per_row))

    def kernel(self) -> Loops:
        """Return the kernel."""
        domain, stages = self.group.domain, self._stages
        flops = math.prod(domain) * sum(expr.cost(s.expr) + (s.kind == "reduce") for s in stages if not s.per_row)
        reductions = dict.fromkeys(n.attrs["kind"] for n in self.group.nodes if n.op == "reduce")
        return Loops(
            label="_".join(reductions) or "map",
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            body=LoopBody(domain, self.group.axes, tuple(stages)),
            sources=self.group.sources,
            flops=flops,
        )

    def _computed(self, stage: Stage, node: Node) -> Expr:
        self._stages.append(stage)
        return expr.stage(len(self._stages) - 1, node.out.dtype)

    def _is_per_row(self, node: Node) -> bool:
        """Whether a node has one value for each row of a kernel that reduces."""
        return bool(self.group.axes) and (node.op == "reduce" or node.out.shape != self.group.domain)
