"""The kernels of updates at data-dependent indices, in any order: instances of ``kernels/scatter_updates.h``."""

from __future__ import annotations

import math

from ....schedule.kernel import Loops, ScatterResult, ScatterUpdates, recast
from ...codegen.nest import build_nest
from ..lang.dialect import Dialect
from ..lang.emission import Emission
from ..lang.function import Function, blocks
from ..lang.scalar import kind_of
from ..lang.vectorize import decode, memory_order, scalars_for

THREADS = 256
CROWD = 16  # updates per place from which on a thread reads a magnitude before it tries to raise it


def emit_scatter_updates(kernel: ScatterUpdates, dialect: Dialect) -> Emission:
    """Return the function of a ``scatter_updates`` kernel: a thread makes an update."""
    nest, function = build_nest(recast(kernel, Loops)), Function(kernel, dialect)
    s, out, (step,) = scalars_for(nest, function, nest.steps), function.lines, nest.steps
    assert step.target is not None
    function.include("scatter_updates.h")
    order = memory_order(nest, nest.order, loads=True)
    count = nest.points(order)
    out.let("uint", "f", f"(uint)workgroup * {THREADS}u + (uint)tid")
    out.return_if(f"f >= {count}u")
    # the largest numbers first, so that the others need not be written
    decode(s, nest, order, f"({count - 1}u - f)" if kernel.computes == "latest" else "f")
    register = kind_of(step.value.dtype)
    out.let(register, "update", s.text(step.value, register))
    out.let("int64_t", "place", s.address(step.target))
    to = f"{function.pointer(~0)} + place"
    if kernel.computes == "integers":
        out.call("atomic_add", to, "update")
    elif kernel.computes == "latest":
        out.call("raise_number", to, "update")
    elif kernel.computes == "magnitudes":
        crowded = str(count >= CROWD * math.prod(kernel.outputs[0].shape)).lower()
        out.call(f"raise_magnitude<{crowded}>", to, "update")
    else:
        out.call(
            f"add_fixed_point<{kernel.carry_bits}>", to, f"{function.pointer(len(kernel.inputs) - 2)}[place]", "update"
        )
    function.checks |= s.checks
    return function.finish(blocks(count, THREADS), THREADS)


def emit_scatter_result(kernel: ScatterResult, dialect: Dialect) -> Emission:
    """Return the function of a ``scatter_result`` kernel: a thread computes an element."""
    f, out = Function(kernel, dialect), kernel.outputs[0]
    axis, count = len(out.shape) - 1, math.prod(out.shape)
    sizes = dict(COUNT=count, N=out.shape[axis], THREADS=THREADS, BITS=kernel.carry_bits)
    rows = {"X": f.rows("x", kernel.inputs[2], axis), "Y": f.rows("y", out, axis)}
    f.template("add_fixed_point_sums", "scatter_updates.h", rows, sizes, *map(f.pointer, (0, 1, 2, ~0)))
    return f.finish(blocks(count, THREADS), THREADS)
