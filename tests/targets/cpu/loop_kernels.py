"""Loop nests written by hand, and their results beside numpy's."""

from __future__ import annotations

import numpy as np

from npu_compiler.graph.expr import Expr, const, fn, index, load, stage
from npu_compiler.schedule.interp import execute, view
from npu_compiler.schedule.kernel import Kernel, LoopBody, Loops, Operand, Stage

from ...support.cpu_harness import compile_kernels, operand, random_array

ZERO = const(0, "int64")
i, j, k = index(0), index(1), index(2)


def loops(inputs: list[Operand], outputs: list[Operand], domain, axes, *stages: Stage, serial: bool = False) -> Loops:
    body = LoopBody(tuple(domain), tuple(axes), stages, serial)
    return Loops(label="test", inputs=tuple(inputs), outputs=tuple(outputs), body=body)


def store(e: Expr, *idx: Expr, output: int = 0, per_row: bool = False) -> Stage:
    return Stage("store", e, output=output, index=idx, per_row=per_row)


def fold(kind: str, e: Expr) -> Stage:
    return Stage("reduce", e, reduce=kind)


def arrays(kernel: Kernel, seed: int = 0, **known: np.ndarray) -> dict[int, np.ndarray]:
    """Random buffers; ``known`` sets whole inputs: ``x0=...``."""
    rng = np.random.default_rng(seed)
    made = {o.buffer.id: random_array(rng, o.buffer.shape, o.dtype) for o in (*kernel.inputs, *kernel.outputs)}
    for name, value in known.items():
        view(kernel.inputs[int(name[1:])], made)[...] = value
    return made


def run(kernel: Kernel, threads: int = 2, **known: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """(results, numpy's results, status) of one kernel."""
    got = arrays(kernel, **known)
    want = {n: a.copy() for n, a in got.items()}
    execute(kernel, want)
    status = compile_kernels([kernel]).run(0, got, threads)
    return [view(o, got) for o in kernel.outputs], [view(o, want) for o in kernel.outputs], status


def softmax(shape: tuple[int, int], axis: int) -> Kernel:
    x = load(0, "float32", (i, j))
    return loops(
        [operand(shape)], [operand(shape)], shape, (axis,),
        fold("max", x), Stage("temp", fn("exp")(x - stage(0, "float32"))), fold("sum", stage(1, "float32")),
        store(stage(1, "float32") / stage(2, "float32"), i, j),
    )  # fmt: skip
