"""Partitioning of an IR between the NPU and the host: the fewest partitions, then the least transferred bytes.

1. In-place writes become explicit and dead nodes are removed (:mod:`npu_compiler.partitioning.functionalize`).
2. Every node gets a device: the NPU if the constraint checker has no reason against it. Cheap nodes (views and scalar
   functions) then move to the host if that saves more traffic than it costs: a minimum cut.
3. Nodes are ordered in the fewest alternating runs (``algorithms.py``); independent branches share a run.
4. Each run becomes a :class:`Partition` with an IR of its own. A :class:`TransferOp` precedes the first partition that
   reads a value of the other device. A value that was moved once stays on both.

The caller's inputs and outputs are not transfers: they may be host arrays or device buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..aten.data_dependent import ASSERTION
from ..aten.ir import IRGraph, Key, OpNode, StateUpdate, TensorSpec
from ..aten.json_reader import leaf_key, load_ir
from ..aten.op_names import STRUCTURAL
from ..graph.graph import LEAVES, VIEWS, Graph
from ..ops.lower import lower_ir
from ..ops.registry import lower_call
from ..support import progress
from ..support.errors import CompileError, ConfigError, Reason, Unsupported
from ..target_config import TargetConfig, target_config
from .algorithms import fewest_runs, min_cut
from .constraint_checker import NodeChecker, passed_through
from .cut import cut, nbytes, readers_by_weight
from .exclusions import Exclusions, IsSupported
from .functionalize import SharedStorage, functionalize
from .plan import HOST, NPU, PartitionPlan, name_of

_CHEAPER = Reason("transfer", "cheap, and fewer bytes move if it runs on the host")


def partition(
    ir: Any,
    is_supported_fn: IsSupported | None = None,
    *,
    target: str | TargetConfig = "cpu",
    force_cpu: Collection[str] = (),
    check: Callable[[OpNode], Reason | None] | None = None,
    minimise_transfers: bool = True,
    is_supported: IsSupported | None = None,
) -> PartitionPlan:
    """Plan the execution of an IR (anything that ``load_ir`` takes).

    ``check(node)`` returns why a node cannot run on the NPU, or None; the default is the constraint checker of
    ``target``. Two arguments exclude further nodes. ``force_cpu`` has names of nodes and ops. ``is_supported_fn`` is
    called with an op's name, or with the name and the attributes if it takes two parameters, and returns whether the
    op may run on the NPU; ``is_supported`` is another name for it. An in-place op is excluded if either its IR name
    (``aten.relu_.default``) or that of its functional variant is.

    With ``minimise_transfers=False`` only nodes that are excluded, refused, or inseparable from those run on the host.

    Raises ``ConfigError`` for a name in ``force_cpu`` that does not exist, ``IRError`` for malformed IR.
    """
    if is_supported_fn is not None and is_supported is not None:
        raise ConfigError("is_supported and is_supported_fn are two names of one argument: give one of them")
    config = target_config(target)
    loaded = load_ir(ir)
    excluded = Exclusions(loaded, force_cpu, is_supported_fn or is_supported)
    graph, shared = functionalize(loaded)
    graph = _without_dead_nodes(graph, shared)
    check = check or NodeChecker(config, graph)
    reasons: dict[str, Reason] = {}
    with progress.step(f"checking the ops of {graph.model_name}", len(graph.nodes)) as step:
        for node in graph.nodes:
            step.advance()
            if node.op_type in STRUCTURAL:
                continue
            if (reason := excluded(node) or check(node)) is not None:
                why = f" ({node.note})" if node.note and reason.rule != "dtype" else ""
                reasons[node.name] = replace(reason, detail=reason.detail + why)
    if shared and not reasons:
        reasons = _refused_together(graph)
    units = _Units(graph, shared)
    if reasons:
        _follow(units, shared, reasons)
        if minimise_transfers:
            _balance(units, reasons)
    return _plan(units, reasons, whole=not passed_through(graph, config))


# ------------------------------------------------------------------------------------------------------ preparation


def _without_dead_nodes(ir: IRGraph, shared: list[SharedStorage]) -> IRGraph:
    """Drop nodes that no output or buffer depends on (unused branches), assertions about numbers excepted."""
    producer = {n.name: n for n in ir.nodes}
    live: set[str] = set()
    stack = [ir.key(t)[0] for t in (*ir.graph_outputs, *(u.value for u in ir.state))]
    stack += [name for storage in shared for name in storage.writers]
    stack += [n.name for n in ir.nodes if n.op_type == ASSERTION]
    while stack:
        node = producer.get(stack.pop())
        if node is not None and node.name not in live:
            live.add(node.name)
            stack.extend(ir.key(t)[0] for t in node.inputs)
    return ir if len(live) == len(ir.nodes) else replace(ir, nodes=[n for n in ir.nodes if n.name in live])


def _refused_together(ir: IRGraph) -> dict[str, Reason]:
    """Return reasons that only lowering the whole graph finds: writes through views that cannot be expressed."""
    try:
        lower_ir(ir)
    except CompileError as error:
        return {name: reason for name, _, reason in error.reasons}
    return {}


def _follow(units: _Units, shared: list[SharedStorage], reasons: dict[str, Reason]) -> None:
    """Put inseparable nodes on one device: those that share memory, and all that access one buffer."""
    ir = units.ir
    for storage in shared:
        if storage.root[1] < 0 and leaf_key(ir, storage.root[0]) in ir.constants:
            where = ", ".join(sorted(storage.writers))
            raise CompileError(f"{where}: a constant is written in place through a view; call .clone() on it first")
        detail = f"shares memory with {name_of(storage.root)}, which is written in place while views of it are in use"
        for name in storage.accesses:
            if name in units.of:
                reasons.setdefault(units.head(name), Reason("alias", detail, "call .clone() before the in-place op"))
    for update in ir.state:
        touching = [units.members[u][0].name for u in units.touching(update)]
        on_host = next((name for name in touching if name in reasons), None)
        for name in touching if on_host else ():
            reasons.setdefault(name, Reason("state", f"uses buffer {update.key!r}, which {on_host} keeps on the host"))


# ------------------------------------------------------------------------------------------------------- assignment


class _Units:
    """Inseparable units of nodes, one per node with its getitems; ``deps`` includes the order of in-place writes."""

    def __init__(self, ir: IRGraph, shared: list[SharedStorage]):
        self.ir = ir
        self.members: list[list[OpNode]] = []
        self.of: dict[str, int] = {}
        self.deps: list[set[int]] = []
        self.readers: dict[Key, set[int]] = {}
        self.specs: dict[Key, TensorSpec] = {}
        self._readers_by_weight = readers_by_weight(ir)
        for node in ir.nodes:
            source = self.of.get(ir.key(node.inputs[0])[0]) if node.op_type in STRUCTURAL else None
            unit = len(self.members) if source is None else source
            if source is None:
                self.members.append([])
                self.deps.append(set())
            self.members[unit].append(node)
            self.of[node.name] = unit
            self.specs.update({(node.name, i): t for i, t in enumerate(node.outputs)})
            for t in node.inputs:
                made_by = self.of.get(ir.key(t)[0])
                if made_by is not None and made_by != unit:
                    self.deps[unit].add(made_by)
                    self.readers.setdefault(ir.key(t), set()).add(unit)
        for storage in shared:
            self._keep_order(storage)

    def head(self, node: str) -> str:
        """Return the node that decides where ``node`` runs: itself, or for a getitem the producer of the tuple."""
        return self.members[self.of[node]][0].name

    def touching(self, update: StateUpdate) -> list[int]:
        """Return the units that read the buffer of ``update`` or compute its next value."""
        made_by, readers = self.ir.key(update.value)[0], self._readers_by_weight.get(update.key, ())
        return sorted({self.of[n] for n in (made_by, *readers) if n in self.of})

    def _keep_order(self, storage: SharedStorage) -> None:
        """Order a write after all earlier accesses, and every access after the last write."""
        since: list[int] = []  # the last write, if any, and the accesses after it
        for name in storage.accesses:
            if name in self.of:
                unit = self.of[name]
                self.deps[unit].update(u for u in (since if name in storage.writers else since[:1]) if u != unit)
                since = [unit] if name in storage.writers else [*since, unit]

    def runs(self, reasons: Mapping[str, Reason]) -> list[list[int]]:
        return fewest_runs([self.device(u, reasons) for u in range(len(self.members))], self.deps)

    def device(self, unit: int, reasons: Mapping[str, Reason]) -> str:
        return HOST if self.members[unit][0].name in reasons else NPU

    def crossing(self, reasons: Mapping[str, Reason]) -> int:
        """Return the bytes that are transferred."""
        total = 0
        for key, readers in self.readers.items():
            home = self.device(self.of[key[0]], reasons)
            total += nbytes(self.specs[key]) * any(self.device(u, reasons) != home for u in readers)
        return total


def _cpu_cost(node: OpNode) -> float:
    """Return the cost of a node on the host in bytes of transfer: an eighth of the bytes of each element it computes.

    It is infinite unless the node lowers to views and scalar functions.
    """
    graph = Graph()
    try:
        inputs = [graph.input(str(i), t.shape, t.dtype) for i, t in enumerate(node.inputs)]
        lower_call(graph, node.op_type, inputs, node.attrs)
    except Unsupported:  # placed on the NPU by rules other than this registry's
        return math.inf
    ops = {n.op for n in graph.nodes} - LEAVES
    if not ops <= VIEWS | {"pointwise"}:
        return math.inf
    return 1 + ("pointwise" in ops) * sum(map(nbytes, node.outputs)) / 8


def _balance(units: _Units, reasons: dict[str, Reason]) -> None:
    """Move cheap nodes to the host where that transfers fewer bytes and needs no more partitions.

    The best set is the host's side of a minimum cut. A value that is read on the other device costs its bytes once, a
    moved node its ``_cpu_cost``; nodes that must not move are tied to their side.
    """
    network: dict[tuple[Any, Any], float] = {}
    pinned = {unit for update in units.ir.state for unit in units.touching(update)}
    for unit, nodes in enumerate(units.members):
        if units.device(unit, reasons) == HOST:
            network[unit, HOST] = math.inf
        else:
            network[NPU, unit] = math.inf if unit in pinned else _cpu_cost(nodes[0])
    if all(math.isinf(c) for c in network.values()):
        return
    for key, readers in units.readers.items():
        home, size = units.of[key[0]], nbytes(units.specs[key])
        network[home, ("to cpu", key)] = network[("to npu", key), home] = size
        for reader in readers:
            network[("to cpu", key), reader] = network[reader, ("to npu", key)] = math.inf
    moved = sorted(u for u in min_cut(network, NPU, HOST) if isinstance(u, int) and units.device(u, reasons) == NPU)

    runs, traffic = len(units.runs(reasons)), units.crossing(reasons)
    for group in _connected(moved, units.deps):
        names = [units.members[u][0].name for u in group]
        trial = {**reasons, **dict.fromkeys(names, _CHEAPER)}
        saved, more = traffic - units.crossing(trial), len(units.runs(trial)) - runs
        if saved > 0 and more <= 0:
            reasons.update(dict.fromkeys(names, _CHEAPER))
            runs, traffic = runs + more, traffic - saved


def _connected(units: list[int], deps: list[set[int]]) -> Iterator[list[int]]:
    """Return the weakly connected components of ``units``."""
    group = {u: [u] for u in units}
    for u in units:
        for d in deps[u]:
            if d in group and group[d] is not group[u]:
                merged = group[d] + group[u]
                group.update(dict.fromkeys(merged, merged))
    yield from {id(g): g for g in group.values()}.values()


# -------------------------------------------------------------------------------------------------------------- plan


def _plan(units: _Units, reasons: dict[str, Reason], whole: bool) -> PartitionPlan:
    """Build the plan. ``whole``: a partition of all nodes may also return inputs of the model unchanged."""
    ir = units.ir
    for nodes in units.members:
        head = nodes[0]
        for node in nodes[1:] if head.name in reasons else ():
            reasons[node.name] = Reason("follows", f"takes an output of {head.name}, which runs on the host")
    position = {n.name: i for i, n in enumerate(ir.nodes)}
    runs = []
    for run in units.runs(reasons):
        nodes = sorted((n for u in run for n in units.members[u]), key=lambda n: position[n.name])
        runs.append((units.device(run[0], reasons), nodes))
    ordered = {n.name: reasons[n.name] for n in ir.nodes if n.name in reasons}
    return cut(ir, runs, ordered, whole)
