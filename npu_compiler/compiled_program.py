"""The artifact: what an ahead-of-time compilation leaves behind, and all that running it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .graph import Graph

ABI_VERSION = 1


@dataclass(frozen=True)
class IOSpec:
    """An input or output tensor as the caller sees it, and the buffer the program reads or writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: int


@dataclass(frozen=True)
class BufferSpec:
    """A buffer by ``id``. ``kind`` as in :class:`npu_compiler.kernel.Buffer`; ``offset`` is its byte offset in the arena;
    ``name`` is the I/O name, the state key, or the name of the recipe output that fills a weight or const buffer."""

    id: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    offset: int = 0


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch: operands by buffer id, what it computes in words, which IR nodes it stands for, its cost."""

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    text: str
    sources: tuple[str, ...]
    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class EntryPoint:
    """One callable of a program: ``symbol`` in the binary, kernels in launch order, I/O, and planned memory in bytes.
    ``scratch_bytes`` is needed once per thread, behind the arena."""

    name: str
    symbol: str
    inputs: tuple[IOSpec, ...]
    outputs: tuple[IOSpec, ...]
    calls: tuple[KernelCall, ...]
    arena_bytes: int
    scratch_bytes: int
    updates: tuple[tuple[str, int], ...] = ()  # (state key, buffer that holds it after a run)


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of the model's state_dict that the recipes read."""

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class CompiledProgram:
    """A compiled model. Entry points share ``buffers`` (weights, constants, state).

    ``recipes`` is a core graph whose leaves are state_dict entries and constants and whose outputs, named by
    ``BufferSpec.name``, fill the weight buffers: batch-norm folding, casts, concatenations and packing are ordinary nodes.
    ``requires`` lists the CPU features (or device architecture) the ``binary`` needs; ``sources`` can rebuild it.
    """

    name: str
    target: str
    dtype: str
    entries: dict[str, EntryPoint]
    buffers: list[BufferSpec]
    weights: list[WeightSpec]
    recipes: Graph
    sources: dict[str, str]
    binary: bytes
    requires: tuple[str, ...]
    build: dict[str, Any] = field(default_factory=dict)  # compiler, flags, versions
