"""The epilogue of a micro-kernel as a C++ functor: bias, activation, residual and rounding on accumulator registers.

A micro-kernel calls ``epi(acc, row, col, L)`` with VL neighbouring columns of one output row; ``row`` is the flat index
of the leading output dims. ``epi.at(col, L)`` returns the function ``(acc, row)`` of these columns, which has loaded
what does not depend on the row. ``epi.prefetch(row, col)`` prefetches what it reads and writes in a row of a panel that
begins at ``col``. Sums of integers have their bits in the lanes of ``acc``. The loop generator renders it: an epilogue
is a store stage with one extra input.
"""

from __future__ import annotations

from collections.abc import Callable

from ...graph import affine, expr
from ...graph.expr import Expr
from ...schedule.anchors import Anchor, Contraction, Gemm
from ...schedule.kernel import Operand
from ...support import dtypes
from ..codegen.epilogue_nest import epilogue_nest, row_digits
from ..codegen.nest import Nest, use_counts
from ..codegen.rounding import rounded_clamp, unrounded
from .render import Block, Renderer, Value, vector_kind


def emit_epilogue(kernel: Anchor, fixed: int, name: str, place: Callable[[Operand], str]) -> tuple[str, str]:
    """Return (definition of the functor ``name``, braced initialiser of its pointers).

    The micro-kernel reads the first ``fixed`` operands, the functor reads the others. ``place`` returns the C++
    expression of the pointer to an operand.
    """
    nest, acc, pitch = epilogue_nest(kernel)
    lane = len(kernel.outputs[0].shape) - 1
    lane_dim = lane if lane in nest.size else None
    step = nest.steps[0]
    value = step.value.cast(kernel.outputs[0].dtype)
    assert step.target is not None
    names = [f"a{i}" for i in range(len(nest.inputs))]
    render = Renderer(nest, names, lane_dim, False, use_counts([value, step.target]))
    left = kernel.left if isinstance(kernel, Contraction) else kernel.inputs[0]
    vector = "vd" if left.dtype == "float64" else "vf"
    registers = ["acc", "acc1"][: 1 + (isinstance(kernel, Gemm) and kernel.dual)]
    for x in expr.walk(value):
        if x.op == "load" and x.value.operand >= acc:
            register = registers[x.value.operand - acc]
            sums = Value(register, vector) if dtypes.is_float(x.dtype) else Value(f"((vi32){register})", "vi32")
            render.stages[x] = (frozenset((*nest.size, "row")), sums)
    arguments = ", ".join(f"{vector} {r}" for r in registers)
    root = Block(None, "template <class Lanes> __attribute__((always_inline)) auto at(long col, Lanes L) const {")
    root.items.append(f"const long i{lane_dim} = col;" if lane_dim is not None else "(void)col, (void)L;")
    row_dims = frozenset((*(d for d in nest.size if d != lane_dim), "row"))
    with root.child(
        f"return [=, *this]({arguments}, long row) __attribute__((always_inline)) {{", "};", row_dims
    ) as inner:
        inner.items.append("(void)row;")
        inner.items += _decode(nest, value, acc, pitch, lane_dim)
        inner.items += _store(render, value, step.target, kernel.outputs[0].dtype, lane_dim, inner)
    call = [
        "template <class Lanes> __attribute__((always_inline))",
        f"void operator()({arguments}, long row, long col, Lanes L) const {{",
        f"  at(col, L)({', '.join(registers)}, row);",
        "}",
    ]
    call += _prefetch(nest, names, value, step.target, acc, pitch, lane_dim)
    used = [
        i
        for i in range(fixed, len(kernel.inputs))
        if any(x.op == "load" and x.value.operand == i for x in expr.walk(value))
    ]
    members = [f"const {_ctype(kernel.inputs[i])}* a{i};" for i in used] + [f"{_ctype(kernel.outputs[0])}* b0;"]
    body = "\n".join([*root.lines(1), *(f"  {line}" for line in call)])
    text = f"struct {name} {{\n  {' '.join(members)}\n{body}\n}};\n"
    pointers = [place(kernel.inputs[i]) for i in used] + [place(kernel.outputs[0])]
    return text, "{" + ", ".join(pointers) + "}"


def _prefetch(
    nest: Nest, names: list[str], value: Expr, target: Expr, acc: int, pitch: int, lane: int | None
) -> list[str]:
    """Return the lines of the method ``prefetch``. It leaves out addresses that depend on data, or are the
    same in all rows."""
    render = Renderer(nest, names, lane, False, use_counts([value, target]))
    rows = frozenset(d for d in nest.size if d != lane)
    block = Block(None, "__attribute__((always_inline)) void prefetch(long row, long col) const {", binds=rows)
    block.items += ["(void)row, (void)col;", *([f"const long i{lane} = col;"] if lane is not None else [])]
    block.items += _decode(nest, value, acc, pitch, lane)
    loads = [x for x in expr.walk(value) if x.op == "load" and x.value.operand < acc and rows & render.deps(x)]
    for x in (*loads, target):
        if x.args[1:] or any(t.op != "index" for t in affine.affine(x.args[0]).terms):
            continue
        place = render.place(x, block)
        if place is not None and place.stride == 1:
            base = "b0" if x is target else names[x.value.operand]
            block.items.append(f"prefetch_panel({base} + {place.offset});")
    return list(block.lines())


def _ctype(op: Operand) -> str:
    return dtypes.DTYPES[op.dtype].ctype


def _decode(nest: Nest, value: Expr, acc: int, pitch: int, lane: int | None) -> list[str]:
    """Decode the row dims from the flat row number, whose digits are those of the accumulator's address."""
    lines = []
    for d, divisor, wrap in row_digits(nest, value, acc, pitch, lane):
        text = f"row / {divisor}" if divisor > 1 else "row"
        lines.append(f"const long i{d} = {f'{text} % {wrap}' if wrap else text};")
        lines.append(f"(void)i{d};")
    return lines


def _store(render: Renderer, value: Expr, target: Expr, dtype: str, lane: int | None, root: Block) -> list[str]:
    value = unrounded(value)
    if lane is None:
        text = render.text(value, "vd" if dtype == "float64" else "vf", root)
        place = render.place(target, root)
        assert place is not None
        return [f"st1(b0 + {place[0]}, ({text})[0]);"]
    clamp = rounded_clamp(value.args[0]) if value.op == "cast" and dtype == "uint8" else None
    if clamp is not None and clamp[2] >= 0 and clamp[3] == 255 and render.varying(value):
        x, zero, low, _ = clamp
        place = render.place(target, root)
        if place is not None and place.stride == 1:
            return [f"st_quantized(b0 + {place.offset}, {render.text(x, 'vf', root)}, {zero}, {low}, L);"]
    text = render.text(value, vector_kind(dtype), root)
    place = render.place(target, root)
    assert place is not None and not place[2], "an epilogue stores where its indices say"
    offset, stride, _ = place
    return [f"st(b0 + {offset}, {text}, L);" if stride == 1 else f"st_strided(b0 + {offset}, {stride}, {text}, L);"]
