"""The parts of a compiled program: everything that a run needs.

The binary of the ``cpu`` target is a shared object that exports, with C linkage:

``int npu_abi(void)``            :data:`ABI_VERSION`
``int npu_start(int threads)``   starts the thread pool; the number of threads it has, or 0 if it cannot start
``long npu_scratch_bytes(void)`` what each thread of the pool allocates; optional, explains why the pool cannot start
``void npu_stop(void)``          ends the pool
``const char npu_layout[64]``    :data:`LAYOUT_MARKER`, which ``serialize.stamp_layout`` replaces
``int SYMBOL(void* const* buffers, char* arena, double* times)``   one per entry point, named as in :data:`SYMBOL`

``buffers`` is indexed by buffer id (arena buffers are null); each pointer is aligned at least to its element size.
``arena`` is 64-byte aligned memory of ``arena_bytes``. ``times`` is null, or receives ``len(calls) + 1``
CLOCK_MONOTONIC seconds: the start of the run and the end of each kernel. The result is 0, or 1 + k if kernel k read
an index out of range in its data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..aten.ir import Location
from ..graph.graph import Graph
from ..support import buffer_kinds
from ..support.errors import InputError

ABI_VERSION = 1
LAYOUT_MARKER = "npu-layout-".ljust(64, ".")
SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")  # of a source file
SYMBOL = re.compile(r"npu_(?!(?:abi|start|stop|layout)$)[A-Za-z0-9_]{1,200}")


@dataclass(frozen=True)
class IOSpec:
    """An input or output tensor as the caller sees it, and the buffer the program reads or writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: int


@dataclass(frozen=True)
class BufferSpec:
    """A buffer by ``id``. ``kind`` as in ``schedule.kernel.Buffer``; ``offset`` is its byte offset in the
    arena; ``name`` is the I/O name, the state key, or the name of the recipe output that fills a weight or const.
    ``format``: of a weight in a weight format, the name of its layout (``weights.format``); else empty."""

    id: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    offset: int = 0
    format: str = ""

    @property
    def constant(self) -> bool:
        """Whether the buffer is filled when weights are loaded."""
        return self.kind in buffer_kinds.CONSTANT


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch: operands by buffer id, what it computes as text, the IR nodes it implements, its cost.

    ``locations`` number the places in the model's code that these nodes come from, in ``ProgramSpec.locations``.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    text: str
    sources: tuple[str, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    locations: tuple[int, ...] = ()


@dataclass(frozen=True)
class EntryPoint:
    """One callable of a program: its ``symbol`` in the binary, its kernels in launch order, its I/O, and the planned
    memory in bytes."""

    name: str
    symbol: str
    inputs: tuple[IOSpec, ...]
    outputs: tuple[IOSpec, ...]
    calls: tuple[KernelCall, ...]
    arena_bytes: int
    updates: tuple[tuple[str, int], ...] = ()  # (state key, buffer that holds it after a run)

    @property
    def product_bytes(self) -> int:
        """Bytes that matrix products read in a run: mostly weights in their stored form."""
        return sum(c.bytes_read for c in self.calls if c.kind.startswith("gemm"))


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of the model's state_dict that the recipes read."""

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(repr=False)
class ProgramSpec:
    """The parts of a compiled model. Entry points share ``buffers`` (weights, constants, state).

    ``recipes`` is a core graph whose leaves are state_dict entries and constants and whose outputs, named by
    ``BufferSpec.name``, fill the weight buffers: batch-norm folding, casts, concatenations and packing are ordinary
    nodes. An output with the name of a state is a constant: the contents before the first run, unless weights have it.
    ``requires`` lists the CPU features (or device architecture) the ``binary`` needs; ``sources`` can rebuild it.
    ``device``: what it was compiled for, for example 'cuda:sm_90'; the target's name if the target has one device.
    ``locations``: modules and lines of the model's code, which kernels refer to by number; for people alone.
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
    device: str = ""
    locations: list[Location] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[IOSpec, ...]:
        """Inputs of the only entry point. Raises ``InputError`` if there are several."""
        return self.entry().inputs

    @property
    def outputs(self) -> tuple[IOSpec, ...]:
        """Outputs of the only entry point. Raises ``InputError`` if there are several."""
        return self.entry().outputs

    def entry(self, name: str | None = None) -> EntryPoint:
        """An entry point by name; None stands for the only one. Raises ``InputError`` with the names of all."""
        if name is None and len(self.entries) == 1:
            return next(iter(self.entries.values()))
        if name not in self.entries:
            problem = "several entry points, name one" if name is None else f"no entry point {name!r}"
            raise InputError(f"program {self.name!r} has {problem}; it has {', '.join(self.entries)}")
        return self.entries[name]
