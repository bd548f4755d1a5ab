"""Attention of one query position to a cache, in one launch: sizes and functors for ``attention_decode.h``."""

from __future__ import annotations

import math

from ....graph import expr
from ....schedule.kernel import Attention, DecodeAttention, Loops, Operand
from ...codegen.nest import build_nest
from ..lang.dialect import SUBGROUP, Dialect
from ..lang.emission import Emission
from ..lang.function import Function, Members, blocks
from ..lang.scalar import Scalars, Value, ctype, stored
from ..lang.vectorize import decode, scalars_for

SUBGROUPS = 16
THREADS = SUBGROUPS * SUBGROUP
PER_UNIT = 1  # resident workgroups
HEADS = 8  # columns of the matrix unit
MIN_KEYS = 256  # of a workgroup; splitting fewer costs more than the grid barrier saves
STATE = 8  # words of a grid barrier's state, for up to 224 workgroups
PAD = 4  # elements after the values of a part: maximum, sum, and two that align the next part
SIZES = (64, 128)  # supported head sizes


def emit_decode_attention(kernel: DecodeAttention, dialect: Dialect) -> Emission:
    """Return the function of a ``decode_attention`` kernel.

    Its inputs are keys and values [1, HK, SK, D], the position int64[1], and those of its producers: loops kernels that
    compute the queries [1, H, 1, D], and the rows of keys and of values at the position. Its outputs are the result,
    keys, values, float32 parts [S, H, D + 4] (values, maximum, sum), and the int32 states of grid barriers [HK, STATE],
    zero before the first run.
    """
    f = Function(kernel, dialect, explicit_wait=True, launch_dependents=False)
    (keys, values), out = kernel.inputs[:2], kernel.outputs[0]
    (hk, sk, d), splits = keys.shape[1:], kernel.outputs[3].shape[0]
    f.per_unit = PER_UNIT
    sizes = dict(
        HK=hk, SK=sk, D=d, HEADS_PER_KV=out.shape[1] // hk, SPLITS=splits, SUBGROUPS=SUBGROUPS, MIN_KEYS=MIN_KEYS,
        STATE=STATE,
        K_H=keys.strides[1], K_S=keys.strides[2], V_H=values.strides[1], V_S=values.strides[2], O_H=out.strides[1],
        O_D=out.strides[3], SCALE=float(kernel.scale * math.log2(math.e)),
    )  # fmt: skip
    operands = [f.pointer(n) for n in (0, 1, 2, ~0, ~1, ~2)]
    operands += [f.pointer(~3), f.pointer(~4)] if splits > 1 else ["nullptr", "nullptr"]
    rounds, first = (blocks(HEADS * d, THREADS), 1, 1), 3
    for n, (part, count) in enumerate(zip(kernel.producers, rounds, strict=True)):
        operands.append(_functor(f, part, f"@NAME@_part{n}", first, count))
        first += len(part.inputs)
    element, pitch, half = ctype(keys.dtype), 4 * SUBGROUP + 1, SUBGROUPS // 2
    arrays = [f.array(element, "qs", HEADS * d), f.array(element, "new_rows", 2 * d)]
    arrays += [f.array("float", "partials", half * (d // 16) * pitch)]
    arrays += [f.array("float", name, half * HEADS) for name in ("maxima", "sums")]
    arrays.append(f.array("int", "outcome", 1) if splits > 1 else "nullptr")
    f.template("attention_decode", "attention_decode.h", {"T": element}, sizes, *operands, *arrays)
    return f.finish(splits * hk, THREADS)


def _functor(f: Function, part: Loops, name: str, first: int, rounds: int) -> str:
    """Define functor ``name`` for the points of ``part``, and return the expression that instantiates it.

    The inputs of ``part`` are the function's from ``first`` on. ``load(i, point)`` loads the operands of a point into
    slot i of ``rounds``, ``make(i, point)`` returns its value, and ``place(point, position)`` the offset of its store.
    Loads that a ``where`` guards are clamped to their operands.
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
    with out.method("void load(int i, uint point)"):
        s = scalars()
        for n, x in enumerate(early):
            op, at = nest.inputs[x.value.operand], s.address(x)
            if x.value.guarded:
                last = sum((size - 1) * step for size, step in zip(op.shape, op.strides, strict=True))
                out.let("int64_t", f"at{n}", at)
                at = f"(at{n} < 0 ? 0 : at{n} < {last} ? at{n} : {last})"
            out.assign(f"x{n}[i]", f"{s.pointers[x.value.operand]}[{at}]")
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


def supports_step(k: Attention, dialect: Dialect) -> bool:
    """Whether :func:`emit_decode_attention` supports the operands of attention kernel ``k``: one query position, and a
    cache in a layout that it reads."""
    q, keys, values = k.inputs[:3]
    out = k.outputs[0]
    (b, h, sq, d), hk = q.shape, keys.shape[1]
    dense = q.contiguous and q.offset == 0 and all(_dense_rows(o) for o in (keys, values))
    position = k.inputs[3].buffer if k.by_position else None
    return (
        dialect.fragment_access and dialect.grid_barrier and q.dtype in dialect.matrix_types
        and (b, sq) == (1, 1) and dense and all(o.dtype == q.dtype for o in (keys, values, out))
        and keys.shape == values.shape and d in SIZES and not k.causal and position is not None
        and position.kind in ("input", "state") and h // hk <= HEADS
    )  # fmt: skip


def _dense_rows(op: Operand) -> bool:
    return op.strides[3] == 1 and op.offset % 8 == 0 and op.strides[2] % 8 == 0 and (op.strides[1] % 8 == 0)
