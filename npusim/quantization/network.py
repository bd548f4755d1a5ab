"""The quantised form of a network's graph: which tensors are 8-bit, and the ops that make them so.

Convolutions and linear layers multiply int8 weights (symmetric, one scale for each output channel) by uint8 activations
(one scale and zero point for each tensor). Residuals and feature maps that are averaged are 8-bit, too. A batch norm
after a convolution is folded into it first. Depthwise convolutions stay in float32: their sums are too short to gain
anything. The graph has the ops of PT2E, quantise and dequantise in front of each product; the compiler multiplies the
integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.aten.ir import IRGraph, Key, OpNode, TensorSpec
from npu_compiler.aten.op_names import functional_name
from npu_compiler.support.errors import InputError

from .ranges import LEVELS, Affine

_PRODUCTS = ("aten.conv2d.default", "aten.linear.default")
_MAXIMUM = ("aten.max_pool2d.default",)  # of quantised values: their scale stays
_AVERAGES = ("aten.adaptive_avg_pool2d.default", "aten.avg_pool2d.default", "aten.mean.dim")  # of feature maps
_MOST = 127  # the largest magnitude of a weight


@dataclass(frozen=True)
class Layer:
    """A product that is quantised: ``result`` is the node whose output it computes, its batch norm or itself."""

    node: OpNode
    norm: OpNode | None
    weight: np.ndarray  # float32, with the batch norm folded in
    bias: np.ndarray | None

    @property
    def result(self) -> OpNode:
        """The last node of the layer."""
        return self.norm or self.node

    @property
    def label(self) -> str:
        """The path of its module, if it is known; else the name of its node."""
        return self.node.location.module if self.node.location is not None else self.node.name

    @property
    def scale(self) -> np.ndarray:
        """One scale for each output channel."""
        largest = np.abs(self.weight.reshape(len(self.weight), -1)).max(axis=1)
        return np.where(largest > 0, largest / _MOST, 1.0).astype(np.float32)

    @property
    def quantized(self) -> np.ndarray:
        """The weight as int8."""
        scale = self.scale.reshape(-1, *(1,) * (self.weight.ndim - 1))
        return np.clip(np.rint(self.weight / scale), -_MOST, _MOST).astype(np.int8)

    @property
    def weight_error(self) -> float:
        """The relative RMS error of the int8 weight."""
        scale = self.scale.reshape(-1, *(1,) * (self.weight.ndim - 1))
        error = self.quantized * scale - self.weight
        size = float(np.square(self.weight).sum())
        return float(np.sqrt(np.square(error).sum() / size)) if size else 0.0


class Network:
    """A graph with its weights, prepared for quantisation.

    ``layers``: by the name of the node that computes the result. ``sites``: the tensors that become 8-bit; ``shared``:
    those that have the parameters of another one, because they are maxima of its values.

    Raises ``InputError`` if there is nothing to quantise.
    """

    def __init__(self, ir: IRGraph, weights: Mapping[str, np.ndarray]):
        nodes = [replace(n, op_type=functional_name(n.op_type)) for n in ir.nodes]
        self.ir, self.weights = replace(ir, nodes=nodes, dry_runs={}), weights
        self.made = {(n.name, i): n for n in nodes for i in range(len(n.outputs))}
        self.readers: dict[Key, list[OpNode]] = {}
        for n in nodes:
            for t in n.inputs:
                self.readers.setdefault(ir.key(t), []).append(n)
        self.layers = {layer.result.name: layer for n in nodes if (layer := self._layer(n)) is not None}
        if not self.layers:
            raise InputError(f"{ir.model_name} has no convolution or linear layer with float32 weights to quantise")
        self.sites: dict[Key, TensorSpec] = {}
        self.shared: dict[Key, Key] = {}
        for layer in self.layers.values():
            self._add_site(layer.node.inputs[0])
        for n in nodes:
            if n.op_type == "aten.add.Tensor" and len(n.inputs) == 2:
                self._add_residual(n)
            if n.op_type in _AVERAGES and len(n.inputs[0].shape) == 4 and n.inputs[0].dtype == "float32":
                self._add_site(n.inputs[0])

    @property
    def skipped(self) -> list[OpNode]:
        """The convolutions and linear layers that stay in float32."""
        quantised = {layer.node.name for layer in self.layers.values()}
        return [n for n in self.ir.nodes if n.op_type in _PRODUCTS and n.name not in quantised]

    # -- what is quantised
    def _leaf(self, t: TensorSpec) -> np.ndarray | None:
        """Return the values of a weight or constant, or None."""
        key = self.ir.weight_name_mapping.get(t.name, t.name) if t.producer is None else ""
        if key in self.ir.constants:
            return self.ir.constants[key]
        found = self.weights.get(key) if key else None
        return None if found is None or any(u.key == key for u in self.ir.state) else np.asarray(found)

    def _layer(self, node: OpNode) -> Layer | None:
        if node.op_type not in _PRODUCTS or len(node.inputs) < 2 or node.inputs[0].dtype != "float32":
            return None
        values = [self._leaf(t) for t in node.inputs[1:]]
        if any(v is None or v.dtype != np.float32 for v in values):
            return None
        weight, bias = values[0], values[1] if len(values) > 1 else None
        assert weight is not None
        if weight.ndim > 2 and weight.shape[1] == 1:  # depthwise
            return None
        norm = self._norm_after(node)
        if norm is not None:
            gamma, beta, mean, variance = (self._leaf(t) for t in norm.inputs[1:])
            assert gamma is not None and beta is not None and mean is not None and variance is not None
            factor = gamma / np.sqrt(variance.astype(np.float64) + norm.attrs.get("eps", 1e-5))
            weight = (weight * factor.reshape(-1, 1, 1, 1)).astype(np.float32)
            bias = (beta + ((0 if bias is None else bias) - mean) * factor).astype(np.float32)
        return Layer(node, norm, weight, bias)

    def _norm_after(self, node: OpNode) -> OpNode | None:
        """Return the batch norm that alone reads a convolution, if its statistics are known."""
        readers = self.readers.get((node.name, 0), [])
        if node.op_type != "aten.conv2d.default" or len(readers) != 1 or self._is_output((node.name, 0)):
            return None
        norm = readers[0]
        known = norm.op_type == "aten.batch_norm.default" and len(norm.inputs) == 5 and not norm.attrs.get("training")
        return norm if known and all(self._leaf(t) is not None for t in norm.inputs[1:]) else None

    def _is_output(self, key: Key) -> bool:
        return any(self.ir.key(t) == key for t in self.ir.graph_outputs)

    def _add_site(self, t: TensorSpec) -> Key:
        """Quantise a tensor; if it is a maximum of others, quantise these with the same scale."""
        key = self.ir.key(t)
        if key in self.sites:
            return key
        node = self.made.get(key)
        if node is not None and node.op_type in _MAXIMUM:
            source = self._add_site(node.inputs[0])
            self.shared[key] = self.shared.get(source, source)
        self.sites[key] = t
        return key

    def _add_residual(self, add: OpNode) -> None:
        """Quantise the first of two results of products that are added, which is otherwise stored in float32."""
        keys = [self.ir.key(t) for t in add.inputs]
        names = [key[0] for key in keys]
        if all(name in self.layers for name in names) and names[0] != names[1]:
            order = {n.name: i for i, n in enumerate(self.ir.nodes)}
            self._add_site(min(add.inputs, key=lambda t: order[self.ir.key(t)[0]]))

    # -- the graphs
    def with_outputs(self, ir: IRGraph, keys: Mapping[str, Key]) -> IRGraph:
        """Return a graph whose outputs are these values, under new names."""
        produced = {(n.name, i): t for n in ir.nodes for i, t in enumerate(n.outputs)}
        produced |= {ir.key(t): t for t in ir.graph_inputs}
        outputs = [replace(produced[key], name=name, producer=key) for name, key in keys.items()]
        return replace(ir, graph_outputs=outputs, dry_runs={})

    def quantized(self, affine: Mapping[Key, Affine]) -> tuple[IRGraph, dict[str, np.ndarray]]:
        """Return the quantised graph and its weights. ``affine`` has the parameters of each of :attr:`sites`."""
        ir, result = self.ir, _Builder(dict(self.weights))
        for t in ir.graph_inputs:
            if ir.key(t) in self.sites:
                result.quantize(t, ir.key(t), affine[ir.key(t)])
        folded = {layer.node.name for layer in self.layers.values() if layer.norm is not None}
        for node in ir.nodes:
            if node.name in folded:
                continue
            layer = self.layers.get(node.name)
            result.add(node, layer)
            for i, t in enumerate(node.outputs):
                if (node.name, i) in self.sites:
                    result.quantize(t, (node.name, i), affine[node.name, i])
        read = {t.name for n in result.nodes for t in n.inputs if t.producer is None}
        mapping = {p: k for p, k in {**ir.weight_name_mapping, **result.mapping}.items() if p in read}
        keys = set(mapping.values())
        specs = [w for w in [*ir.weights, *result.specs] if w.name in keys]
        made = {k: v for k, v in result.weights.items() if k in keys}
        graph = replace(ir, nodes=result.nodes, weights=specs, weight_name_mapping=mapping, dry_runs={})
        return graph, made


class _Builder:
    """Collects the nodes and weights of the quantised graph."""

    def __init__(self, weights: dict[str, np.ndarray]):
        self.weights = weights
        self.nodes: list[OpNode] = []
        self.specs: list[TensorSpec] = []
        self.mapping: dict[str, str] = {}
        self.replaced: dict[Key, TensorSpec] = {}

    def _weight(self, name: str, values: np.ndarray) -> TensorSpec:
        """Add a weight, whose placeholder has its name."""
        spec = TensorSpec(name, values.shape, str(values.dtype))
        self.specs.append(spec)
        self.mapping[name] = name
        self.weights[name] = values
        return spec

    def _node(
        self, name: str, op: str, inputs: list[TensorSpec], dtype: str, attrs: Mapping[str, object]
    ) -> TensorSpec:
        out = TensorSpec(name, inputs[0].shape, dtype)
        self.nodes.append(OpNode(name, f"quantized_decomposed.{op}.default", inputs, [out], dict(attrs)))
        return replace(out, producer=(name, 0))

    def _current(self, t: TensorSpec) -> TensorSpec:
        return self.replaced.get(t.producer, t) if t.producer is not None else t

    def add(self, node: OpNode, layer: Layer | None) -> None:
        """Add a node of the network; a layer as the product of its dequantised operands."""
        if layer is None:
            self.nodes.append(replace(node, inputs=[self._current(t) for t in node.inputs]))
            return
        base = layer.result.name
        stored = self._weight(f"{base}.weight.int8", layer.quantized)
        scale = self._weight(f"{base}.weight.scale", layer.scale)
        attrs = {"zero_points": None, "axis": 0, "quant_min": -_MOST, "quant_max": _MOST, "dtype": "int8"}
        weight = self._node(f"{base}.weight", "dequantize_per_channel", [stored, scale], "float32", attrs)
        inputs = [self._current(layer.node.inputs[0]), weight]
        if layer.bias is not None:
            inputs.append(self._weight(f"{base}.bias", layer.bias))
        self.nodes.append(replace(layer.node, name=base, inputs=inputs, outputs=layer.result.outputs))

    def quantize(self, t: TensorSpec, key: Key, affine: Affine) -> None:
        """Quantise a value, which later nodes then read from 8 bits."""
        attrs = {
            "scale": affine.scale, "zero_point": affine.zero_point, "quant_min": 0, "quant_max": LEVELS,
            "dtype": "uint8",
        }  # fmt: skip
        q = self._node(f"{t.name}.quantized", "quantize_per_tensor", [replace(t, producer=key)], "uint8", attrs)
        self.replaced[key] = self._node(f"{t.name}.dequantized", "dequantize_per_tensor", [q], "float32", attrs)
