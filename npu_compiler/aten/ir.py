"""The ATen-level IR, which the frontend writes and the compiler reads.

Values are immutable. Shapes are static, except for dimensions that depend on tensor data; only the host fallback can
run nodes with such dimensions (``data_dependent.py``).

A value is identified by ``(producer node, output index)``, never by name alone: names may collide.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..support import dtypes
from ..support.errors import IRError

GETITEM = "<built-in function getitem>"
Key = tuple[str, int]  # of a value: its producer and output index; of a weight or constant: its name and -1


class DataSize(int):
    """A dimension that depends on tensor data: the integer -1 with an expression ('u0', '2*u0').

    Equal expressions in one graph are equal sizes.
    """

    expression: str

    def __new__(cls, expression: str) -> DataSize:
        self = super().__new__(cls, -1)
        self.expression = expression
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.expression,)

    def __repr__(self) -> str:
        return self.expression


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the IR. ``producer`` is None for weights and constants (looked up by ``name``) and for node
    outputs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    producer: tuple[str, int] | None = None

    @property
    def is_static(self) -> bool:
        """Whether no dimension is a :class:`DataSize`."""
        return all(d >= 0 for d in self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a value of ``shape`` fits this type; a :class:`DataSize` fits every size."""
        return len(shape) == len(self.shape) and all(d < 0 or d == n for d, n in zip(self.shape, shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements of a tensor whose shape is static."""
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Location:
    """Where a node comes from in the model's Python code. It is for reports only: no generated code depends on it.

    ``module``: the path of the innermost ``nn.Module`` ('layer1.0.conv1'; '' is the model itself), ``kind`` its class.
    ``source``: the innermost line outside of PyTorch, 'resnet.py:118'; empty if it is unknown.
    """

    module: str = ""
    kind: str = ""
    source: str = ""


@dataclass
class OpNode:
    """One ATen call. ``inputs`` are tensors only; every other argument is in ``attrs`` under its schema name.

    ``graphs`` are the branches and bodies of control flow, by name; they have graph inputs and no weights. ``note``
    says why an op without a lowering was not decomposed. ``location`` is None if the IR does not state it.
    """

    name: str
    op_type: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    attrs: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, IRGraph] = field(default_factory=dict)
    note: str = ""
    location: Location | None = None


def selected(getitem: OpNode) -> TensorSpec:
    """Return the input that a getitem node selects; the IR lists all outputs of its producer. Raises ``IRError``."""
    index = getitem.attrs.get("index")
    if type(index) is not int or not -len(getitem.inputs) <= index < len(getitem.inputs):
        count = len(getitem.inputs)
        raise IRError(f"node {getitem.name!r}: getitem index {index!r} does not select one of its {count} inputs")
    return getitem.inputs[index]


# Ops whose ``dtype`` is that of quantised values, not of their result.
_STORED_DTYPE = ("quantized_decomposed.dequantize_", "quantized_decomposed.choose_", "quantized_decomposed._choose_")


def dtype_contradiction(node: OpNode) -> str | None:
    """Return how the ``dtype`` argument of a node contradicts the dtype of its output, or None."""
    if node.attrs.get("dtype") is None or not node.outputs or node.op_type.startswith(_STORED_DTYPE):
        return None
    declared = node.outputs[0].dtype
    try:
        wanted = dtypes.parse(node.attrs["dtype"])
    except ValueError as error:
        return str(error)
    return None if wanted == declared else f"dtype={wanted} contradicts the output, which the IR declares as {declared}"


@dataclass(frozen=True)
class StateUpdate:
    """A buffer that the graph mutates: ``key`` is its state_dict name, ``value`` its contents after a run."""

    key: str
    value: TensorSpec


@dataclass(repr=False)
class IRGraph:
    """A whole model. ``weights`` are named by state_dict key; nodes refer to placeholders (``weight_name_mapping``).

    ``allowed_ops`` are op types outside of PyTorch's own namespaces that the host fallback may call: those of a
    captured model, or those the caller of ``load_ir`` trusts. They are never read from or written to a file.

    ``weights_of_model``: of a partition, the specs of all weights that the model reads, by key; else empty.

    ``dry_runs`` has the results of the constraint checker, by target and call. Graphs that are derived from this one
    with ``dataclasses.replace`` share it, so checking, explaining, partitioning and compiling try each call only once.
    """

    model_name: str
    graph_inputs: list[TensorSpec]
    graph_outputs: list[TensorSpec]
    weights: list[TensorSpec]
    weight_name_mapping: dict[str, str]
    nodes: list[OpNode]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    state: list[StateUpdate] = field(default_factory=list)
    pytorch_version: str = ""
    allowed_ops: frozenset[str] = field(default=frozenset(), compare=False)
    weights_of_model: dict[str, TensorSpec] = field(default_factory=dict, compare=False)
    dry_runs: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave ``dry_runs`` out of copies and pickles: another version of the compiler may decide differently."""
        return {**self.__dict__, "dry_runs": {}}

    def __repr__(self) -> str:
        io = f"{len(self.graph_inputs)} input(s), {len(self.graph_outputs)} output(s), {len(self.weights)} weights"
        return f"<IRGraph {self.model_name or 'model'}: {len(self.nodes)} nodes, {io}>"

    def key(self, t: TensorSpec) -> tuple[str, int]:
        """Return the identity of the value that a node input or graph output refers to; leaves are ``(name, -1)``."""
        return t.producer if t.producer is not None else (t.name, -1)

    def output_names(self) -> list[str]:
        """Return unique names of the graph outputs, in order: a repeated tensor is numbered, ``y``, ``y#1``."""
        counts: dict[str, int] = {}
        names = []
        for t in self.graph_outputs:
            count = counts[t.name] = counts.get(t.name, -1) + 1
            names.append(f"{t.name}#{count}" if count else t.name)
        return names
