"""Two convolutions in one kernel: the results of the first stay in registers and are the residual of the second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...schedule.anchors import Conv2d, DualConv2d
from ...schedule.kernel import recast
from ...support import dtypes
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.gemm import conv_product, product_of
from ..simt.kernels.operand_types import as_b16, operand_type
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members
from .devices import CUDADevice
from .tile_selection import Plan, Problem, candidates, device_of, registers
from .tma_epilogue import residual_of, supports_tma_store
from .tma_gemm import Operands, TmaGemm, supports_tma, tile_k, without_stride

MIN_RESULTS = 2 << 14  # per SM: two tiles. With fewer, split-K kernels are faster
TILE_K = 64  # b16 elements of a stage
DTYPES = ("float16", "bfloat16", "uint8")  # of operands and results


def halves(kernel: DualConv2d) -> tuple[Conv2d, Conv2d]:
    """Return (the convolution whose results are kept, the one that they are added to) as two kernels."""
    first = kernel.residual
    return first, recast(kernel, Conv2d, inputs=kernel.inputs[: -len(first.inputs)])


def supports_dual_conv(kernel: DualConv2d, dialect: Dialect) -> bool:
    """Whether :func:`emit_dual_conv` supports ``kernel``: TMA can store the results of both convolutions, and there are
    many results."""
    first, last = halves(kernel)
    if any(k.inputs[0].dtype != k.outputs[0].dtype or k.outputs[0].dtype not in DTYPES for k in (first, last)):
        return False
    for k in (first, last):
        if not (supports_tma(k) and tile_k(k) == tile_k(last) > 0 and supports_tma_store(k) and residual_of(k) == -1):
            return False
    p, q = conv_product(first), conv_product(last)
    device = device_of(dialect)
    if tile_k(last) < TILE_K and last.outputs[0].dtype != "uint8":
        return False
    return (p.m, p.n) == (q.m, q.n) and p.m * p.n >= MIN_RESULTS * device.compute_units and any(_plans(last, device))


def emit_dual_conv(kernel: DualConv2d, dialect: Dialect) -> Emission:
    """Return the function of a kernel for which :func:`supports_dual_conv`. In measurements the largest tile was the
    fastest, or nearly."""
    plans = _plans(halves(kernel)[1], device_of(dialect))
    plan = max(plans, key=lambda plan: (plan.m * plan.n, plan.m, plan.blocks_per_sm))
    return DualTmaConv(kernel, dialect, plan).emit()


def _plans(last: Conv2d, device: CUDADevice) -> Iterator[Plan]:
    """Yield the plans that leave registers for the results of the first convolution."""
    viewed, kind, size = as_b16(last), operand_type(last), dtypes.DTYPES[last.outputs[0].dtype].size
    assert viewed is not None and kind is not None
    one = device.with_sms(1)  # no narrow tiles
    for plan in candidates(Problem(product_of(viewed), tile_k(last), size=size, columns=kind.columns), one):
        if plan.tma_store and registers(replace(plan, prefetch=True)) <= device.registers:
            yield plan


class DualTmaConv(TmaGemm):
    """The function of a :class:`DualConv2d`. ``first``: the convolution whose results are kept; its operands are the
    function's last."""

    sums = 2

    def __init__(self, kernel: DualConv2d, dialect: Dialect, plan: Plan):
        first, last = halves(kernel)
        super().__init__(last, dialect, plan)
        self.f = Function(kernel, dialect, explicit_wait=True)
        self.at = len(last.inputs)
        viewed = as_b16(first)
        assert isinstance(viewed, Conv2d)
        self.first = Operands(without_stride(viewed), self.at, self.at + 1)

    def _first(self) -> Operands:
        return self.first

    def _kept(self) -> str:
        operands = self._operands(self.first, "@NAME@_first")
        members = Members(self.f, "@NAME@_first_epilogue")
        self._hold(self.first.kernel, members, self.at)
        first = Epilogue(self.first.kernel, members, max_width=8, first=self.at, widened=True, floats=True)
        made = Functor(first, members, 2)
        made.types()
        made.read_shared()
        made.compute(ahead=True, shared=True)
        return f"keep({operands}, {made.finish()})"
