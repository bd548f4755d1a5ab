"""Fewer launches: small kernels run inside the one that reads them, or beside others that touch different data."""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import expr
from .kernel import Buffer, Kernel, Operand, Schedule
from .memory_planner import assign_steps

MOST_FLOPS = 1 << 18  # of a prologue: what every thread repeats must cost less than meeting the others
MOST_READERS = 2
MOST_PARTS = 16  # of a bundle


def fuse_prologues(schedule: Schedule, most_rows: int) -> None:
    """Let matrix products of at most ``most_rows`` rows compute their left operand for themselves.

    A row norm before a projection, when decoding: each thread repeats the few operations on the row instead of waiting
    for the one thread that would do them.
    """
    kernels = schedule.kernels
    for at, producer in enumerate(kernels):
        made = _result(producer)
        if made is None or producer.flops > MOST_FLOPS:
            continue
        readers = [n for n, k in enumerate(kernels) if any(o.buffer.id == made.id for o in k.inputs)]
        if not 0 < len(readers) <= MOST_READERS:
            continue
        if all(_takes(kernels[n], made, most_rows) and _unchanged(kernels[at:n], producer) for n in readers):
            for n in readers:
                kernels[n] = _with_prologue(kernels[n], producer)
            kernels[at] = replace(producer, inputs=[], outputs=[])
    schedule.kernels = [k for k in kernels if k.outputs]


def _result(k: Kernel) -> Buffer | None:
    """The buffer of intermediate data that a loops kernel fills completely, if it writes nothing else."""
    if k.kind != "loops" or len(k.outputs) != 1 or k.body is None or k.body.serial:
        return None
    out = k.outputs[0]
    whole = out.contiguous and math.prod(out.shape) == math.prod(out.buffer.shape)
    fresh = all(o.buffer.id != out.buffer.id for o in k.inputs)
    return out.buffer if out.buffer.kind == "arena" and whole and fresh else None


def _takes(k: Kernel, left: Buffer, most_rows: int) -> bool:
    """Whether ``left`` is just the left operand of a product of few rows, as dense rows."""
    if k.kind != "gemm" or k.prologue is not None or k.attrs["batch"] * k.attrs["m"] > most_rows:
        return False
    alone = all(o.buffer.id != left.id for o in k.inputs[1:])
    return alone and k.inputs[0].offset == 0 and k.attrs["batch"] == 1 and k.attrs["lda"] == k.attrs["k"]


def _unchanged(between: list[Kernel], producer: Kernel) -> bool:
    read = {o.buffer.id for o in producer.inputs}
    return not any(o.buffer.id in read for k in between for o in k.outputs)


def _with_prologue(gemm: Kernel, producer: Kernel) -> Kernel:
    out = producer.outputs[0]
    scratch = Buffer(-1, "scratch", out.dtype, out.buffer.shape, out.buffer.name)
    prologue = replace(producer, outputs=[replace(out, buffer=scratch)])
    shift = len(producer.inputs) - 1
    assert gemm.epilogue is not None
    epilogue = expr.substitute(gemm.epilogue, loads=lambda x: expr.load(x.value + shift, x.dtype, x.args))
    sources = tuple(dict.fromkeys((*producer.sources, *gemm.sources)))
    inputs = [*producer.inputs, *gemm.inputs[1:]]
    flops = gemm.flops + producer.flops
    return replace(gemm, inputs=inputs, epilogue=epilogue, prologue=prologue, sources=sources, flops=flops)


def bundle(schedule: Schedule, most_points: int) -> None:
    """Make one kernel of the loops kernels of each step that have up to ``most_points``: rotary embeddings and cache
    updates."""
    assign_steps(schedule.kernels)
    steps: dict[int, list[Kernel]] = {}
    for k in schedule.kernels:
        steps.setdefault(k.step, []).append(k)
    kernels: list[Kernel] = []
    for members in steps.values():
        small = [k for k in members if k.body is not None and math.prod(k.body.domain) <= most_points][:MOST_PARTS]
        if len(small) > 1:
            members = [bundled(small), *(k for k in members if k not in small)]
        kernels += members
    schedule.kernels = kernels


def bundled(parts: list[Kernel]) -> Kernel:
    """One kernel of several that touch different data."""
    kinds = dict.fromkeys(p.name.split("_", 1)[1] for p in parts)
    inputs: list[Operand] = [o for p in parts for o in p.inputs]
    outputs: list[Operand] = [o for p in parts for o in p.outputs]
    sources = tuple(dict.fromkeys(s for p in parts for s in p.sources))
    number = parts[0].name.split("_", 1)[0]
    flops = sum(p.flops for p in parts)
    name = f"{number}_{'_'.join(kinds)}"
    return Kernel(name, "bundle", inputs, outputs, sources=sources, flops=flops, parts=tuple(parts))
