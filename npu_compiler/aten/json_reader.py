"""IR JSON to ``IRGraph``. A document is checked completely before it is used.

The format is that of pytorch-ir (``torch_ir``), with a few more fields that our writer adds: ``state`` (mutated
buffers), ``constants`` as base64 or as one repeated value, ``producer_node`` on graph outputs, and an attribute that is
null if a tensor argument is None although a later one is given. Parts that depend on data
(:mod:`npu_compiler.aten.data_dependent`) have dimensions that are strings ('u0'), references to numbers in attributes,
and for control flow the ``graphs`` of a node (name -> a document of this form). The ``location`` of a node (``module``,
``kind`` and ``source``, all optional texts) says where it comes from (:class:`~npu_compiler.aten.ir.Location`).

A tensor is referred to by its producer (``producer_node``, ``producer_output_idx``). Without these fields it is found
by its name, which must then be unique: a graph input, a placeholder of ``weight_name_mapping``, a weight or constant by
its own name, or the output of an earlier node.

Every error is an ``IRError`` that starts with the JSON path of the offending value, ``$`` being the whole document.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from ..support import dtypes
from ..support.errors import IRError
from .complex_pairs import complex_as_pairs
from .ir import GETITEM, IRGraph, OpNode, StateUpdate, TensorSpec, selected
from .json_values import (
    MAX_REPEATED_BYTES,
    as_dtype,
    as_list,
    as_mapping,
    as_natural,
    as_shape,
    as_string,
    check_numbers,
    check_tensor_lists,
    check_texts,
    describe,
    fail,
    get,
    read_attrs,
    read_constant,
    read_location,
    show,
)
from .rotary_regions import restore_regions

__all__ = ["graph_weights_used", "leaf_key", "load_ir", "load_ir_from_dict"]


MAX_GRAPH_DEPTH = 8  # of control flow inside control flow

# ----------------------------------------------------------------------------------------------------------------- read


def load_ir(
    source: str | os.PathLike[str] | Mapping[str, Any] | IRGraph | Any, *, allowed_ops: Collection[str] = ()
) -> IRGraph:
    """Return the ``IRGraph`` of a JSON file, a dict of that form, a ``torch_ir.IR`` object or an ``IRGraph`` (as is).

    In the result graph inputs, graph outputs, state values and node inputs carry ``producer`` (a graph input is its own
    producer, index 0); weights and constants have none. Attributes hold plain Python values: dtypes are names such as
    'float32', devices, layouts and memory formats are strings without the ``torch.`` prefix. Rotary tables that the
    extractor left without a body are spelled out (:mod:`npu_compiler.aten.rotary_regions`).

    A file need not be trusted: a node that the NPU does not run goes to PyTorch only if its op computes with tensors
    and has no other effect (``allowed_ops.py``). Ops that another library registers ('torchvision.nms.default') run
    only if ``allowed_ops`` names them; the caller then trusts the library's code with the arguments in the file.

    Raises:
        IRError: the source cannot be read or violates the format; the message starts with the JSON path.
    """
    graph = source if isinstance(source, IRGraph) else load_ir_from_dict(_document(source))
    return replace(graph, allowed_ops=graph.allowed_ops.union(allowed_ops)) if allowed_ops else graph


def _document(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | os.PathLike):
        return _parse_file(Path(source))
    to_dict = getattr(source, "to_dict", None)
    if not callable(to_dict):
        fail("$", f"expected a path, a dict, a torch_ir.IR object or an IRGraph, got {type(source).__name__}")
    return cast("Mapping[str, Any]", to_dict())


def load_ir_from_dict(d: Mapping[str, Any]) -> IRGraph:
    """Return the ``IRGraph`` of a parsed JSON document (see ``load_ir``); ``d`` is not modified. Raises ``IRError``."""
    return complex_as_pairs(restore_regions(_Reader(as_mapping(d, "$")).graph()))


def leaf_key(graph: IRGraph, name: str) -> str:
    """Return the key, in ``graph.constants`` or the state_dict, of the leaf that nodes refer to as ``name``."""
    return graph.weight_name_mapping.get(name, name)


def graph_weights_used(graph: IRGraph) -> dict[str, TensorSpec]:
    """Return state_dict key -> spec of the weights that a weight file must supply, in the order of ``graph.weights``.

    These are the weights that a node, a graph output or a state buffer refers to, except those in ``constants``.
    """
    used = {update.key for update in graph.state}
    for t in _uses(graph):
        if t.producer is None:
            used.add(leaf_key(graph, t.name))
    return {w.name: w for w in graph.weights if w.name in used and w.name not in graph.constants}


def _uses(graph: IRGraph) -> Iterator[TensorSpec]:
    for node in graph.nodes:
        yield from node.inputs
    yield from graph.graph_outputs
    for update in graph.state:
        yield update.value


def _parse_file(path: Path) -> Mapping[str, Any]:
    duplicates: list[tuple[dict[str, Any], str]] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(k for k, _ in pairs)
            duplicates.append((result, next(k for k, n in counts.items() if n > 1)))
        return result

    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=build)
    except OSError as e:
        raise IRError(f"{path}: cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise IRError(f"{path}: it is not UTF-8 text (byte {e.start}); expected a .pt2 file, or IR JSON") from e
    except json.JSONDecodeError as e:
        raise IRError(f"{path}: it is not valid JSON: {e.msg} at line {e.lineno} column {e.colno}") from e
    except RecursionError as e:
        raise IRError(f"{path}: it is nested too deeply to be IR JSON") from e
    except ValueError as e:  # an integer literal beyond Python's digit limit, a NUL in the path
        raise IRError(f"{path!s:.200}: it cannot be read as JSON: {e}") from e
    for owner, key in duplicates:
        fail(_find(document, owner), f"duplicate key {key!r}")
    return as_mapping(document, "$")


def _find(document: Any, target: dict[str, Any]) -> str:
    """Return the JSON path of the object ``target`` (by identity) inside ``document``."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if value is target:
            return path or "$"
        if isinstance(value, dict):
            pending.extend((f"{path}.{k}" if path else k, v) for k, v in value.items())
        elif isinstance(value, list):
            pending.extend((f"{path}[{i}]", v) for i, v in enumerate(value))
    return "$"  # the object itself was shadowed by a duplicate of its own key


class _Reader:
    """Reads one document. Every method raises ``IRError`` with the path of the value that it rejects."""

    def __init__(self, doc: Mapping[str, Any], depth: int = 0):
        self.doc = doc
        self.depth = depth  # of the graph inside others
        self.values: dict[tuple[str, int], TensorSpec] = {}  # graph inputs and node outputs read so far
        self.by_name: dict[str, list[tuple[str, int]]] = {}  # tensor name -> those of them that bear it
        self.leaves: dict[str, tuple[tuple[int, ...], str]] = {}  # weight or constant key -> shape, dtype
        self.mapping: dict[str, str] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.arities: dict[str, int] = {}  # node -> number of outputs
        self.later: dict[str, int] = {}  # node -> index, to tell "used before definition" from "does not exist"

    def graph(self) -> IRGraph:
        doc = self.doc
        inputs = [self._graph_input(t, f"graph_inputs[{i}]") for i, t in self._items("graph_inputs")]
        weights = [self._weight(t, f"weights[{i}]") for i, t in self._items("weights")]
        self.mapping = self._name_mapping()
        self.constants = self._constants()
        raw_nodes = self._items("nodes")
        for i, raw in raw_nodes:
            self._declare(raw, i)
        nodes = [self._node(raw, f"nodes[{i}]") for i, raw in raw_nodes]
        outputs = [self._result(t, f"graph_outputs[{i}]") for i, t in self._items("graph_outputs")]
        return IRGraph(
            model_name=as_string(doc.get("model_name", ""), "model_name", empty=True),
            graph_inputs=inputs,
            graph_outputs=outputs,
            weights=weights,
            weight_name_mapping=self.mapping,
            nodes=nodes,
            constants=self.constants,
            state=self._state(),
            pytorch_version=as_string(doc.get("pytorch_version", ""), "pytorch_version", empty=True),
        )

    def _items(self, key: str) -> list[tuple[int, Any]]:
        return list(enumerate(as_list(get(self.doc, key, "$"), key)))

    # ----------------------------------------------------------------------------------------------------------- leaves

    def _tensor(self, raw: Any, path: str, *, static: bool = False) -> TensorSpec:
        """Read a tensor as written: ``producer`` is set only if the JSON names one."""
        obj = as_mapping(raw, path)
        name = as_string(get(obj, "name", path), f"{path}.name")
        shape = as_shape(get(obj, "shape", path), f"{path}.shape", static=static)
        dtype = as_dtype(get(obj, "dtype", path), f"{path}.dtype")
        producer = None
        if obj.get("producer_node") is not None:
            index = as_natural(obj.get("producer_output_idx", 0), f"{path}.producer_output_idx")
            producer = (as_string(obj["producer_node"], f"{path}.producer_node"), index)
        return TensorSpec(name, shape, dtype, producer)

    def _graph_input(self, raw: Any, path: str) -> TensorSpec:
        t = self._tensor(raw, path, static=self.depth == 0)
        key = (t.name, 0)
        if key in self.values:
            fail(f"{path}.name", f"duplicate graph input {t.name!r}")
        if t.producer not in (None, key):
            fail(f"{path}.producer_node", f"a graph input is produced by no node, got {show(t.producer[0])}")
        spec = TensorSpec(t.name, t.shape, t.dtype, key)
        self._define(key, spec)
        return spec

    def _weight(self, raw: Any, path: str) -> TensorSpec:
        t = self._tensor(raw, path, static=True)
        if t.name in self.leaves:
            fail(f"{path}.name", f"duplicate weight {t.name!r}")
        self.leaves[t.name] = (t.shape, t.dtype)
        return TensorSpec(t.name, t.shape, t.dtype)

    def _name_mapping(self) -> dict[str, str]:
        raw = as_mapping(self.doc.get("weight_name_mapping", {}), "weight_name_mapping")
        constants = as_mapping(self.doc.get("constants", {}), "constants")
        for placeholder, key in raw.items():
            path = f"weight_name_mapping[{placeholder!r}]"
            as_string(placeholder, path)
            if as_string(key, path) not in self.leaves and key not in constants:
                fail(path, f"{show(key)} is neither in weights nor in constants")
            if (placeholder, 0) in self.values:
                fail(path, "a graph input has the same name")
        return dict(raw)

    def _constants(self) -> dict[str, np.ndarray]:
        constants: dict[str, np.ndarray] = {}
        repeated = 0
        for key, raw in as_mapping(self.doc.get("constants", {}), "constants").items():
            path = f"constants[{key!r}]"
            declared = self.leaves.get(key)
            value = read_constant(as_mapping(raw, path), path, declared[0] if declared else None)
            found = (value.shape, dtypes.name_of(value.dtype))
            repeated += value.nbytes if "fill" in raw else 0
            if repeated > MAX_REPEATED_BYTES:
                fail(path, f"repeated values take {repeated} bytes so far, at most {MAX_REPEATED_BYTES} are read")
            if declared and declared != found:
                fail(path, f"is {describe(*found)}, but weights declares {describe(*declared)}")
            self.leaves[key] = found
            constants[key] = value
        # Extraction on the meta device drops constants without elements, which have no data to lose.
        for placeholder, key in self.mapping.items():
            shape, dtype = self.leaves[key]
            if placeholder.startswith("c_") and 0 in shape and key not in constants:
                constants[key] = np.zeros(shape, dtypes.numpy_dtype(dtype))
        return constants

    # ------------------------------------------------------------------------------------------------------------ nodes

    def _declare(self, raw: Any, i: int) -> None:
        path = f"nodes[{i}]"
        name = as_string(get(as_mapping(raw, path), "name", path), f"{path}.name")
        if name in self.later:
            fail(f"{path}.name", f"duplicate node name {name!r}, also nodes[{self.later[name]}]")
        if (name, 0) in self.values:
            fail(f"{path}.name", f"a graph input has the same name {name!r}")
        if name in self.mapping:
            fail(f"{path}.name", f"a weight placeholder has the same name {name!r}")
        self.later[name] = i

    def _node(self, raw: Mapping[str, Any], path: str) -> OpNode:
        name = raw["name"]
        op_type = as_string(get(raw, "op_type", path), f"{path}.op_type")
        inputs = self._tensors(raw, "inputs", path)
        outputs = []
        for i, t in enumerate(as_list(get(raw, "outputs", path), f"{path}.outputs")):
            where = f"{path}.outputs[{i}]"
            spec = self._tensor(t, where)
            if spec.producer not in (None, (name, i)):
                fail(f"{where}.producer_node", f"an output of node {name!r} cannot have another producer")
            outputs.append(TensorSpec(spec.name, spec.shape, spec.dtype))
        attrs = read_attrs(raw.get("attrs", {}), f"{path}.attrs")
        check_texts(op_type, attrs, f"{path}.attrs")
        check_tensor_lists(attrs, len(inputs), f"{path}.attrs")
        check_numbers(attrs, len(inputs), f"{path}.attrs")
        for i, t in enumerate(outputs):  # defined only now: a node cannot read itself
            self._define((name, i), t)
        self.arities[name] = len(outputs)
        node = OpNode(name, op_type, inputs, outputs, attrs, self._graphs(raw.get("graphs", {}), f"{path}.graphs"))
        node.note = as_string(raw.get("note", ""), f"{path}.note", empty=True)
        node.location = read_location(raw.get("location"), f"{path}.location")
        if op_type == GETITEM:
            self._getitem(node, path)
        return node

    def _getitem(self, node: OpNode, path: str) -> None:
        try:
            chosen = selected(node)
        except IRError as error:
            raise IRError(f"{path}.attrs.index: {error}") from None
        if len(node.outputs) != 1:
            fail(f"{path}.outputs", f"a getitem has one output, got {len(node.outputs)}")
        self._match(node.outputs[0], chosen.shape, chosen.dtype, f"{path}.outputs[0]", f"{chosen.name!r} has")

    def _graphs(self, raw: Any, path: str) -> dict[str, IRGraph]:
        """Read the branches and bodies of control flow."""
        graphs: dict[str, IRGraph] = {}
        for name, document in as_mapping(raw, path).items():
            where = f"{path}[{name!r}]"
            if self.depth == MAX_GRAPH_DEPTH:
                fail(where, f"graphs are nested more than {MAX_GRAPH_DEPTH} levels deep")
            try:
                graphs[name] = _Reader(as_mapping(document, "$"), self.depth + 1).graph()
            except IRError as e:
                raise IRError(f"{where}.{e}") from e
            if graph_weights_used(graphs[name]) or graphs[name].state:
                fail(where, "a nested graph has no weights and no state; pass them as graph inputs")
        return graphs

    def _tensors(self, raw: Mapping[str, Any], key: str, path: str) -> list[TensorSpec]:
        items = enumerate(as_list(get(raw, key, path), f"{path}.{key}"))
        return [self._use(self._tensor(t, f"{path}.{key}[{i}]"), f"{path}.{key}[{i}]") for i, t in items]

    def _define(self, key: tuple[str, int], spec: TensorSpec) -> None:
        self.values[key] = spec
        self.by_name.setdefault(spec.name, []).append(key)

    def _use(self, t: TensorSpec, path: str) -> TensorSpec:
        """Check a reference against the tensor that it refers to; return it with its producer."""
        if t.producer is None:
            t = TensorSpec(t.name, t.shape, t.dtype, self._named(t.name, path))
        if t.producer is None:
            key = self.mapping.get(t.name, t.name)
            self._match(t, *self.leaves[key], path, f"weights declares for {key!r}")
            if key not in self.constants:
                self.mapping.setdefault(t.name, key)  # a weight may be referred to by its own name
            return t
        declared = self.values.get(t.producer)
        if declared is None:
            self._missing(t.producer, path)
        self._match(t, declared.shape, declared.dtype, path, f"{t.producer[0]!r} declares for output {t.producer[1]}")
        return t

    def _named(self, name: str, path: str) -> tuple[str, int] | None:
        """Return the producer of a tensor that only its name identifies; None for a weight or constant."""
        if (name, 0) in self.values and self.values[name, 0].producer == (name, 0):  # a graph input
            return (name, 0)
        made = self.by_name.get(name, [])
        is_leaf = self.mapping.get(name, name) in self.leaves
        if is_leaf and (name in self.mapping or not (made or name in self.later)):
            return None
        if len(made) == 1 and not is_leaf:
            return made[0]
        if made or is_leaf:
            others = "a weight and a node or its output are" if is_leaf else f"{len(made)} tensors are"
            fail(f"{path}.name", f"{others} named {name!r}; producer_node must tell which")
        if name in self.later:
            self._missing((name, 0), path)
        fail(f"{path}.name", f"{name!r} is not a weight, constant, graph input or output of an earlier node")

    def _missing(self, producer: tuple[str, int], path: str) -> NoReturn:
        node, index = producer
        if node in self.arities or (node, 0) in self.values:
            count = self.arities.get(node, 1)
            fail(f"{path}.producer_output_idx", f"{node!r} has {count} output(s), no output {index}")
        if node in self.later:
            why = f"node {node!r} (nodes[{self.later[node]}]) is used before it is computed"
            fail(f"{path}.producer_node", f"{why}; nodes must be in an order without cycles")
        fail(f"{path}.producer_node", f"no node or graph input is named {node!r}")

    def _match(self, t: TensorSpec, shape: tuple[int, ...], dtype: str, path: str, declaration: str) -> None:
        """Check a type against another one, which ``declaration`` (such as 'weights declares for …') explains."""
        if t.shape != shape:
            fail(f"{path}.shape", f"{list(t.shape)} differs from {list(shape)}, which {declaration}")
        if t.dtype != dtype:
            fail(f"{path}.dtype", f"{t.dtype!r} differs from {dtype!r}, which {declaration}")

    # ---------------------------------------------------------------------------------------------------------- results

    def _result(self, raw: Any, path: str) -> TensorSpec:
        """Read a graph output or state value; without producer fields it is found by its name."""
        t = self._tensor(raw, path)
        if t.producer is None and t.name in self.by_name:
            candidates = self.by_name[t.name]
            # Names of a node's several outputs may collide with node names, which are unique.
            exact = [k for k in candidates if k[0] == t.name] if len(candidates) > 1 else candidates
            if len(exact) != 1:
                fail(f"{path}.name", f"{len(candidates)} tensors are named {t.name!r}; producer_node must tell which")
            t = TensorSpec(t.name, t.shape, t.dtype, exact[0])
        return self._use(t, path)

    def _state(self) -> list[StateUpdate]:
        updates: dict[str, StateUpdate] = {}
        for i, raw in enumerate(as_list(self.doc.get("state", []), "state")):
            path = f"state[{i}]"
            obj = as_mapping(raw, path)
            key = as_string(get(obj, "key", path), f"{path}.key")
            if key not in self.leaves:
                fail(f"{path}.key", f"{key!r} is neither in weights nor in constants")
            if key in updates:
                fail(f"{path}.key", f"duplicate state {key!r}")
            value = self._result(get(obj, "value", path), f"{path}.value")
            self._match(value, *self.leaves[key], f"{path}.value", f"weights declares for {key!r}")
            updates[key] = StateUpdate(key, value)
        return list(updates.values())
