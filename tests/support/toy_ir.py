"""Small IR graphs, written one line a node."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec

RELU, SIGMOID, ADD, RELU_, VIEW = (
    f"aten.{op}" for op in ("relu.default", "sigmoid.default", "add.Tensor", "relu_.default", "view.default")
)
HEAVY, ODD = "aten.matmul.default", "aten.special_bessel_j1.default"  # neither moves: one is costly, the other CPU only
GETITEM = "<built-in function getitem>"
SHAPE = (4, 4)


class Builder:
    """Writes an IRGraph of 4 x 4 float32 tensors, one line a node."""

    def __init__(self, inputs: Sequence[str] = ("x",), weights: Sequence[str] = ()):
        self.specs: dict[str, TensorSpec] = {n: TensorSpec(n, SHAPE, "float32", (n, 0)) for n in inputs}
        self.ir = IRGraph("toy", list(self.specs.values()), [], [], {}, [])
        for key in weights:
            self.ir.weights.append(TensorSpec(key, SHAPE, "float32"))
            self.ir.weight_name_mapping[f"p_{key}"] = key
            self.specs[f"p_{key}"] = TensorSpec(f"p_{key}", SHAPE, "float32")

    def node(
        self, name: str, op: str, *inputs: str, outputs: int = 1, shape: tuple[int, ...] = SHAPE, **attrs: object
    ) -> Builder:
        outs = [TensorSpec(name if outputs == 1 else f"{name}_{i}", shape, "float32") for i in range(outputs)]
        self.ir.nodes.append(OpNode(name, op, [self.specs[i] for i in inputs], outs, dict(attrs)))
        for i, t in enumerate(outs):
            self.specs[t.name] = TensorSpec(t.name, t.shape, t.dtype, (name, i))
        return self

    def out(self, *names: str) -> IRGraph:
        self.ir.graph_outputs = [self.specs[n] for n in names]
        return self.ir
