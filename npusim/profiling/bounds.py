"""The minimum time of each kernel on a device by the roofline model, where data comes from the cache that still has it.

After Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (2009). The reuse distance of
an operand decides which cache has it: the bytes that kernels access between its last use and this one. Each run is
assumed to follow another one, so a weight was last used one run ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.artifact.program import CompiledProgram, EntryPoint, KernelCall
from npu_compiler.artifact.spec import BufferSpec
from npu_compiler.artifact.validate import nbytes
from npu_compiler.schedule.anchors import Anchor
from npu_compiler.schedule.kernel import Kernel
from npu_compiler.target_config import Roofline


def _kinds(kernel: type[Kernel]) -> set[str]:
    own = {kernel.kind} if hasattr(kernel, "kind") else set()
    return own.union(*(_kinds(sub) for sub in kernel.__subclasses__()))


_PRODUCTS = frozenset(_kinds(Anchor))
# Operations are those of the direct sum. Winograd's algorithm has as many multiplications as a tile has points,
# which are a dim of its weights: F(2x2, 3x3) with strides 1 and 2, and F(4x4, 3x3).
_WINOGRAD_POINTS = 2
_SAVED = {16: 9 * 4 / 16, 25: 9 * 4 / 25, 36: 9 * 16 / 36}


@dataclass(frozen=True)
class Bound:
    """The minimum seconds of a kernel, and what limits it: 'memory' or 'compute'."""

    seconds: float
    kind: str


def operand_dtype(call: KernelCall, buffers: dict[int, BufferSpec]) -> str:
    """Return the dtype of a product's factors; for other kernels, which compute in float32 or wider, of the result."""
    first = call.inputs[0] if call.inputs else call.outputs[0]
    return buffers[first if call.kind in _PRODUCTS or not call.outputs else call.outputs[0]].dtype


def bounds(program: CompiledProgram, entry: EntryPoint, roofline: Roofline | None) -> list[Bound]:
    """Return the bound of each kernel of an entry point; 0 seconds if there is no roofline."""
    if roofline is None:
        return [Bound(0.0, "")] * len(entry.calls)
    buffers = {b.id: b for b in program.buffers}
    traffic = _Traffic(entry, buffers, roofline)
    found = []
    for call in entry.calls:
        dtype = operand_dtype(call, buffers)
        peak = roofline.peak(dtype if call.kind in _PRODUCTS or dtype == "float64" else "float32")
        needed = call.flops / _saved(call, buffers)
        moving, computing = traffic.seconds(call), needed / peak if peak else 0.0
        found.append(Bound(max(moving, computing), "compute" if computing > moving else "memory"))
    return found


def _saved(call: KernelCall, buffers: dict[int, BufferSpec]) -> float:
    """Return how many times as many multiplications the direct sum of a kernel has."""
    if call.kind != "winograd":
        return 1.0
    shape = buffers[call.inputs[1]].shape
    return _SAVED.get(shape[_WINOGRAD_POINTS] if len(shape) > _WINOGRAD_POINTS else 0, 1.0)


class _Traffic:
    """Follows the kernels of a run in order."""

    def __init__(self, entry: EntryPoint, buffers: dict[int, BufferSpec], roofline: Roofline):
        self._buffers, self._roofline = buffers, roofline
        used = {id for call in entry.calls for id in (*call.inputs, *call.outputs)}
        self._arena = entry.arena_bytes
        self._footprint = entry.arena_bytes + sum(self._size(id) for id in used if buffers[id].kind != "arena")
        self._clock = 0
        self._last: dict[int, int] = {}  # buffer -> bytes that were touched until after its last use

    def _size(self, id: int) -> int:
        return nbytes(self._buffers[id].shape, self._buffers[id].dtype)

    def seconds(self, call: KernelCall) -> float:
        """Return the minimum seconds for the traffic of the next kernel."""
        total = self._moved(call.inputs, call.bytes_read, written=False)
        total += self._moved(call.outputs, call.bytes_written, written=True)
        self._clock += call.bytes_read + call.bytes_written
        self._last.update(dict.fromkeys((*call.inputs, *call.outputs), self._clock))
        return total

    def _moved(self, ids: tuple[int, ...], moved: int, written: bool) -> float:
        """Return the seconds for ``moved`` bytes, which are divided among the operands by size."""
        sizes = {id: self._size(id) for id in ids}
        whole = sum(sizes.values()) or 1
        return sum(
            moved * size / whole / self._roofline.rate(self._distance(id, written)) for id, size in sizes.items()
        )

    def _distance(self, id: int, written: bool) -> int:
        if id in self._last:
            return min(self._clock - self._last[id] + self._size(id), self._footprint)
        return self._arena if written and self._buffers[id].kind == "arena" else self._footprint
