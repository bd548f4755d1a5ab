"""Cuts a graph into partitions: from runs of nodes, each on one device, to the steps of a plan.

The rest of a plan follows from the runs: the inputs and outputs of each partition, the transfers, and the partition
that owns each buffer. A saved plan therefore contains only the runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..aten.ir import IRGraph, Key, OpNode, StateUpdate, TensorSpec
from ..aten.json_reader import graph_weights_used, leaf_key
from ..support import dtypes
from ..support.errors import Reason
from .plan import HOST, Partition, PartitionPlan, TransferOp, name_of

Run = tuple[str, Sequence[OpNode]]  # the device, and its nodes in the order of the graph


def cut(ir: IRGraph, runs: Sequence[Run], reasons: Mapping[str, Reason], whole: bool = False) -> PartitionPlan:
    """Return the plan that executes ``runs`` in this order.

    ``runs`` have every node of ``ir`` once, each after the nodes whose outputs it reads. ``whole``: a single partition
    on the NPU may also return inputs of the model unchanged.
    """
    plan = PartitionPlan([], dict(reasons), list(ir.graph_inputs), list(ir.graph_outputs), ir)
    if len(runs) == 1 and (whole or runs[0][0] == HOST):
        device, nodes = runs[0]
        inputs = tuple(ir.key(t) for t in ir.graph_inputs)
        outputs = tuple(ir.key(t) for t in ir.graph_outputs)
        plan.steps.append(Partition(0, device, tuple(n.name for n in nodes), inputs, outputs, ir))
    else:
        _Cutter(plan, runs).cut()
    return plan


def readers_by_weight(ir: IRGraph) -> dict[str, list[str]]:
    """Return state_dict key -> names of the nodes that read the weight or buffer."""
    found: dict[str, list[str]] = {}
    for node in ir.nodes:
        for t in node.inputs:
            if t.producer is None:
                found.setdefault(leaf_key(ir, t.name), []).append(node.name)
    return found


def nbytes(t: TensorSpec) -> int:
    """Return the bytes of a value; 0 for a data-dependent size, whose readers are on the host, too."""
    if not t.is_static:
        return 0
    return math.prod(t.shape) * dtypes.DTYPES[t.dtype].size


class _Cutter:
    """Adds the steps of a plan to it."""

    def __init__(self, plan: PartitionPlan, runs: Sequence[Run]):
        self.plan, self.runs, self.ir = plan, runs, plan.ir
        self.home = {n.name: i for i, (_, nodes) in enumerate(runs) for n in nodes}
        self.specs = {(n.name, i): t for n in plan.ir.nodes for i, t in enumerate(n.outputs)}
        self.placeholders: dict[str, list[str]] = {}
        for placeholder, key in plan.ir.weight_name_mapping.items():
            self.placeholders.setdefault(key, []).append(placeholder)
        self.place = {w.name: at for at, w in enumerate(plan.ir.weights)}
        self.read = plan.ir.weights_of_model or graph_weights_used(plan.ir)

    def cut(self) -> None:
        ir = self.ir
        owned = self._own_state()
        reads = [dict.fromkeys(self._reads(i)) for i in range(len(self.runs))]
        last_read = {key: i for i, keys in enumerate(reads) for key in keys}
        kept = {ir.key(t) for t in ir.graph_outputs}.union(self.plan.feeds.values())
        present: set[tuple[Key, str]] = set()
        for i, (device, nodes) in enumerate(self.runs):
            for key in reads[i]:
                src = self.runs[self.home[key[0]]][0] if key[0] in self.home else device
                if src != device and (key, device) not in present:
                    present.add((key, device))
                    self.plan.steps.append(TransferOp(key, src, device, nbytes(self.specs[key])))
            made = ((n.name, j) for n in nodes for j in range(len(n.outputs)))
            outputs = tuple(k for k in made if k in kept or last_read.get(k, i) > i)
            graph = self._graph(i, reads[i], outputs, owned.get(i, []))
            names = tuple(n.name for n in nodes)
            self.plan.steps.append(Partition(i, device, names, tuple(reads[i]), outputs, graph))

    def _own_state(self) -> dict[int, list[StateUpdate]]:
        """Return the buffers by the partition that can own them; the others are listed in ``feeds``.

        The owner computes the new contents and is the only reader of the old ones. The model itself reads a buffer that
        it returns, and a buffer whose contents become those of another one.
        """
        owned: dict[int, list[StateUpdate]] = {}
        ir, readers = self.ir, readers_by_weight(self.ir)
        results = [*ir.graph_outputs, *(u.value for u in ir.state)]
        returned = {leaf_key(ir, t.name) for t in results if t.producer is None}
        for update in ir.state:
            made_by = ir.key(update.value)[0]
            homes = {self.home[n] for n in (made_by, *readers.get(update.key, ())) if n in self.home}
            if len(homes) == 1 and made_by in self.home and update.key not in returned:
                owned.setdefault(homes.pop(), []).append(update)
            else:
                self.plan.feeds[update.key] = ir.key(update.value)
        return owned

    def _reads(self, i: int) -> Iterator[Key]:
        """Return the values that partition ``i`` takes from outside, except weights and constants."""
        for node in self.runs[i][1]:
            for t in node.inputs:
                if t.producer is None:
                    if leaf_key(self.ir, t.name) in self.plan.feeds:
                        yield (t.name, -1)
                elif self.home.get(t.producer[0]) != i:
                    yield t.producer

    def _graph(
        self, i: int, reads: Mapping[Key, None], outputs: Iterable[Key], state: Sequence[StateUpdate]
    ) -> IRGraph:
        ir = self.ir

        def local(t: TensorSpec) -> TensorSpec:
            key = ir.key(t)
            name = name_of(key)
            return TensorSpec(name, t.shape, t.dtype, (name, 0)) if key in reads else t

        nodes = [replace(n, inputs=[local(t) for t in n.inputs]) for n in self.runs[i][1]]
        seen = {ir.key(t): local(t) for n in self.runs[i][1] for t in n.inputs}
        results = [TensorSpec(name_of(k), self.specs[k].shape, self.specs[k].dtype, k) for k in outputs]
        leaves = dict.fromkeys(t.name for n in nodes for t in n.inputs if t.producer is None)
        leaves |= dict.fromkeys(p for u in state for p in self.placeholders.get(u.key, ()))
        mapping = {p: ir.weight_name_mapping[p] for p in leaves if p in ir.weight_name_mapping}
        keys = {*mapping.values(), *leaves}
        return replace(
            ir,
            model_name=f"{ir.model_name}.p{i}",
            graph_inputs=[seen[k] for k in reads],
            graph_outputs=results,
            weights=[ir.weights[at] for at in sorted(self.place[k] for k in keys & self.place.keys())],
            weight_name_mapping=mapping,
            nodes=nodes,
            constants={k: ir.constants[k] for k in sorted(keys & ir.constants.keys())},
            state=[StateUpdate(u.key, local(u.value)) for u in state],
            weights_of_model=self.read,
        )
