"""Two 1x1 convolutions back to back on Hopper: the supported kernels, and the arguments of the template in
``kernels/b2b_conv.h``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ...schedule.anchors import B2bConv2d, Conv2d, DualConv2d
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.gemm import conv_product
from ..simt.kernels.operand_types import OperandType, as_b16, operand_type
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members, blocks, constants
from ..simt.lang.program import TileMap
from .devices import CUDADevice
from .dual_conv import DTYPES, halves
from .tile_selection import GROUP_EXTRA, SUBTILE, WARPGROUP, device_of, subtile_columns
from .tma_epilogue import hold_vectors, residual_of, row_pitch, supports_tma_store, vector_bytes
from .tma_gemm import is_plain, supports_tma

CHANNELS = (64, 32)  # b16 elements of a pixel: rows of 128 or 64 bytes
COLUMNS = (128, 256)  # results of the first convolution: rows of filters in one TMA load
FINAL = (64, 128)  # results of the second convolution
ROW = 128  # bytes of a row of a subtile of results
TILE_N = 64  # results of the first convolution that a warpgroup computes at once
WARPGROUPS = (4, 3)  # of a thread block, best first
PIXEL_SLOTS = (2, 1)  # of a warpgroup
MIN_SLOTS, MAX_SLOTS = 3, 6  # of a warpgroup, for subtiles of results
MIN_TILES = 2  # of a warpgroup: filters are loaded once


@dataclass(frozen=True)
class Plan:
    """``warpgroups`` of a thread block, each with ``pixel_slots`` for tiles of pixels and ``slots`` for subtiles of
    results."""

    warpgroups: int
    pixel_slots: int
    slots: int


def supports_b2b_conv(kernel: B2bConv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_b2b_conv` supports ``kernel``: 1x1 convolutions of few channels, whose filters fit in shared
    memory, and of many pixels."""
    added, first = _split(kernel)
    every = [first, kernel.second, *([added] if added is not None else [])]
    if any(k.inputs[0].dtype != k.outputs[0].dtype or k.outputs[0].dtype not in DTYPES for k in every):
        return False
    if not all(supports_tma(k) and supports_tma_store(k) and is_plain(k) for k in every):
        return False
    if residual_of(kernel.second) != -1 or (added is not None and {residual_of(added), residual_of(first)} != {-1}):
        return False
    p, q = conv_product(_viewed(first)), conv_product(_viewed(kernel.second))
    if p.k not in CHANNELS or p.n not in COLUMNS or q.n not in FINAL:
        return False
    if added is not None and conv_product(_viewed(added)) != p:
        return False
    plan, device = _plan(kernel, device_of(dialect)), device_of(dialect)
    return plan is not None and blocks(p.m, SUBTILE) >= MIN_TILES * device.compute_units * plan.warpgroups


def emit_b2b_conv(kernel: B2bConv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_b2b_conv`."""
    plan = _plan(kernel, device_of(dialect))
    assert plan is not None
    return _B2bConv(kernel, dialect, plan).emit()


def _split(kernel: B2bConv2d) -> tuple[Conv2d | None, Conv2d]:
    """Return (the convolution whose results the first one adds, or None; the first one)."""
    return halves(kernel.first) if isinstance(kernel.first, DualConv2d) else (None, kernel.first)


def _viewed(conv: Conv2d) -> Conv2d:
    found = as_b16(conv)
    assert isinstance(found, Conv2d)
    return found


def _filters(kernel: B2bConv2d) -> int:
    """Return the b16 elements of all filters."""
    added, first = _split(kernel)
    p, q = conv_product(_viewed(first)), conv_product(_viewed(kernel.second))
    return (1 if added is None else 2) * p.n * p.k + q.n * q.k


def _subtile(conv: Conv2d) -> int:
    """Return the columns of a subtile of results."""
    return ROW // dtypes.DTYPES[conv.outputs[0].dtype].size


def _buffers(kernel: B2bConv2d, plan: Plan) -> int:
    """Return the b16 elements of all slots of a thread block."""
    added, first = _split(kernel)
    pixels = (1 if added is None else 2) * conv_product(_viewed(first)).k
    return plan.warpgroups * SUBTILE * (plan.pixel_slots * pixels + plan.slots * ROW // 2)


def _plan(kernel: B2bConv2d, device: CUDADevice) -> Plan | None:
    """Return the first plan that fits an SM, or None. TMA needs one more slot to load a residual in time."""
    added, first = _split(kernel)
    vectors = sum(vector_bytes(k) for k in (first, kernel.second, *([added] if added is not None else [])))
    fewest = MIN_SLOTS if residual_of(first) == -1 else MIN_SLOTS + 1
    for warpgroups, pixel_slots, slots in product(WARPGROUPS, PIXEL_SLOTS, range(MAX_SLOTS, fewest - 1, -1)):
        plan = Plan(warpgroups, pixel_slots, slots)
        if (_filters(kernel) + _buffers(kernel, plan)) * 2 + vectors + GROUP_EXTRA <= device.shared_bytes:
            return plan
    return None


class _B2bConv:
    """The function of a :class:`B2bConv2d`. Operand numbers are those of its inputs: of the first convolution, of the
    one whose results it adds, then of the second without its left operand."""

    def __init__(self, kernel: B2bConv2d, dialect: Dialect, plan: Plan):
        self.kernel, self.plan, self.dialect = kernel, plan, dialect
        self.added, self.first = _split(kernel)
        self.f = Function(kernel, dialect, explicit_wait=True)
        self.at_added, self.at_second = len(self.first.inputs), len(kernel.first.inputs) - 1
        kind = operand_type(self.first)
        assert kind is not None
        self.kind: OperandType = kind
        self.size = dtypes.DTYPES[self.first.outputs[0].dtype].size

    def emit(self) -> Emission:
        """Return the function."""
        f, plan, first, second = self.f, self.plan, self.first, self.kernel.second
        p, q = conv_product(_viewed(first)), conv_product(_viewed(second))
        f.resident = 1
        # first, because wgmma's swizzle needs their alignment
        filters = f.array(self.kind.ctype, "filters", _filters(self.kernel))
        buffers = f.array(self.kind.ctype, "buffers", _buffers(self.kernel, plan))
        operands = self._operands(first, 0, "@NAME@_product")
        residual = residual_of(first)
        f.prefetch_constants()
        columns = TileMap((q.k, q.n, 1), (q.k * 2, q.k * q.n * 2), (ROW // 2, q.n, 1), ROW)
        final_filters = f.tile_map(self.at_second + 1, columns)
        last_row = subtile_columns(q.n, self.size) * self.size
        outputs = [f"&{self._results(~0, first, ROW)}", f"&{self._results(~1, second, last_row)}"]
        outputs.append("nullptr" if residual in (-1, None) else f"&{self._results(residual, first, ROW)}")
        before = "NoSum{}"
        if self.added is not None:
            others = self._operands(self.added, self.at_added, "@NAME@_added_product")
            before = f"keep({others}, {self._functor(self.added, 'added', self.at_added)})"
        full = f.array("int64_t", "full", plan.warpgroups * (plan.pixel_slots + plan.slots) + 1)
        tiles = blocks(p.m, SUBTILE)
        workgroups = min(blocks(tiles, plan.warpgroups), self.dialect.device.compute_units)
        sizes = dict(
            M=p.m, N=p.n, K=p.k, WARPGROUPS=plan.warpgroups, PIXEL_SLOTS=plan.pixel_slots, SLOTS=plan.slots,
            TILES=tiles, STEP=workgroups * plan.warpgroups, COLUMNS=p.n, SUBTILE_N=_subtile(first), TILE_N=TILE_N,
            FINAL=q.n, OUTPUTS=1, PRODUCTS=1, SUM_ROWS=0, RESIDUAL=residual not in (-1, None),
            KEEPS=self.added is not None,
        )  # fmt: skip
        types = {"T": self.kind.ctype, "Sum": self.kind.sum_ctype, "R": dtypes.DTYPES[first.outputs[0].dtype].ctype}
        f.template(
            "b2b_conv", "b2b_conv.h", types, sizes, operands, final_filters, filters, buffers, full,
            self._functor(first, "epilogue", 0), self._functor(second, "final", self.at_second),
            f"TileOutputs{{{', '.join(outputs)}}}", before,
        )  # fmt: skip
        return f.finish(workgroups, plan.warpgroups * WARPGROUP)

    def _operands(self, conv: Conv2d, at: int, name: str) -> str:
        """Define struct ``name``, and return the template's argument for pixels and filters of a convolution.
        ``at``: the number of its first operand."""
        p = conv_product(_viewed(conv))
        row = p.k * 2
        pixels = self.f.tile_map(at, TileMap((p.k, p.m, 1), (row, row * p.m), (p.k, SUBTILE, 1), row))
        filters = self.f.tile_map(at + 1, TileMap((p.k, p.n, 1), (row, row * p.n), (p.k, p.n, 1), row))
        self.f.before.append(constants(name, {}, {"K_TILES": 1, "IM2COL": False}))
        return f"Operands<{name}>{{{pixels}, {filters}}}"

    def _results(self, number: int, conv: Conv2d, row: int) -> str:
        """Return the tensor map of results, or of a residual, in subtiles with rows of ``row`` bytes."""
        p = conv_product(conv)
        pitch = row_pitch(self.f.operand(number)) * self.size
        return self.f.tile_map(
            number, TileMap((p.n * self.size // 2, p.m, 1), (pitch, pitch * p.m), (row // 2, SUBTILE, 1), row)
        )

    def _functor(self, conv: Conv2d, name: str, at: int) -> str:
        """Define the epilogue of a convolution whose first operand is number ``at``."""
        members = Members(self.f, f"@NAME@_{name}")
        hold_vectors(conv, members, self.plan.warpgroups * WARPGROUP, at)
        keeps = conv is self.first and self.added is not None
        epilogue = Epilogue(conv, members, max_width=8, first=at, widened=True, floats=conv is self.added, keeps=keeps)
        made = Functor(epilogue, members, 2, 2 if keeps else 1)
        made.types()
        made.read_shared()
        made.compute(ahead=True, shared=True)
        return made.finish()
