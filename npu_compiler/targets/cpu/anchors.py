"""Kernels with a hand-written micro-kernel: their sizes as a struct of constants, their epilogue as a functor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...schedule.kernel import Kernel, Operand
from ...support import dtypes
from .epilogue import emit_epilogue
from .loops import emit_loops, scratch_bytes
from .readers import reader_of

Place = Callable[[Operand], str]

# kind -> the header that holds its micro-kernel
ANCHORS = {
    "gemm": "gemm.h",
    "pack": "gemm.h",
    "conv2d": "conv.h",
    "winograd": "winograd.h",
    "depthwise": "depthwise.h",
    "attention": "attention.h",
}


def emit_anchor(kernel: Kernel, name: str, place: Place) -> str:
    """The C++ of a kernel whose kind is in :data:`ANCHORS`, and the constant ``<name>_scratch`` (bytes per thread)."""
    return _EMITTERS[kernel.kind](kernel, name, place)


def ctype(op: Operand) -> str:
    return dtypes.DTYPES[op.dtype].ctype


def _struct(name: str, base: str = "", **constants: Any) -> str:
    fields = ", ".join(f"{k} = {v}" for k, v in constants.items())
    return f"struct {name}{f' : {base}' if base else ''} {{ static constexpr long {fields}; }};\n"


def _function(name: str, body: str, scratch: str) -> str:
    return (
        f"int {name}(void* const* bufs, char*, Thread& th, int* counter) {{\n  {body}\n  return 0;\n}}\n"
        f"extern const long {name}_scratch = {scratch};\n"
    )


def _conv2d(k: Kernel, name: str, place: Place) -> str:
    x, w = k.inputs[:2]
    n, oh, ow, _ = k.outputs[0].shape
    (r, s), (c, ko), a = k.attrs["kernel"], k.attrs["channels"], k.attrs
    dims = dict(
        N=n, H=x.shape[1], W=x.shape[2], C=c, K=ko, R=r, S=s, stride_h=a["stride"][0], stride_w=a["stride"][1],
        pad_t=a["padding"][0], pad_l=a["padding"][1], dil_h=a["dilation"][0], dil_w=a["dilation"][1],
        OH=oh, OW=ow, G=a["groups"],
    )  # fmt: skip
    epilogue, pointers = emit_epilogue(k, 2, f"{name}_epi", place)
    arguments = f"{place(x)}, {place(w)}, epi, th, counter"
    if k.kind == "winograd":
        call, scratch = (
            f"conv2d_winograd<{name}_dims, {a['tile']}>",
            f"winograd_scratch_bytes<{name}_dims, {a['tile']}>()",
        )
    elif k.kind == "conv2d":
        call, scratch = f"conv2d<{name}_dims>", f"conv2d_scratch_bytes<{name}_dims, {ctype(x)}, {ctype(w)}>()"
    else:
        call, scratch = f"depthwise<{name}_dims>", "0"
    body = f"{name}_epi epi{pointers};\n  {call}({arguments});"
    return _struct(f"{name}_dims", **dims) + epilogue + _function(name, body, scratch)


def _gemm(k: Kernel, name: str, place: Place) -> str:
    a = k.prologue.outputs[0] if k.prologue is not None else k.inputs[0]
    w, at = k.inputs[k.fixed], k.attrs
    weights, kept = place(w), ctype(w)
    if w.format:
        format = reader_of(w.format).format
        weights, kept = f"((const stored<{format}>*){weights})", f"stored<{format}>"
    shared = "true" if at["shared"] else "false"
    dims = dict(M=at["m"], N=at["n"], K=at["k"], lda=at["lda"] or at["k"], B=at["batch"], batch_a=at["batch_stride"])
    struct = _struct(f"{name}_dims", "GemmDims", **dims)
    paired = "true" if at["paired"] else "false"
    struct = struct.replace("; };", f"; static constexpr bool shared_w = {shared}, paired = {paired}; }};")
    epilogue, pointers = emit_epilogue(k, k.fixed + 1, f"{name}_epi", place)
    scratch = f"gemm_scratch_bytes<{name}_dims, {ctype(a)}, {kept}>()"
    left, prologue, before = "", "", ""
    if k.prologue is None:
        left = place(a)
    else:
        prologue, before, left, scratch = _prologue(k, name, place, scratch)
    body = f"{before}{name}_epi epi{pointers};\n  gemm<{name}_dims>({left}, {weights}, epi, th, counter);"
    ahead = f"gemm_ahead<{name}_dims, {ctype(a)}, {kept}>(weights, th)"
    if w.format:  # the reader and the module of the format agree on the bytes
        struct += f"static_assert(panel_bytes<{ctype(a)}, {kept}>({at['k']}) == {w.shape[-1]});\n"
    text = struct + epilogue + prologue + _function(name, body, scratch)
    return text + f"void {name}_ahead(const void* weights, const Thread& th) {{ {ahead}; }}\n"


def _prologue(k: Kernel, name: str, place: Place, scratch: str) -> tuple[str, str, str, str]:
    """(function, call, left operand, scratch bytes): each thread computes all of the left operand, behind the scratch
    memory of the product and of the prologue itself."""
    assert k.prologue is not None
    inner = k.prologue
    out = inner.outputs[0]

    def inside(op: Operand) -> str:
        at = len(inner.inputs) if op is out else inner.inputs.index(op)
        return f"(({'' if op is out else 'const '}{ctype(op)}*)bufs[{at}])"

    function = emit_loops(inner, f"{name}_pro", inside)
    offset = f"align64(max_of({scratch}, {scratch_bytes(inner)}))"
    size = math.prod(out.shape) * dtypes.DTYPES[out.dtype].size
    left = f"(const {ctype(out)}*)(th.scratch + {offset})"
    operands = ", ".join(f"(void*){place(o)}" for o in inner.inputs)
    call = (
        f"void* left[] = {{{operands}, (void*)(th.scratch + {offset})}};\n  "
        f"Thread alone = {{0, 1, th.pool, th.scratch, 0}};\n  int own = 0;\n  "
        f"if ({name}_pro(left, nullptr, alone, &own)) return 1;\n  "
    )
    return function, call, left, f"{offset} + align64({size})"


def _pack(k: Kernel, name: str, place: Place) -> str:
    source, out = k.inputs[0], k.outputs[0]
    at = k.attrs
    struct = _struct(f"{name}_dims", B=at["batch"], N=at["n"], K=at["k"], batch_b=source.strides[0])
    arguments = f"{place(source)}, {source.strides[1]}L, {source.strides[2]}L, {place(out)}, th"
    body = f"(void)counter;\n  pack_b<{name}_dims>({arguments});"
    return struct + _function(name, body, "0")


def _attention(k: Kernel, name: str, place: Place) -> str:
    q, key, v = k.inputs[:3]
    out = k.outputs[0]
    dims = dict(
        B=q.shape[0], H=q.shape[1], HK=key.shape[1], SQ=q.shape[2], SK=key.shape[2], DH=q.shape[3], DV=v.shape[3]
    )
    for letter, op in zip("qkvo", (q, key, v, out), strict=True):
        dims |= {f"{letter}_{d}": s for d, s in zip("bhs", op.strides, strict=False)}
    mask = "(const NoMask*)nullptr"
    if len(k.inputs) > 3:
        m = k.inputs[3]
        dims |= {f"m_{d}": s for d, s in zip("bhqk", m.strides, strict=True)}
        mask = place(m)
    struct = _struct(f"{name}_dims", "AttentionDims", **dims)
    scale = f"{float(k.attrs['scale'])!r}f"
    causal = "true" if k.attrs["causal"] else "false"
    extra = f" static constexpr bool causal = {causal}; static constexpr float scale = {scale}; }};"
    struct = struct.replace("; };", ";" + extra)
    arguments, valid = f"{place(q)}, {place(key)}, {place(v)}, {mask}, {place(out)}, th, counter", ""
    if k.attrs["limited"]:  # read the part of the cache that some query sees
        arguments += ", valid"
        valid = (
            f"long valid = 0;\n  for (long i = 0; i < {q.shape[2]}; i++)\n"
            f"    valid = max_of(valid, {place(k.inputs[4])}[i] + 1);\n"
            f"  valid = min_of(valid, {key.shape[2]});\n  "
        )
    body = f"{valid}attention<{name}_dims>({arguments});"
    return struct + _function(name, body, f"attention_scratch_bytes<{name}_dims, {ctype(q)}>()")


_EMITTERS: dict[str, Callable[[Kernel, str, Place], str]] = {
    "gemm": _gemm,
    "pack": _pack,
    "conv2d": _conv2d,
    "winograd": _conv2d,
    "depthwise": _conv2d,
    "attention": _attention,
}
