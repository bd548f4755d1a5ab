"""What lossy weight formats do to the matrices of a model: bytes, and the error of the decoded elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.graph.graph import Node, Value
from npu_compiler.graph.interp import evaluate_node
from npu_compiler.graph.structure import main_weight
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.support.ordering import depth_first
from npu_compiler.support.progress import step
from npu_compiler.support.text import si
from npu_compiler.weights.files import WeightSource, open_weights
from npu_compiler.weights.format import BlockFormat, block_format
from npu_runtime.weight_loader import read_as

from .console import Table

_ELEMENTS = 2**22  # that are encoded at a time: the temporary arrays of an embedding would take gigabytes


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix in a block format, compared with the elements that it replaces.

    Attributes:
        weight: the state_dict entry that the matrix is made of; the largest one of several.
        shape: (N, K).
        bytes: of its blocks.
        relative_rms_error: the root of the squared error's sum over that of the elements' squares.
        in_file: the file holds these blocks, so nothing was rounded.
    """

    weight: str
    format: str
    shape: tuple[int, int]
    bytes: int
    relative_rms_error: float
    in_file: bool

    @property
    def bits_per_weight(self) -> float:
        """8 bytes / (N K)."""
        return 8 * self.bytes / math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes and the bits of a weight."""
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}


def weight_errors(program: CompiledProgram | MixedProgram, weights: Any) -> list[RoundedMatrix]:
    """Return the errors of all matrices that a program stores in block formats, in the order of its recipes.

    Args:
        weights: the original tensors, as ``open_weights`` takes them.

    Raises:
        IncompressibleError: a matrix has values that its format cannot represent.
        WeightError: a weight cannot be read.
    """
    source = open_weights(weights)
    parts = program.programs.values() if isinstance(program, MixedProgram) else [program]
    nodes = [node for part in parts for node in part.recipes.nodes if node.op == "quantize"]
    found = []
    with step("comparing weights with the original", len(nodes)) as progress:
        for node in nodes:
            found.append(_error(node, source))
            progress.advance()
    return found


def _error(node: Node, source: WeightSource) -> RoundedMatrix:
    """The error of the result of a ``quantize`` node."""
    matrix, format = node.inputs[0], block_format(node.attrs["format"])
    name, (n, k) = main_weight(matrix), matrix.shape
    held = source.blocks(name, format) if matrix.op == "weight" else None
    exact = held is not None and held.shape == node.out.shape
    error = 0.0 if exact else _relative_error(_evaluated(matrix, source), format)
    return RoundedMatrix(name, format.name, (n, k), math.prod(node.out.shape), error, exact)


def _evaluated(matrix: Value, source: WeightSource) -> np.ndarray:
    """The elements of a matrix that recipes compute from weights."""
    made: dict[Value, np.ndarray] = {}
    for node in depth_first([matrix.node], lambda n: [v.node for v in n.inputs]):
        if node.op == "weight":
            made[node.out] = read_as(source, node.attrs["key"], node.out.dtype)
        else:
            made.update(zip(node.outputs, evaluate_node(node, [made[v] for v in node.inputs]), strict=True))
    return made[matrix]


def _relative_error(matrix: np.ndarray, format: BlockFormat) -> float:
    """The relative RMS error of a matrix [N, K] that is encoded and decoded."""
    rows, k = max(_ELEMENTS // matrix.shape[1], 1), matrix.shape[1]
    error = size = 0.0
    for i in range(0, len(matrix), rows):
        part = matrix[i : i + rows]
        decoded, exact = format.decode(format.encode(part), k).astype(np.float64), part.astype(np.float64)
        error += float(np.square(decoded - exact).sum())
        size += float(np.square(exact).sum())
    return math.sqrt(error / size) if size else 0.0


def error_blocks(errors: Sequence[RoundedMatrix]) -> list[str | Table]:
    """Return a table of errors, one row a matrix, and a line about all of them."""
    if not errors:
        return ["no matrix is stored in a lossy format"]
    header = ("weight", "format", "shape", "bytes", "bits a weight", "relative RMS error")
    rows = [
        (e.weight, e.format, f"{e.shape[0]} x {e.shape[1]}", si(e.bytes, "B"), f"{e.bits_per_weight:.3f}",
         "blocks of the file" if e.in_file else f"{e.relative_rms_error:.3e}")
        for e in errors
    ]  # fmt: skip
    return [Table(header, rows), _summary(errors)]


def _summary(errors: Iterable[RoundedMatrix]) -> str:
    errors = list(errors)
    size = sum(e.bytes for e in errors)
    bits = 8 * size / sum(math.prod(e.shape) for e in errors)
    worst = max(errors, key=lambda e: e.relative_rms_error)
    return (
        f"{len(errors)} matrices in lossy formats: {si(size, 'B')}, {bits:.3f} bits a weight; the largest relative RMS "
        f"error is {worst.relative_rms_error:.3e} ({worst.weight})"
    )
