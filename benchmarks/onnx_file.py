"""Writes a quantised network as an ONNX file (QuantizeLinear, DequantizeLinear), for engines that read ONNX.

Only what ``npusim quantize`` makes of the built-in networks is known. The format is protocol buffers: a message is a
sequence of fields, each a key (number and wire type) and a value (a variable-length integer, or bytes with a length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec

OPSET, IR_VERSION = 17, 8
_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7}
_FLOAT, _INT, _INTS = 1, 2, 7  # AttributeProto.type


def _varint(n: int) -> bytes:
    out = bytearray()
    n &= (1 << 64) - 1
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _tensor(name: str, a: np.ndarray) -> bytes:
    dims = b"".join(_field(1, n) for n in a.shape)
    return dims + _field(2, _TYPES[str(a.dtype)]) + _field(8, name) + _field(9, np.ascontiguousarray(a).tobytes())


def _attribute(name: str, value: float | int | Sequence[int]) -> bytes:
    if isinstance(value, float):
        data = _varint(2 << 3 | 5) + np.float32(value).tobytes()
        return _field(1, name) + data + _field(20, _FLOAT)
    if isinstance(value, int):
        return _field(1, name) + _field(3, value) + _field(20, _INT)
    return _field(1, name) + b"".join(_field(8, v) for v in value) + _field(20, _INTS)


def _node(op: str, inputs: Sequence[str], output: str, **attrs: Any) -> bytes:
    names = b"".join(_field(1, i) for i in inputs) + _field(2, output) + _field(4, op)
    return names + b"".join(_field(5, _attribute(k, v)) for k, v in attrs.items())


def _value(name: str, t: TensorSpec) -> bytes:
    shape = b"".join(_field(1, _field(1, n)) for n in t.shape)
    return _field(1, name) + _field(2, _field(1, _field(1, _TYPES[t.dtype]) + _field(2, shape)))


class _Writer:
    def __init__(self, ir: IRGraph, weights: Mapping[str, np.ndarray]):
        self.ir, self.weights = ir, weights
        self.nodes: list[bytes] = []
        self.tensors: dict[str, bytes] = {}

    def constant(self, name: str, values: Any) -> str:
        self.tensors.setdefault(name, _tensor(name, np.asarray(values)))
        return name

    def name(self, t: TensorSpec) -> str:
        if t.producer is not None:
            return t.producer[0]
        return self.constant(t.name, self.weights[self.ir.weight_name_mapping[t.name]])

    def add(self, node: OpNode) -> None:
        """Add the node of the same meaning. Raises ``ValueError`` for an op that is not known."""
        a, op, out = node.attrs, node.op_type.split(".")[1], node.name
        inputs = [self.name(t) for t in node.inputs]
        pads = [*a.get("padding", (0, 0))] * 2
        if op in ("quantize_per_tensor", "dequantize_per_tensor"):
            inputs.append(self.constant(f"{out}_scale", np.float32(a["scale"])))
            inputs.append(self.constant(f"{out}_zero", np.uint8(a["zero_point"])))
            self.nodes.append(_node("QuantizeLinear" if op[0] == "q" else "DequantizeLinear", inputs, out))
        elif op == "dequantize_per_channel":
            inputs.append(self.constant(f"{out}_zero", np.zeros(node.inputs[1].shape, np.int8)))
            self.nodes.append(_node("DequantizeLinear", inputs, out, axis=0))
        elif op == "conv2d":
            shape = node.inputs[1].shape[2:]
            step = a.get("stride", (1, 1))
            attrs = {"kernel_shape": shape, "strides": step, "pads": pads, "group": a.get("groups", 1)}
            self.nodes.append(_node("Conv", inputs, out, **attrs))
        elif op == "linear":
            self.nodes.append(_node("Gemm", inputs, out, transB=1))
        elif op == "max_pool2d":
            attrs = {"kernel_shape": a["kernel_size"], "strides": a["stride"], "pads": pads}
            self.nodes.append(_node("MaxPool", inputs, out, **attrs))
        elif op in _SIMPLE:
            self.nodes.append(_node(_SIMPLE[op], inputs, out))
        else:
            raise ValueError(f"{node.name}: {node.op_type} has no ONNX form here")


_SIMPLE = {"relu": "Relu", "add": "Add", "adaptive_avg_pool2d": "GlobalAveragePool", "flatten": "Flatten"}


def write(path: Path, ir: IRGraph, weights: Mapping[str, np.ndarray]) -> None:
    """Write a network and its weights. Raises ``ValueError`` for an op that is not known."""
    writer = _Writer(ir, weights)
    for node in ir.nodes:
        writer.add(node)
    graph = b"".join(_field(1, n) for n in writer.nodes) + _field(2, ir.model_name)
    outputs = b"".join(_field(12, _value(writer.name(t), t)) for t in ir.graph_outputs)
    graph += b"".join(_field(5, t) for t in writer.tensors.values())
    graph += b"".join(_field(11, _value(t.name, t)) for t in ir.graph_inputs) + outputs
    opset = _field(1, "") + _field(2, OPSET)
    path.write_bytes(_field(1, IR_VERSION) + _field(7, graph) + _field(8, opset))
