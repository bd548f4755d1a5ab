"""A schedule: the kernels of an entry point in launch order, and the buffers they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .buffers import Buffer, Operand, contiguous_strides
from .kernel import FusedLoops, Kernel


@dataclass
class Schedule:
    """An entry point, ready for a target: kernels in launch order, and every buffer that they access."""

    name: str
    kernels: list[Kernel]
    buffers: list[Buffer]
    inputs: list[tuple[str, Buffer]]
    outputs: list[tuple[str, Buffer]]
    arena_bytes: int = 0

    def memory(self, dtype: str, shape: tuple[int, ...], name: str, persistent: bool = False) -> Operand:
        """Add a buffer of the arena, whose offset is planned later, and return all of it as an operand."""
        id = max((b.id for b in self.buffers), default=-1) + 1
        buffer = Buffer(id, "arena", dtype, shape, name, persistent=persistent)
        self.buffers.append(buffer)
        return Operand(buffer, shape, contiguous_strides(shape))

    def rewrite(self, new: Mapping[Kernel, Sequence[Kernel]]) -> None:
        """Replace kernels, or parts of fused loops, by the given ones. The remaining parts stay fused."""
        kernels: list[Kernel] = []
        for k in self.kernels:
            parts = [r for p in k.members for r in new.get(p, (p,))]
            if k in new or not any(p in new for p in k.members):
                kernels += new.get(k, (k,))
            else:
                kernels += [FusedLoops.of(parts)] if len(parts) > 1 else parts
        self.kernels = kernels

    def remove_unused(self) -> None:
        """Remove kernels whose results nothing reads."""
        read = {o.buffer.id for k in self.kernels for o in k.inputs} | {b.id for _, b in self.outputs}
        unused = [
            p for k in self.kernels for p in k.members
            if all(o.buffer.kind == "arena" and o.buffer.id not in read for o in p.outputs)
        ]  # fmt: skip
        self.rewrite({p: () for p in unused})
