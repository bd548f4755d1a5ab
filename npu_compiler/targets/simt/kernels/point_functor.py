"""A loop nest as a functor: a kernel computes the points of its producer itself."""

from __future__ import annotations

from ....graph import expr
from ....schedule.kernel import Loops
from ...codegen.nest import build_nest
from ..lang.function import Function, Members
from ..lang.scalar import Scalars, Value, ctype, stored
from ..lang.vectorize import decode, scalars_for


def point_functor(f: Function, part: Loops, name: str, first: int, rounds: int) -> str:
    """Define functor ``name`` for the points of ``part``, and return the expression that instantiates it.

    The inputs of ``part`` are the function's from ``first`` on. ``locate(i, point)`` computes the addresses of a
    point's operands, ``load(i)`` loads them into slot i of ``rounds``, ``make(i, point)`` returns its value, and
    ``place(point, position)`` the offset of its store. Loads that a ``where`` guards are clamped to their operands.
    """
    members, nest = Members(f, name), build_nest(part)
    out, (step,) = members.lines, nest.steps
    numbers = {n: first + n for n in range(len(part.inputs))}
    loads = {x: None for x in expr.walk(step.value) if x.op == "load"}
    nested = {x for x in loads if any(y in loads for a in x.args for y in expr.walk(a))}
    early = [x for x in loads if not x.value.checks and x not in nested]

    def scalars() -> Scalars:
        s = scalars_for(nest, members, nest.steps, numbers)
        decode(s, nest, nest.order, "point")
        return s

    for n, x in enumerate(early):
        out.declare(ctype(x.dtype), f"x{n}[{rounds}]")
        out.declare(f"DEVICE const {ctype(x.dtype)}*", f"from{n}[{rounds}]")
    with out.method("void locate(int i, uint point)"):
        s = scalars()
        for n, x in enumerate(early):
            op, at = nest.inputs[x.value.operand], s.address(x)
            if x.value.guarded:
                last = sum((size - 1) * step for size, step in zip(op.shape, op.strides, strict=True))
                out.let("int64_t", f"free{n}", at)
                at = f"(free{n} < 0 ? 0 : free{n} < {last} ? free{n} : {last})"
            out.assign(f"from{n}[i]", f"{s.pointers[x.value.operand]} + {at}")
    with out.method("void load(int i)"):
        for n in range(len(early)):
            out.assign(f"x{n}[i]", f"*from{n}[i]")
    with out.method("float make(int i, uint point)"):
        s = scalars()
        s.bound |= {x: stored(f"x{n}[i]", x.dtype) for n, x in enumerate(early)}
        out.return_value(s.text(step.value, "float"))
        members.checks |= s.checks
    assert step.target is not None
    with out.method("int64_t place(uint point, int64_t position)"):
        s = scalars()
        for x in expr.walk(step.target):
            if x.op == "load" and x is not step.target:
                s.bound[x] = Value("position", "int64_t")
        out.return_value(s.address(step.target))
        members.checks |= s.checks
    return members.finish()
