"""A kernel inside another one: what it computes, and which of the outer kernel's operands are its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...expr import Expr
from ...kernel import Kernel, LoopBody, Operand


@dataclass(frozen=True)
class Part:
    """``inputs`` and ``outputs``: operand numbers of the outer kernel (inputs n, outputs ``~n``). ``result``: the
    output that never reaches memory, if any, whose layout is ``made``."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    body: LoopBody | None = None
    epilogue: Expr | None = None
    attrs: tuple[tuple[str, Any], ...] = field(default=())
    result: int = -1
    made: Operand | None = None

    def bind(self, outer: Kernel) -> Kernel:
        """The inner kernel on the outer one's operands."""

        def operand(n: int) -> Operand:
            if n == RESULT:
                assert self.made is not None
                return self.made
            return outer.inputs[n] if n >= 0 else outer.outputs[~n]

        inputs, outputs = [operand(n) for n in self.inputs], [operand(n) for n in self.outputs]
        return Kernel(outer.name, self.kind, inputs, outputs, dict(self.attrs), self.body, self.epilogue)

    def numbers(self, outer: Kernel) -> dict[int, int]:
        """The outer kernel's operand number for each of the inner one's."""
        found = dict(enumerate(self.inputs))
        found.update({~i: n for i, n in enumerate(self.outputs) if n != RESULT})
        return found


RESULT = 1 << 20  # in ``outputs``: the one that stays in registers
