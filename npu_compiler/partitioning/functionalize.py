"""In-place writes of the IR made explicit, as far as views allow it.

An in-place op of PyTorch changes every tensor that shares the memory. If all later readers refer to the written tensor
itself, the op equals its functional variant with those readers redirected: :func:`functionalize` does that. If a view
is written before its base is read, or the reverse, the nodes need shared memory. They are reported as
:class:`SharedStorage`, and the partitioner keeps them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..aten.ir import IRGraph, Key, OpNode, StateUpdate, TensorSpec, selected
from ..aten.op_names import STRUCTURAL, functional_name, is_in_place
from ..ops import find, result_of


@dataclass
class SharedStorage:
    """A tensor that is written in place while views of it are alive.

    ``accesses`` names all nodes that read or produce one of its values, in program order; ``writers`` names those that
    write it in place.
    """

    root: Key
    members: set[Key] = field(default_factory=set)
    accesses: list[str] = field(default_factory=list)
    writers: set[str] = field(default_factory=set)


def functionalize(ir: IRGraph) -> tuple[IRGraph, list[SharedStorage]]:
    """Replace in-place ops by their functional variants wherever the results are the same.

    Buffers that nodes write become ``state`` if they are not already. Returns the new graph and the storages that
    cannot be rewritten: their nodes keep their in-place ops and must run in program order on one memory.
    """
    if not any(is_in_place(n.op_type) for n in ir.nodes):
        return ir, []
    memory = _Memory(ir)
    shared = memory.shared()
    keep = {key for s in shared for key in s.members}
    return _rewrite(ir, memory, keep), shared


def _written(node: OpNode) -> bool:
    return is_in_place(node.op_type) and bool(node.inputs) and bool(node.outputs)


def _viewed(node: OpNode, output: int) -> TensorSpec:
    """Return the input whose memory an output of a view op may share."""
    op = find(node.op_type)
    each = op is not None and op.params[0].kind == "list" and len(node.inputs) == len(node.outputs)
    return node.inputs[output if each else 0]


class _Memory:
    """``root`` maps a value to the tensor whose memory it may share, ``same`` to the first name of the same tensor."""

    def __init__(self, ir: IRGraph):
        self.ir = ir
        self.root: dict[Key, Key] = {}
        self.same: dict[Key, Key] = {}
        for node in ir.nodes:
            if node.op_type in STRUCTURAL:
                self._link((node.name, 0), ir.key(selected(node)), same=True)
            elif _written(node):
                self._link((node.name, 0), ir.key(node.inputs[0]), same=True)
            elif result_of(node.op_type).may_share and node.inputs:
                for i in range(len(node.outputs)):
                    self._link((node.name, i), ir.key(_viewed(node, i)), same=False)

    def _link(self, out: Key, source: Key, same: bool) -> None:
        self.root[out] = self.root_of(source)
        if same:
            self.same[out] = self.same.get(source, source)

    def root_of(self, key: Key) -> Key:
        """Return the tensor whose memory the value may share."""
        return self.root.get(key, key)

    def same_as(self, key: Key) -> Key:
        """Return the first name of the tensor."""
        return self.same.get(key, key)

    def shared(self) -> list[SharedStorage]:
        """Return storages with a write after which another view, made before the write, is read."""
        ir = self.ir
        end = len(ir.nodes)
        last_use: dict[Key, int] = {}
        for position, node in enumerate(ir.nodes):
            read = node.inputs if node.op_type not in STRUCTURAL else [selected(node)]
            last_use.update({ir.key(t): position for t in read})
        results = [*ir.graph_outputs, *(u.value for u in ir.state)]
        last_use.update({ir.key(t): end for t in results})
        last_use.update({leaf: end for leaf in _buffers(ir)})  # a buffer's contents outlive the run
        born = {(n.name, i): p for p, n in enumerate(ir.nodes) for i in range(len(n.outputs))}
        members: dict[Key, list[Key]] = {}
        for key in {**dict.fromkeys(last_use), **dict.fromkeys(born)}:
            members.setdefault(self.root_of(key), []).append(key)

        hazards: set[Key] = set()
        for position, node in enumerate(ir.nodes):
            if _written(node):
                target = ir.key(node.inputs[0])
                for key in members[self.root_of(target)]:
                    before = born.get(key, -1) < position < last_use.get(key, -1)
                    if before and self.same_as(key) != self.same_as(target):
                        hazards.add(self.root_of(target))
        return [self._describe(root, members[root]) for root in members if root in hazards]

    def _describe(self, root: Key, members: Iterable[Key]) -> SharedStorage:
        storage = SharedStorage(root, set(members))
        for node in self.ir.nodes:
            if node.op_type in STRUCTURAL:  # picks from a tuple, touches no memory
                continue
            keys = [self.ir.key(t) for t in node.inputs] + [(node.name, i) for i in range(len(node.outputs))]
            if storage.members.intersection(keys):
                storage.accesses.append(node.name)
                if _written(node) and self.root_of(self.ir.key(node.inputs[0])) == root:
                    storage.writers.add(node.name)
        return storage


def _buffers(ir: IRGraph) -> dict[Key, str]:
    """Map the leaf value of every weight to its state_dict key. Constants are excluded: writes to them do not last."""
    weights = {w.name for w in ir.weights} - set(ir.constants)
    return {(name, -1): key for name, key in ir.weight_name_mapping.items() if key in weights}


def _rewrite(ir: IRGraph, memory: _Memory, keep: set[Key]) -> IRGraph:
    newest: dict[Key, TensorSpec] = {}  # first name of a tensor -> its contents now

    def current(t: TensorSpec) -> TensorSpec:
        key = ir.key(t)
        return t if key in keep else newest.get(memory.same_as(key), t)

    nodes = []
    for node in ir.nodes:
        inputs = [current(t) for t in node.inputs]
        op_type = node.op_type
        if _written(node) and ir.key(node.inputs[0]) not in keep:
            op_type = functional_name(op_type)
            out = node.outputs[0]
            newest[memory.same_as(ir.key(node.inputs[0]))] = TensorSpec(out.name, out.shape, out.dtype, (node.name, 0))
        elif node.op_type in STRUCTURAL:  # its inputs stay the producer's own outputs
            inputs = list(node.inputs)
        nodes.append(replace(node, op_type=op_type, inputs=inputs))

    state = [StateUpdate(u.key, current(u.value)) for u in ir.state]
    declared = {u.key for u in ir.state}
    leaves = {(t.name, -1): t for n in ir.nodes for t in n.inputs if t.producer is None}
    written = {memory.same_as(ir.key(n.inputs[0])) for n in ir.nodes if _written(n)}
    for leaf, key in _buffers(ir).items():
        root_written = leaf in written or leaf in keep
        if key not in declared and leaf in leaves and root_written:
            state.append(StateUpdate(key, current(leaves[leaf])))
            declared.add(key)
    return replace(ir, nodes=nodes, graph_outputs=[current(t) for t in ir.graph_outputs], state=state)
