"""What happens to an anchor's accumulators before they are stored: bias, activation, residual, rounding."""

from __future__ import annotations

from collections.abc import Callable

from ... import expr
from ...kernel import Kernel
from ..epilogue_nest import epilogue_nest, row_digits
from ..nest import use_counts
from .function import Function, Pointers
from .loops import Points, vector_width
from .scalar import Scalars, Value


class Epilogue:
    """Writes results at (row, column) of the output; ``row`` counts its leading dims in order. ``width``: neighbouring
    columns that :meth:`store` can take at once."""

    def __init__(self, kernel: Kernel, function: Function):
        self.nest, self.acc, self.pitch = epilogue_nest(kernel)
        (self.step,) = self.nest.steps
        self.function = function
        out = kernel.outputs[0]
        self.step.value = self.step.value.cast(out.dtype)
        lane = len(out.shape) - 1
        self.lane = lane if lane in self.nest.size else -1
        self.width = 1
        if self.lane >= 0:
            self.width = vector_width(self.nest, kernel, [self.step], self.lane, self.acc)
        self._count = 0

    def store(self, row: str, column: str, width: int, accumulators: Callable[[int, str], str]) -> None:
        """Statements that store ``width`` neighbours; ``accumulators(which, position)`` is the text of one float."""
        out = self.function.lines
        s = Scalars(self.nest, Pointers(self.function), out, use_counts([self.step.value]))
        self._count += 1
        points = Points(s, self.nest, self.lane, width)
        for x in expr.walk(self.step.value):
            if x.op == "load" and x.value.operand >= self.acc:
                which = x.value.operand - self.acc
                s.bound[x] = Value(accumulators(which, "0"), "float")
                if width > 1:
                    s.bound[expr.substitute(x, points.shift)] = Value(accumulators(which, f"i{points.inner}"), "float")
        with out.block("{"):
            if self.lane >= 0:
                out.add(f"const int i{self.lane} = {column};")
            out.add(f"const uint row = (uint)({row}); (void)row;")
            for d, unit, wrap in row_digits(self.nest, self.step.value, self.acc, self.pitch, self.lane):
                text = f"row / {unit}u" if unit > 1 else "row"
                out.add(f"const int i{d} = (int)({f'{text} % {wrap}u' if wrap else text});")
            points.run([self.step])
        self.function.checks |= s.checks
