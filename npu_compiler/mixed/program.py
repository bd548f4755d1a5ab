"""A mixed model as callers see it: a partition plan with the compiled programs of its NPU partitions."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ..artifact import container
from ..artifact.program import CompiledProgram, WeightSpec
from ..artifact.serialize import parse
from ..aten.ir import TensorSpec
from ..aten.json_reader import graph_weights_used
from ..aten.op_names import STRUCTURAL
from ..partitioning.plan import HOST, PartitionPlan
from . import describe, serialize

__all__ = ["MixedProgram", "load_program", "parse_program"]


@dataclass(repr=False)
class MixedProgram:
    """A compiled model of which some partitions run on the host: save it, load it, or run it with ``npu_runtime``.

    ``programs`` has the program of each NPU partition of ``plan``, by partition id. ``target``, ``device``, ``dtype``
    and ``build`` are as in :class:`CompiledProgram`.
    """

    plan: PartitionPlan
    programs: dict[int, CompiledProgram]
    target: str
    dtype: str
    device: str = ""
    build: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.plan.ir.model_name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in order."""
        return tuple(self.plan.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, in order, with unique names."""
        names = self.plan.ir.output_names()
        return tuple(replace(t, name=name) for name, t in zip(names, self.plan.outputs, strict=True))

    @property
    def weights(self) -> list[WeightSpec]:
        """The tensors of the model's state_dict that a run needs."""
        needed = {w.key for p in self.programs.values() for w in p.weights} | self.plan.host_weights().keys()
        used = graph_weights_used(self.plan.ir)
        return [WeightSpec(key, spec.shape, spec.dtype) for key, spec in used.items() if key in needed]

    @property
    def states(self) -> list[str]:
        """The state_dict keys of the buffers that the model writes."""
        return [update.key for update in self.plan.ir.state]

    @property
    def host_ops(self) -> list[str]:
        """The ops that run on the host, each once: they need PyTorch."""
        on_host = (n.op_type for p in self.plan.partitions if p.device == HOST for n in p.ir.nodes)
        return sorted({op for op in on_host if op not in STRUCTURAL})

    @property
    def totals(self) -> dict[str, int]:
        """Totals by name: kernels, FLOPs, bytes of arenas, weights and transfers, nodes on the host."""
        return describe.totals(self)

    def __repr__(self) -> str:
        return f"<MixedProgram {self.plan.summary()}, for {self.device or self.target}, {self.dtype}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.npubin``; a file already at ``path`` is replaced whole or not at all. Raises ``ArtifactError``."""
        container.write(path, self.dumps())

    def dumps(self) -> bytes:
        """Return the bytes of the file, which :meth:`loads` reads. Raises ``ArtifactError``."""
        return serialize.dumps(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], allowed_ops: Collection[str] = ()) -> MixedProgram:
        """Read and validate a ``.npubin`` of a mixed model. Neither native code nor a host op runs.

        ``allowed_ops``: ops that another library registers and that the host may call; see ``load_ir``.

        Raises ``ArtifactError`` with the field or file offset that is wrong.
        """
        return container.read(path, lambda data: cls.loads(data, allowed_ops))

    @classmethod
    def loads(cls, data: bytes, allowed_ops: Collection[str] = ()) -> MixedProgram:
        """Read and validate the bytes of a ``.npubin``; see :meth:`load`."""
        return cls(**serialize.parse(container.unpack(data, container.MIXED)[1], allowed_ops))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.dumps(), self.plan.ir.allowed_ops)

    def describe(self) -> str:
        """Return the model as readable text: partitions, transfers, reasons, and every program."""
        return describe.describe(self)

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as JSON-safe data."""
        return describe.to_json(self)


def _unpickled(data: bytes, allowed_ops: Collection[str]) -> MixedProgram:
    return MixedProgram.loads(data, allowed_ops)


def load_program(path: str | os.PathLike[str], allowed_ops: Collection[str] = ()) -> CompiledProgram | MixedProgram:
    """Read and validate a ``.npubin`` of either kind; see :meth:`CompiledProgram.load`, :meth:`MixedProgram.load`.

    Raises ``ArtifactError``.
    """
    return container.read(path, lambda data: parse_program(data, allowed_ops))


def parse_program(data: bytes, allowed_ops: Collection[str] = ()) -> CompiledProgram | MixedProgram:
    """Read and validate the bytes of a ``.npubin``; see :func:`load_program`."""
    contents, plain = container.unpack(data)
    if contents == container.MIXED:
        return MixedProgram(**serialize.parse(plain, allowed_ops))
    return parse(plain, CompiledProgram)
