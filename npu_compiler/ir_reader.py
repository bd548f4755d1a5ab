"""IR JSON to and from ``IRGraph``, checked completely before anything uses it.

The format is the one pytorch-ir (``torch_ir``) writes, plus a few fields of our own writer that older files lack:
``state`` (mutated buffers), ``constants`` as base64 or as one repeated value, ``producer_node`` on graph outputs, and an
attribute that is null where a tensor argument is None although a later one is given.

Every error is an ``IRError`` that starts with the JSON path of the offending value, ``$`` being the whole document.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from npu_compiler import dtypes
from npu_compiler.errors import IRError
from npu_compiler.ir import IRGraph, OpNode, StateUpdate, TensorSpec

MAX_NUMEL = 1 << 40  # far above any real tensor; below it, byte counts and offsets fit 64 bits
MAX_RANK = 64
MAX_ATTR_DEPTH = 16
INLINE_CONSTANT_NUMEL = 64  # larger constants are written as base64
_INT64 = range(-(1 << 63), 1 << 63)
_TORCH_SETTINGS = ("device", "layout", "memory_format")

__all__ = ["graph_weights_used", "ir_to_dict", "leaf_key", "load_ir", "load_ir_from_dict", "save_ir"]


# ---------------------------------------------------------------------------------------------------------------- read


def load_ir(source: str | os.PathLike[str] | Mapping[str, Any] | IRGraph | Any) -> IRGraph:
    """The ``IRGraph`` of a JSON file, a dict in the JSON's form, a ``torch_ir.IR`` object or an ``IRGraph`` (returned as is).

    In the result graph inputs, graph outputs, state values and node inputs carry ``producer`` (a graph input is its own
    producer, index 0); weights and constants have none. Attributes hold plain Python values: dtypes are names such as
    'float32', devices, layouts and memory formats are strings without the ``torch.`` prefix.

    Raises:
        IRError: the source cannot be read or violates the format; the message starts with the JSON path.
    """
    if isinstance(source, IRGraph):
        return source
    if isinstance(source, Mapping):
        return load_ir_from_dict(source)
    if isinstance(source, str | os.PathLike):
        return load_ir_from_dict(_parse_file(Path(source)))
    to_dict = getattr(source, "to_dict", None)
    if not callable(to_dict):
        _fail("$", f"expected a path, a dict, a torch_ir.IR object or an IRGraph, got {type(source).__name__}")
    return load_ir_from_dict(to_dict())


def load_ir_from_dict(d: Mapping[str, Any]) -> IRGraph:
    """The ``IRGraph`` of a document in the JSON's form (see ``load_ir``); ``d`` is not modified."""
    return _Reader(_mapping(d, "$")).graph()


def leaf_key(graph: IRGraph, name: str) -> str:
    """The key in ``graph.constants`` or the state_dict of a leaf that nodes refer to as ``name``."""
    return graph.weight_name_mapping.get(name, name)


def graph_weights_used(graph: IRGraph) -> dict[str, TensorSpec]:
    """state_dict key -> spec, in the order of ``graph.weights``, of what a weight file must supply.

    These are the weights that a node, a graph output or a state buffer refers to and whose value is not in ``constants``.
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


def _fail(path: str, message: str) -> NoReturn:
    raise IRError(f"{path}: {message}")


def _show(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _parse_file(path: Path) -> Mapping[str, Any]:
    duplicates: list[tuple[dict[str, Any], str]] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            duplicates.extend((result, k) for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return result

    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=build)
    except OSError as e:
        raise IRError(f"$: cannot read {str(path)!r}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise IRError(f"$: {str(path)!r} is not UTF-8 text (byte {e.start}); expected IR JSON") from e
    except json.JSONDecodeError as e:
        raise IRError(f"$: {str(path)!r} is not valid JSON: {e.msg} at line {e.lineno} column {e.colno}") from e
    except RecursionError as e:
        raise IRError(f"$: {str(path)!r} is nested too deeply to be IR JSON") from e
    except ValueError as e:  # an integer literal beyond Python's digit limit, a NUL in the path
        raise IRError(f"$: {str(path)!r} cannot be read as JSON: {e}") from e
    for owner, key in duplicates:
        _fail(_find(document, owner) or "$", f"duplicate key {key!r}")
    return _mapping(document, "$")


def _find(value: Any, target: dict[str, Any], path: str = "") -> str | None:
    """JSON path of the object ``target`` inside ``value`` (by identity)."""
    if value is target:
        return path or "$"
    if isinstance(value, dict):
        children = [(f"{path}.{k}" if path else k, v) for k, v in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    else:
        return None
    return next((found for p, v in children if (found := _find(v, target, p)) is not None), None)


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _fail(path, f"expected an object, got {_show(value)}")
    for key in value:
        if not isinstance(key, str):
            _fail(path, f"expected string keys, got {_show(key)}")
    return value


def _get(obj: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in obj:
        _fail(path, f"missing key {key!r}")
    return obj[key]


def _list(value: Any, path: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        _fail(path, f"expected a list, got {_show(value)}")
    return value


def _string(value: Any, path: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        _fail(path, f"expected a {'' if empty else 'non-empty '}string, got {_show(value)}")
    return value


def _natural(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        hint = ""
        if isinstance(value, str) or value is None or not isinstance(value, bool | int | float | list | dict):
            hint = "; dynamic shapes are not supported, export the model with static shapes" if "shape" in path else ""
        _fail(path, f"expected a non-negative integer, got {_show(value)}{hint}")
    return int(value)


def _shape(value: Any, path: str) -> tuple[int, ...]:
    dims = tuple(_natural(d, f"{path}[{i}]") for i, d in enumerate(_list(value, path)))
    if len(dims) > MAX_RANK:
        _fail(path, f"rank {len(dims)} exceeds {MAX_RANK}")
    # Zero-size tensors too: their other dimensions still enter stride arithmetic.
    if math.prod(d for d in dims if d) > MAX_NUMEL:
        _fail(path, f"{_show(str(list(dims)))} exceeds {MAX_NUMEL} elements")
    return dims


def _dtype(value: Any, path: str) -> str:
    if not isinstance(value, str) and type(value).__module__ != "torch":
        _fail(path, f"expected a dtype name such as 'float32', got {_show(value)}")
    try:
        return dtypes.parse(value)
    except ValueError as e:
        raise IRError(f"{path}: {e}") from e


class _Reader:
    """One document; every method raises ``IRError`` with the path of what it rejects."""

    def __init__(self, doc: Mapping[str, Any]):
        self.doc = doc
        self.values: dict[tuple[str, int], TensorSpec] = {}  # graph inputs and node outputs read so far
        self.by_name: dict[str, list[tuple[str, int]]] = {}  # tensor name -> those of them that bear it
        self.leaves: dict[str, tuple[tuple[int, ...], str]] = {}  # weight or constant key -> shape, dtype
        self.mapping: dict[str, str] = {}
        self.arities: dict[str, int] = {}  # node -> number of outputs
        self.later: dict[str, int] = {}  # node -> index, to tell "used before definition" from "does not exist"

    def graph(self) -> IRGraph:
        doc = self.doc
        inputs = [self._graph_input(t, f"graph_inputs[{i}]") for i, t in self._items("graph_inputs")]
        weights = [self._weight(t, f"weights[{i}]") for i, t in self._items("weights")]
        self.mapping = self._name_mapping()
        constants = self._constants()
        raw_nodes = self._items("nodes")
        for i, raw in raw_nodes:
            self._declare(raw, i)
        nodes = [self._node(raw, f"nodes[{i}]") for i, raw in raw_nodes]
        outputs = [self._result(t, f"graph_outputs[{i}]") for i, t in self._items("graph_outputs")]
        return IRGraph(
            model_name=_string(doc.get("model_name", ""), "model_name", empty=True),
            graph_inputs=inputs,
            graph_outputs=outputs,
            weights=weights,
            weight_name_mapping=self.mapping,
            nodes=nodes,
            constants=constants,
            state=self._state(),
            pytorch_version=_string(doc.get("pytorch_version", ""), "pytorch_version", empty=True),
        )

    def _items(self, key: str) -> list[tuple[int, Any]]:
        return list(enumerate(_list(_get(self.doc, key, "$"), key)))

    # ------------------------------------------------------------------------------------------------ leaves

    def _tensor(self, raw: Any, path: str) -> TensorSpec:
        """A tensor as written: ``producer`` is set only if the JSON names one."""
        obj = _mapping(raw, path)
        name = _string(_get(obj, "name", path), f"{path}.name")
        shape = _shape(_get(obj, "shape", path), f"{path}.shape")
        dtype = _dtype(_get(obj, "dtype", path), f"{path}.dtype")
        producer = None
        if obj.get("producer_node") is not None:
            index = _natural(obj.get("producer_output_idx", 0), f"{path}.producer_output_idx")
            producer = (_string(obj["producer_node"], f"{path}.producer_node"), index)
        return TensorSpec(name, shape, dtype, producer)

    def _graph_input(self, raw: Any, path: str) -> TensorSpec:
        t = self._tensor(raw, path)
        key = (t.name, 0)
        if key in self.values:
            _fail(f"{path}.name", f"duplicate graph input {t.name!r}")
        if t.producer not in (None, key):
            _fail(f"{path}.producer_node", f"a graph input is produced by no node, got {_show(t.producer[0])}")
        spec = TensorSpec(t.name, t.shape, t.dtype, key)
        self._define(key, spec)
        return spec

    def _weight(self, raw: Any, path: str) -> TensorSpec:
        t = self._tensor(raw, path)
        if t.name in self.leaves:
            _fail(f"{path}.name", f"duplicate weight {t.name!r}")
        self.leaves[t.name] = (t.shape, t.dtype)
        return TensorSpec(t.name, t.shape, t.dtype)

    def _name_mapping(self) -> dict[str, str]:
        raw = _mapping(self.doc.get("weight_name_mapping", {}), "weight_name_mapping")
        constants = _mapping(self.doc.get("constants", {}), "constants")
        for placeholder, key in raw.items():
            path = f"weight_name_mapping[{placeholder!r}]"
            _string(placeholder, path)
            if _string(key, path) not in self.leaves and key not in constants:
                _fail(path, f"{_show(key)} is neither in weights nor in constants")
            if (placeholder, 0) in self.values:
                _fail(path, "a graph input has the same name")
        return dict(raw)

    def _constants(self) -> dict[str, np.ndarray]:
        constants: dict[str, np.ndarray] = {}
        for key, raw in _mapping(self.doc.get("constants", {}), "constants").items():
            path = f"constants[{key!r}]"
            declared = self.leaves.get(key)
            value = _constant(_mapping(raw, path), path, declared[0] if declared else None)
            found = (value.shape, dtypes.name_of(value.dtype))
            if declared and declared != found:
                _fail(path, f"is {_describe(*found)}, but weights declares {_describe(*declared)}")
            self.leaves[key] = found
            constants[key] = value
        # A constant without elements has no data to lose, yet extraction on the meta device drops it.
        for placeholder, key in self.mapping.items():
            shape, dtype = self.leaves[key]
            if placeholder.startswith("c_") and 0 in shape and key not in constants:
                constants[key] = np.zeros(shape, dtypes.numpy_dtype(dtype))
        return constants

    # ------------------------------------------------------------------------------------------------- nodes

    def _declare(self, raw: Any, i: int) -> None:
        path = f"nodes[{i}]"
        name = _string(_get(_mapping(raw, path), "name", path), f"{path}.name")
        if name in self.later:
            _fail(f"{path}.name", f"duplicate node name {name!r}, also nodes[{self.later[name]}]")
        if (name, 0) in self.values:
            _fail(f"{path}.name", f"a graph input has the same name {name!r}")
        if name in self.mapping:
            _fail(f"{path}.name", f"a weight placeholder has the same name {name!r}")
        self.later[name] = i

    def _node(self, raw: Mapping[str, Any], path: str) -> OpNode:
        name = raw["name"]
        op_type = _string(_get(raw, "op_type", path), f"{path}.op_type")
        inputs = self._tensors(raw, "inputs", path)
        outputs = []
        for i, t in enumerate(_list(_get(raw, "outputs", path), f"{path}.outputs")):
            where = f"{path}.outputs[{i}]"
            spec = self._tensor(t, where)
            if spec.producer not in (None, (name, i)):
                _fail(f"{where}.producer_node", f"an output of node {name!r} cannot have another producer")
            outputs.append(TensorSpec(spec.name, spec.shape, spec.dtype))
        attrs = _attrs(raw.get("attrs", {}), f"{path}.attrs")
        _check_tensor_lists(attrs, len(inputs), f"{path}.attrs")
        for i, t in enumerate(outputs):  # defined only now: a node cannot read itself
            self._define((name, i), t)
        self.arities[name] = len(outputs)
        return OpNode(name, op_type, inputs, outputs, attrs)

    def _tensors(self, raw: Mapping[str, Any], key: str, path: str) -> list[TensorSpec]:
        items = enumerate(_list(_get(raw, key, path), f"{path}.{key}"))
        return [self._use(self._tensor(t, f"{path}.{key}[{i}]"), f"{path}.{key}[{i}]") for i, t in items]

    def _define(self, key: tuple[str, int], spec: TensorSpec) -> None:
        self.values[key] = spec
        self.by_name.setdefault(spec.name, []).append(key)

    def _use(self, t: TensorSpec, path: str) -> TensorSpec:
        """Check a reference against what it refers to; returns it with its producer."""
        if t.producer is None and (t.name, 0) in self.values and self.values[t.name, 0].producer == (t.name, 0):
            t = TensorSpec(t.name, t.shape, t.dtype, (t.name, 0))  # a graph input without producer fields
        if t.producer is None:
            key = self.mapping.get(t.name, t.name)
            if key not in self.leaves:
                hint = ""
                if t.name in self.by_name or t.name in self.later:
                    hint = "; a node has an output of that name: producer_node must name the node"
                _fail(f"{path}.name", f"{t.name!r} is no weight placeholder, constant or graph input{hint}")
            self._match(t, *self.leaves[key], path, f"weights declares for {key!r}")
            return t
        declared = self.values.get(t.producer)
        if declared is None:
            self._missing(t.producer, path)
        self._match(t, declared.shape, declared.dtype, path, f"{t.producer[0]!r} declares for output {t.producer[1]}")
        return t

    def _missing(self, producer: tuple[str, int], path: str) -> NoReturn:
        node, index = producer
        if node in self.arities or (node, 0) in self.values:
            _fail(f"{path}.producer_output_idx", f"{node!r} has {self.arities.get(node, 1)} output(s), no output {index}")
        if node in self.later:
            why = f"node {node!r} (nodes[{self.later[node]}]) is used before it is computed; sort the nodes, without cycles"
            _fail(f"{path}.producer_node", why)
        _fail(f"{path}.producer_node", f"no node or graph input is named {node!r}")

    def _match(self, t: TensorSpec, shape: tuple[int, ...], dtype: str, path: str, who: str) -> None:
        if t.shape != shape:
            _fail(f"{path}.shape", f"{list(t.shape)} differs from {list(shape)}, which {who}")
        if t.dtype != dtype:
            _fail(f"{path}.dtype", f"{t.dtype!r} differs from {dtype!r}, which {who}")

    # ----------------------------------------------------------------------------------------------- results

    def _result(self, raw: Any, path: str) -> TensorSpec:
        """A graph output or state value; without producer fields it is found by its name."""
        t = self._tensor(raw, path)
        if t.producer is None and t.name in self.by_name:
            candidates = self.by_name[t.name]
            # Names of outputs of multi-output nodes may collide with node names, node names are unique.
            exact = [k for k in candidates if k[0] == t.name] if len(candidates) > 1 else candidates
            if len(exact) != 1:
                _fail(f"{path}.name", f"{len(candidates)} tensors are named {t.name!r}; producer_node must tell which")
            t = TensorSpec(t.name, t.shape, t.dtype, exact[0])
        return self._use(t, path)

    def _state(self) -> list[StateUpdate]:
        updates: list[StateUpdate] = []
        for i, raw in enumerate(_list(self.doc.get("state", []), "state")):
            path = f"state[{i}]"
            obj = _mapping(raw, path)
            key = _string(_get(obj, "key", path), f"{path}.key")
            if key not in self.leaves:
                _fail(f"{path}.key", f"{key!r} is neither in weights nor in constants")
            if any(u.key == key for u in updates):
                _fail(f"{path}.key", f"duplicate state {key!r}")
            value = self._result(_get(obj, "value", path), f"{path}.value")
            self._match(value, *self.leaves[key], f"{path}.value", f"weights declares for {key!r}")
            updates.append(StateUpdate(key, value))
        return updates


def _describe(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{list(shape)}"


# ---------------------------------------------------------------------------------------------------------- attributes


def _attrs(raw: Any, path: str) -> dict[str, Any]:
    return {k: _attr(v, k, f"{path}[{k!r}]" if not k.isidentifier() else f"{path}.{k}") for k, v in _mapping(raw, path).items()}


def _attr(value: Any, key: str, path: str, depth: int = 0) -> Any:
    """A plain Python value; ``key`` decides what a string or a torch object means."""
    if depth > MAX_ATTR_DEPTH:
        _fail(path, f"nested more than {MAX_ATTR_DEPTH} levels deep")
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", *_TORCH_SETTINGS):
        return _dtype(value, path) if kind.__name__ == "dtype" else str(value).removeprefix("torch.")
    if key in ("dtype", "out_dtype", "other_dtype"):
        return None if value is None else _dtype(value, path)
    if isinstance(value, str):
        bare = value.removeprefix("torch.")
        return bare if bare in dtypes.DTYPES or key in _TORCH_SETTINGS else value
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value not in _INT64:
            _fail(path, f"integer {_show(value)} does not fit 64 bits")
        return int(value)
    if isinstance(value, np.generic):
        return _attr(value.item(), key, path, depth + 1)
    if isinstance(value, list | tuple):
        return [_attr(v, "", f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {k: _attr(v, k, f"{path}.{k}", depth + 1) for k, v in _mapping(value, path).items()}
    if kind.__module__.startswith("torch.fx"):
        _fail(path, "a tensor passed by keyword, which the extractor lost; use npu_compiler.capture to extract this model")
    _fail(path, f"expected a number, string, boolean, null or list, got {_show(value)}")


def _check_tensor_lists(attrs: dict[str, Any], inputs: int, path: str) -> None:
    sizes = _list(attrs.get("_tensor_list_sizes", []), f"{path}._tensor_list_sizes")
    total = sum(_natural(n, f"{path}._tensor_list_sizes[{i}]") for i, n in enumerate(sizes))
    if total > inputs:
        _fail(f"{path}._tensor_list_sizes", f"the lists hold {total} tensors, but the node has {inputs} input(s)")
    masks = _list(attrs.get("_tensor_list_none_masks", []), f"{path}._tensor_list_none_masks")
    if len(masks) > len(sizes):
        _fail(f"{path}._tensor_list_none_masks", f"{len(masks)} masks for {len(sizes)} tensor list(s)")
    for i, mask in enumerate(masks):
        where = f"{path}._tensor_list_none_masks[{i}]"
        if not all(isinstance(m, bool) for m in _list(mask, where)):
            _fail(where, "expected a list of booleans")


# ----------------------------------------------------------------------------------------------------------- constants


def _constant(obj: Mapping[str, Any], path: str, declared: tuple[int, ...] | None) -> np.ndarray:
    """The array of ``{data, dtype}``, ``{data_b64, shape, dtype}`` or ``{fill, shape, dtype}``."""
    dtype = _dtype(_get(obj, "dtype", path), f"{path}.dtype")
    if "data" in obj:
        value = _from_nested(obj["data"], dtype, f"{path}.data")
        empty = value.size == 0 and declared is not None and 0 in declared
        return value.reshape(cast("tuple[int, ...]", declared)) if empty else value  # [] stands for [0, 3] too
    shape = _shape(_get(obj, "shape", path), f"{path}.shape")
    if "fill" in obj:
        value = _from_nested(obj["fill"], dtype, f"{path}.fill")
        if value.shape != ():
            _fail(f"{path}.fill", "expected one number")
        return np.broadcast_to(value, shape)
    where = f"{path}.data_b64"
    try:
        raw = base64.b64decode(_string(_get(obj, "data_b64", path), where, empty=True), validate=True)
    except (binascii.Error, ValueError) as e:
        raise IRError(f"{where}: not base64: {e}") from e
    need = math.prod(shape) * dtypes.DTYPES[dtype].size
    if len(raw) != need:
        _fail(where, f"holds {len(raw)} bytes, {_describe(shape, dtype)} needs {need}")
    if dtype == "bool" and any(b > 1 for b in raw):
        _fail(where, "a bool must be byte 0 or 1")
    return np.frombuffer(raw, dtypes.numpy_dtype(dtype).newbyteorder("<")).astype(dtypes.numpy_dtype(dtype)).reshape(shape)


def _from_nested(data: Any, dtype: str, path: str) -> np.ndarray:
    """A number or nested list of numbers in its real dtype, refusing any value that the dtype cannot hold."""
    try:
        wide = np.array(data)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise IRError(f"{path}: not a regular nested list of numbers") from e
    target = dtypes.DTYPES[dtype]
    accepted = {"bool": "b", "int": "biu", "uint": "biu", "float": "biuf", "complex": "biufc"}[target.kind]
    if wide.size and wide.dtype.kind not in accepted:
        _fail(path, f"expected numbers of dtype {dtype}, got {_show(str(wide.dtype))} values")
    if wide.size and target.kind in ("int", "uint"):
        info = np.iinfo(target.numpy)
        if int(wide.min()) < info.min or int(wide.max()) > info.max:
            _fail(path, f"value out of range for {dtype}")
    with np.errstate(over="ignore"):
        value = wide.astype(target.numpy)
    if wide.dtype.kind in "iufc" and target.kind in ("float", "complex"):
        lost = np.isfinite(wide) & ~np.isfinite(value)
        if bool(np.any(lost)):
            _fail(path, f"value out of range for {dtype}")
    return value


# --------------------------------------------------------------------------------------------------------------- write


def ir_to_dict(graph: IRGraph) -> dict[str, Any]:
    """The document ``load_ir_from_dict`` reads back to an equal graph: JSON types only (floats may be infinite or NaN)."""
    doc: dict[str, Any] = {
        "model_name": graph.model_name,
        "pytorch_version": graph.pytorch_version,
        "graph_inputs": [_tensor_dict(t, producer=False) for t in graph.graph_inputs],
        "graph_outputs": [_tensor_dict(t) for t in graph.graph_outputs],
        "weights": [_tensor_dict(t) for t in graph.weights],
        "weight_name_mapping": dict(graph.weight_name_mapping),
        "nodes": [
            {
                "name": n.name,
                "op_type": n.op_type,
                "inputs": [_tensor_dict(t) for t in n.inputs],
                "outputs": [_tensor_dict(t) for t in n.outputs],
                "attrs": _attrs(n.attrs, f"nodes[{i}].attrs"),
            }
            for i, n in enumerate(graph.nodes)
        ],
    }
    if graph.constants:
        doc["constants"] = {k: _constant_dict(v) for k, v in graph.constants.items()}
    if graph.state:
        doc["state"] = [{"key": u.key, "value": _tensor_dict(u.value)} for u in graph.state]
    return doc


def _tensor_dict(t: TensorSpec, *, producer: bool = True) -> dict[str, Any]:
    d: dict[str, Any] = {"name": t.name, "shape": list(t.shape), "dtype": t.dtype}
    if producer and t.producer is not None:
        d["producer_node"], d["producer_output_idx"] = t.producer
    return d


def _constant_dict(value: np.ndarray) -> dict[str, Any]:
    dtype = dtypes.name_of(value.dtype)
    real = not np.iscomplexobj(value)
    if value.size <= INLINE_CONSTANT_NUMEL and real and (value.size or value.ndim == 1):
        return {"data": value.tolist(), "dtype": dtype}
    head: dict[str, Any] = {"shape": list(value.shape), "dtype": dtype}
    if value.size and real and bool(np.all(value == value.flat[0])) and not (value.flat[0] == 0 and np.signbit(value).any()):
        return {**head, "fill": value.flat[0].item()}
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    return {**head, "data_b64": base64.b64encode(data.tobytes()).decode("ascii")}


def save_ir(graph: IRGraph, path: str | os.PathLike[str]) -> None:
    """Write the IR JSON; the file appears complete or, if anything fails, stays as it was."""
    target = Path(path)
    text = json.dumps(ir_to_dict(graph), indent=2)
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
