"""Complex numbers as pairs: a complex tensor becomes a real one with a last dim of real and imaginary parts.

Some models turn the pairs of a rotary embedding by products of complex numbers. If all ops on complex tensors of a
graph are known here, they are replaced by ops on real tensors, which targets compute; else the graph stays as it is,
and these ops run on the host. Constants become pairs, too; weights, inputs and results of a graph never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .ir import GETITEM, IRGraph, OpNode, StateUpdate, TensorSpec, selected

_REAL = {"complex64": "float32", "complex128": "float64"}
_SAME = ("aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.contiguous.default")
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints")


def complex_as_pairs(ir: IRGraph) -> IRGraph:
    """Return ``ir`` without complex tensors, or ``ir`` itself if it has none or an op on one is unknown."""
    if not any(t.dtype in _REAL for n in ir.nodes for t in (*n.inputs, *n.outputs)):
        return ir
    pairs = _Pairs(ir)
    try:
        for node in ir.nodes:
            pairs.add(node)
    except _Unknown:
        return ir
    kept = (*ir.graph_outputs, *(u.value for u in ir.state))
    if any(t.dtype in _REAL for t in kept):
        return ir
    state = [StateUpdate(u.key, pairs.reads(u.value)) for u in ir.state]
    outputs = [pairs.reads(t) for t in ir.graph_outputs]
    constants = {k: _parts(v) if k in pairs.constants else v for k, v in ir.constants.items()}
    weights = [_paired(t) if t.name in pairs.constants else t for t in ir.weights]
    return replace(ir, nodes=pairs.nodes, graph_outputs=outputs, state=state, constants=constants, weights=weights)


class _Unknown(Exception):
    """Raised for an op that is not known here, or whose arguments do not fit it."""


def _paired(t: TensorSpec) -> TensorSpec:
    """Return the tensor of pairs that stands for a complex one."""
    return replace(t, shape=(*t.shape, 2), dtype=_REAL[t.dtype])


def _parts(value: np.ndarray) -> np.ndarray:
    """Return the real and imaginary parts of complex numbers as a last dim."""
    return np.stack([value.real, value.imag], -1)


class _Pairs:
    """The graph under construction. ``real``: the tensors that stand for results, by producer. ``constants``: the keys
    of those that became pairs."""

    def __init__(self, ir: IRGraph):
        self.nodes: list[OpNode] = []
        self.real: dict[tuple[str, int], TensorSpec] = {}
        self.constants: set[str] = set()
        self.keys, written = ir.weight_name_mapping, {u.key for u in ir.state}
        self.fixed = ir.constants.keys() - written
        self.taken = {n.name for n in ir.nodes} | {t.name for t in ir.graph_inputs} | set(ir.weight_name_mapping)
        self.node = OpNode("", "", [], [])

    def reads(self, t: TensorSpec) -> TensorSpec:
        if t.producer is not None:
            return self.real.get(t.producer, t)
        key = self.keys.get(t.name, t.name)
        if t.dtype not in _REAL or key not in self.fixed:
            return t
        self.constants.add(key)
        return _paired(t)

    def add(self, node: OpNode) -> None:
        """Add a node, or what replaces it. Raises ``_Unknown``."""
        self.node = node
        inputs = [self.reads(t) for t in node.inputs]
        if not any(t.dtype in _REAL for t in (*node.inputs, *node.outputs)):
            self.nodes.append(replace(node, inputs=inputs))
            return
        if node.graphs or not inputs or not all(t.is_static for t in (*node.inputs, *node.outputs)):
            raise _Unknown
        if any(t.dtype in _REAL for t in inputs):  # a weight or an input of the graph
            raise _Unknown
        if node.op_type in _SPLITS:
            self.split(inputs)
            return
        if len(node.outputs) != 1:
            raise _Unknown
        made = self.replaced(inputs)
        if node.outputs[0].dtype in _REAL:
            self.real[node.name, 0] = made
        else:  # results keep their names
            self.nodes.append(OpNode(node.name, "aten.alias.default", [made], node.outputs, location=node.location))

    def replaced(self, x: list[TensorSpec]) -> TensorSpec:
        """Return the tensor that stands for the result of the node, given those for its inputs. Raises ``_Unknown``."""
        node, attrs = self.node, self.node.attrs
        out, is_complex = node.outputs[0], [t.dtype in _REAL for t in node.inputs]
        base = node.op_type
        if base == GETITEM:
            return self.reads(selected(node))
        if base in _LAYOUTS and all(is_complex):
            return self.pair(base, *x, **_LAYOUTS[base](attrs, len(node.inputs[0].shape)))
        if base in _GATHERS and is_complex[0] and not any(is_complex[1:]):
            return self.pair(base, *x, **_GATHERS[base](attrs, len(node.inputs[0].shape)))
        if base == "aten.pad_sequence.default" and all(is_complex):
            return self.padded(x)
        if base in _RESHAPES:
            return self.pair("aten.reshape.default", x[0], shape=[*out.shape, 2])
        if base == "aten.expand.default":
            return self.pair(base, x[0], size=[*out.shape, 2])
        if base in _SAME or base in ("aten.view_as_complex.default", "aten.view_as_real.default"):
            return x[0]
        if base == "aten.polar.default" and len(x) == 2:
            parts = (self.real_op(f"aten.{f}.default", x[1]) for f in ("cos", "sin"))
            return self.both(*(self.real_op("aten.mul.Tensor", x[0], p) for p in parts))
        if base == "aten.complex.default" and len(x) == 2:
            return self.both(x[0], x[1])
        if base in ("aten.real.default", "aten.imag.default"):
            return self.part(x[0], base == "aten.imag.default")
        if base in ("aten._conj.default", "aten.conj_physical.default"):
            return self.both(self.part(x[0], False), self.real_op("aten.neg.default", self.part(x[0], True)))
        if base in ("aten.add.Tensor", "aten.sub.Tensor") and is_complex == [True, True]:
            return self.pair(base, *x, **attrs)
        if base == "aten.neg.default":
            return self.pair(base, x[0])
        if base in ("aten.mul.Tensor", "aten.div.Tensor"):
            return self.scaled_or_product(x, is_complex)
        raise _Unknown

    def split(self, x: list[TensorSpec]) -> None:
        """Add a split along a dim of complex numbers."""
        node = self.node
        attrs = _SPLITS[node.op_type](node.attrs, len(node.inputs[0].shape))
        name = self.free_name()
        made = [TensorSpec(f"{name}_{i}", (*t.shape, 2), self.dtype()) for i, t in enumerate(node.outputs)]
        self.nodes.append(OpNode(name, node.op_type, x, made, attrs, location=node.location))
        self.real |= {(node.name, i): replace(t, producer=(name, i)) for i, t in enumerate(made)}

    def padded(self, x: list[TensorSpec]) -> TensorSpec:
        """Return sequences of complex numbers, padded at their ends with zeros and stacked."""
        attrs, shape = self.node.attrs, self.node.outputs[0].shape
        if attrs.get("padding_value", 0) or attrs.get("padding_side", "right") != "right" or len(shape) < 2:
            raise _Unknown
        dim = 0 if attrs.get("batch_first") else 1
        length = shape[1 - dim]
        rows = [self.lengthened(t, length) if t.shape[0] < length else t for t in x]
        return self.pair("aten.stack.default", *rows, _tensor_list_sizes=[len(rows)], dim=dim)

    def lengthened(self, x: TensorSpec, length: int) -> TensorSpec:
        pad = [0] * (2 * len(x.shape) - 1) + [length - x.shape[0]]
        return self.emit("aten.constant_pad_nd.default", [x], (length, *x.shape[1:]), {"pad": pad, "value": 0.0})

    def scaled_or_product(self, x: list[TensorSpec], is_complex: list[bool]) -> TensorSpec:
        base, attrs = self.node.op_type, self.node.attrs
        if is_complex == [True] and isinstance(attrs.get("other"), int | float):
            return self.pair(base, x[0], **attrs)
        if is_complex == [True, True] and base == "aten.mul.Tensor":
            (a, b), (c, d) = ((self.part(t, False), self.part(t, True)) for t in x)
            products = [self.real_op("aten.mul.Tensor", *p) for p in ((a, c), (b, d), (a, d), (b, c))]
            return self.both(
                self.real_op("aten.sub.Tensor", *products[:2]), self.real_op("aten.add.Tensor", *products[2:])
            )
        if is_complex == [False, True] and base == "aten.mul.Tensor":
            x = [x[1], x[0]]
        elif is_complex != [True, False]:
            raise _Unknown
        factor = x[1]
        if factor.dtype != self.dtype():
            factor = self.emit("aten.to.dtype", [factor], factor.shape, {"dtype": self.dtype()})
        return self.pair(base, x[0], self.emit("aten.unsqueeze.default", [factor], (*factor.shape, 1), {"dim": -1}))

    # -- nodes ------------------------------------------------------------------------------------------------------
    def emit(self, op_type: str, x: Sequence[TensorSpec], shape: tuple[int, ...], attrs: dict[str, Any]) -> TensorSpec:
        """Add a node and return its result, in the float dtype of the parts."""
        name = self.free_name()
        made = TensorSpec(name, shape, self.dtype())
        self.nodes.append(OpNode(name, op_type, list(x), [made], attrs, location=self.node.location))
        return replace(made, producer=(name, 0))

    def free_name(self) -> str:
        name, number = self.node.name, 0
        while name in self.taken:
            number += 1
            name = f"{self.node.name}_part{number}"
        self.taken.add(name)
        return name

    def dtype(self) -> str:
        kinds = [t.dtype for t in (*self.node.outputs, *self.node.inputs)]
        return next(_REAL[k] for k in kinds if k in _REAL)

    def pair(self, op_type: str, *x: TensorSpec, **attrs: Any) -> TensorSpec:
        """An op whose result has a last dim of two parts."""
        return self.emit(op_type, x, (*self.node.outputs[0].shape, 2), attrs)

    def real_op(self, op_type: str, *x: TensorSpec) -> TensorSpec:
        """An elementwise op on parts."""
        rank = max(len(t.shape) for t in x)
        sizes = zip(*((*[1] * (rank - len(t.shape)), *t.shape) for t in x), strict=True)
        return self.emit(op_type, x, tuple(max(s) if 0 not in s else 0 for s in sizes), {})

    def part(self, x: TensorSpec, imaginary: bool) -> TensorSpec:
        return self.emit("aten.select.int", [x], x.shape[:-1], {"dim": -1, "index": int(imaginary)})

    def both(self, real: TensorSpec, imaginary: TensorSpec) -> TensorSpec:
        shape = self.node.outputs[0].shape
        parts = [
            t if t.shape == shape else self.emit("aten.expand.default", [t], shape, {"size": [*shape]})
            for t in (real, imaginary)
        ]
        return self.pair("aten.stack.default", *parts, _tensor_list_sizes=[2], dim=-1)


def _dim(name: str, beyond: int = 0) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """The attributes of an op on dim ``name`` of a complex tensor, counted from the first one. ``beyond``: how many
    more dims the result has."""

    def changed(attrs: dict[str, Any], rank: int) -> dict[str, Any]:
        dim = _whole(attrs.get(name, 0))
        return {**attrs, name: dim + rank + beyond if dim < 0 else dim}

    return changed


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise _Unknown
    return value


def _swap(attrs: dict[str, Any], rank: int) -> dict[str, Any]:
    return {k: v + rank if _whole(v) < 0 else v for k, v in attrs.items()}


def _order(attrs: dict[str, Any], rank: int) -> dict[str, Any]:
    dims = attrs.get("dims")
    if not isinstance(dims, list) or len(dims) != rank:
        raise _Unknown
    return {"dims": [*(_whole(d) % rank for d in dims), rank]}


def _as_is(attrs: dict[str, Any], rank: int) -> dict[str, Any]:
    return attrs


_Attributes = Callable[[dict[str, Any], int], dict[str, Any]]
_LAYOUTS: dict[str, _Attributes] = {
    "aten.unsqueeze.default": _dim("dim", 1),
    "aten.squeeze.dim": _dim("dim"),
    "aten.slice.Tensor": _dim("dim"),
    "aten.select.int": _dim("dim"),
    "aten.cat.default": _dim("dim"),
    "aten.stack.default": _dim("dim", 1),
    "aten.transpose.int": _swap,
    "aten.permute.default": _order,
}
# Ops whose further tensors are indices.
_GATHERS: dict[str, _Attributes] = {"aten.index_select.default": _dim("dim"), "aten.index.Tensor": _as_is}
_SPLITS: dict[str, _Attributes] = {
    "aten.split_with_sizes.default": _dim("dim"),
    "aten.split.Tensor": _dim("dim"),
    "aten.split.sizes": _dim("dim"),
    "aten.chunk.default": _dim("dim"),
    "aten.unbind.int": _dim("dim"),
}
