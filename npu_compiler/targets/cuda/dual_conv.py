"""Two convolutions in one function: the results of the first stay in registers, as the residual of the second."""

from __future__ import annotations

from collections.abc import Iterator

from ...schedule.kernel import Conv2d, DualConv2d, recast
from ..simt.kernels.epilogue import Epilogue, Functor
from ..simt.kernels.gemm import Product, conv_product
from ..simt.lang.dialect import Dialect
from ..simt.lang.emission import Emission
from ..simt.lang.function import Function, Members
from .devices import CUDADevice
from .tile_selection import Plan, candidates, device_of, registers
from .tma_epilogue import leaves_as_tiles, residual_of
from .tma_gemm import Streamed, Sum, step_of, takes, thinned

LEAST_RESULTS = 2 << 14  # for each SM, two tiles: fewer come sooner from groups that share sums
TERMS = 64  # of a stage


def halves(kernel: DualConv2d) -> tuple[Conv2d, Conv2d]:
    """The convolution whose results are kept, and the one that they are added to, without knowing of each other."""
    first = kernel.residual
    return first, recast(kernel, Conv2d, inputs=kernel.inputs[: -len(first.inputs)])


def takes_pair(kernel: DualConv2d, dialect: Dialect) -> bool:
    """Whether both convolutions of a :class:`DualConv2d` have results that could leave as tiles, and many of them."""
    first, last = halves(kernel)
    if not all(takes(k) and step_of(k) == TERMS and leaves_as_tiles(k) and residual_of(k) == -1 for k in (first, last)):
        return False
    p, q = conv_product(first), conv_product(last)
    device = device_of(dialect)
    return (p.m, p.n) == (q.m, q.n) and p.m * p.n >= LEAST_RESULTS * device.units and any(_plans(q, device))


def emit_pair(kernel: DualConv2d, dialect: Dialect) -> Emission:
    """The function of a kernel that :func:`takes_pair`. Measured: the largest tile is best, or nearly."""
    plans = _plans(conv_product(halves(kernel)[1]), device_of(dialect))
    return Pair(kernel, dialect, max(plans, key=lambda plan: (plan.m * plan.n, plan.m, plan.per_core))).emit()


def _plans(p: Product, device: CUDADevice) -> Iterator[Plan]:
    """Plans that leave registers for a tile's results of the first convolution."""
    for plan in candidates(p, TERMS, False, True, device.with_units(1)):  # more tiles than units: no narrow ones
        if plan.tiled and registers(plan.m, plan.n, plan.per_core, True) <= device.registers:
            yield plan


class Pair(Streamed):
    """``first`` is the convolution whose results are kept; its operands are the function's last."""

    sums = 2

    def __init__(self, kernel: DualConv2d, dialect: Dialect, plan: Plan):
        first, last = halves(kernel)
        super().__init__(last, dialect, plan)
        self.f = Function(kernel, dialect, early=True)
        self.at = len(last.inputs)
        self.first = Sum(thinned(first), self.at, self.at + 1)

    def _first(self) -> Sum:
        return self.first

    def _kept(self) -> str:
        operands = self._operands(self.first, "@NAME@_first")
        members = Members(self.f, "@NAME@_first_epilogue")
        made = Functor(Epilogue(self.first.kernel, members, most=8, first=self.at), members, 2)
        made.types()
        made.read_shared()
        made.compute(ahead=True, shared=True)
        return f"keep({operands}, {made.finish()})"
