"""C++ of kernels with a hand-written micro-kernel: a struct of constants for sizes, a functor for the epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...schedule.anchors import Attention, Conv2d, Convolution, DepthwiseConv2d, Gemm, WinogradConv2d
from ...schedule.kernel import Kernel, Operand, Pack
from ...support import dtypes
from .devices import CPUCosts
from .epilogue import emit_epilogue
from .loops import emit_loops, scratch_bytes
from .readers import reader_of
from .winograd import CHANNELS

Place = Callable[[Operand], str]

# Kernel class -> the header that defines its micro-kernel.
HEADERS: dict[type[Kernel], str] = {
    Gemm: "gemm.h",
    Pack: "gemm.h",
    Conv2d: "conv.h",
    WinogradConv2d: "winograd.h",
    DepthwiseConv2d: "depthwise.h",
    Attention: "attention.h",
}


def emit_anchor(kernel: Kernel, name: str, place: Place, costs: CPUCosts) -> str:
    """Return the C++ function ``name`` of a kernel whose class is in :data:`HEADERS`, and its constant
    ``<name>_scratch`` (bytes of scratch memory per thread).

    ``place`` returns the C++ expression of the pointer to an operand. Raises ``TypeError`` for other classes.
    """
    match kernel:
        case Gemm():
            return _gemm(kernel, name, place, costs)
        case Convolution():
            return _conv2d(kernel, name, place)
        case Attention():
            return _attention(kernel, name, place)
        case Pack():
            return _pack(kernel, name, place)
    raise TypeError(f"no micro-kernel for {type(kernel).__name__}")


def ctype(op: Operand) -> str:
    """Return the C++ type of an operand's elements."""
    return dtypes.DTYPES[op.dtype].ctype


def _struct(name: str, base: str = "", **constants: Any) -> str:
    fields = ", ".join(f"{k} = {v}" for k, v in constants.items())
    return f"struct {name}{f' : {base}' if base else ''} {{ static constexpr long {fields}; }};\n"


def _function(name: str, body: str, scratch: str) -> str:
    return (
        f"int {name}(void* const* bufs, char*, Thread& th, int* counter) {{\n  {body}\n  return 0;\n}}\n"
        f"extern const long {name}_scratch = {scratch};\n"
    )


def _conv2d(k: Convolution, name: str, place: Place) -> str:
    x, w = k.inputs[:2]
    n, oh, ow, _ = k.outputs[0].shape
    (r, s), (c, ko) = k.kernel_size, k.channels
    dims: dict[str, Any] = dict(
        N=n, H=x.shape[1], W=x.shape[2], C=c, K=ko, R=r, S=s, stride_h=k.stride[0], stride_w=k.stride[1],
        pad_t=k.padding[0], pad_l=k.padding[1], dil_h=k.dilation[0], dil_w=k.dilation[1],
        OH=oh, OW=ow, G=k.groups,
    )  # fmt: skip
    epilogue, pointers = emit_epilogue(k, 2, f"{name}_epi", place)
    weights, kept = place(w), ctype(w)
    if isinstance(k, Conv2d) and k.limbs > 1:
        kept = f"limbs<{ctype(x)}>"
        weights = f"(const {kept}*){weights}"
    arguments = f"{place(x)}, {weights}, epi, th, counter"
    if isinstance(k, WinogradConv2d):
        call = f"conv2d_winograd<{name}_dims, {k.tile}, {CHANNELS}>"
        scratch = f"winograd_scratch_bytes<{name}_dims, {k.tile}>()"
    elif isinstance(k, Conv2d):
        call, scratch = f"conv2d<{name}_dims>", f"conv2d_scratch_bytes<{name}_dims, {ctype(x)}, {kept}>()"
    else:
        call, scratch = f"depthwise<{name}_dims>", "0"
    body = f"{name}_epi epi{pointers};\n  {call}({arguments});"
    return _struct(f"{name}_dims", **dims) + epilogue + _function(name, body, scratch)


def _gemm(k: Gemm, name: str, place: Place, costs: CPUCosts) -> str:
    a = k.left
    w = k.weight
    weights, kept = place(w), ctype(w)
    if w.format:
        format = reader_of(w.format).format
        weights, kept = f"((const stored<{format}>*){weights})", f"stored<{format}>"
    if k.packs:
        kept = f"in_place<{ctype(w)}, {k.k}, {w.strides[1]}, {w.strides[2]}>"
        weights = f"((const {kept}*){weights})"
    shared = "true" if k.shared else "false"
    dims: dict[str, Any] = dict(M=k.m, N=k.n, K=k.k, lda=k.lda or k.k, B=k.batch, batch_a=k.batch_stride)
    if k.packs:
        dims["batch_b"] = w.strides[0]
    struct = _struct(f"{name}_dims", "GemmDims", **dims)
    dual = "true" if k.dual else "false"
    struct = struct.replace("; };", f"; static constexpr bool shared_w = {shared}, dual = {dual}; }};")
    epilogue, pointers = emit_epilogue(k, k.rhs + 1, f"{name}_epi", place)
    scratch = f"gemm_scratch_bytes<{name}_dims, {ctype(a)}, {kept}>()"
    left, prologue, before = "", "", ""
    if k.prologue is None:
        left = place(a)
    else:
        prologue, before, left, scratch = _prologue(k, name, place, scratch, costs)
    body = f"{before}{name}_epi epi{pointers};\n  gemm<{name}_dims>({left}, {weights}, epi, th, counter);"
    prefetch = f"gemm_prefetch<{name}_dims, {ctype(a)}, {kept}>(weights, th)"
    if w.format:  # the reader and the format's Python module must agree on the number of bytes
        struct += f"static_assert(panel_bytes<{ctype(a)}, {kept}>({k.k}) == {w.shape[-1]});\n"
    text = struct + epilogue + prologue + _function(name, body, scratch)
    return text + f"void {name}_prefetch(const void* weights, const Thread& th) {{ {prefetch}; }}\n"


def _prologue(k: Gemm, name: str, place: Place, scratch: str, costs: CPUCosts) -> tuple[str, str, str, str]:
    """Return (function, call, left operand, scratch bytes).

    Each thread computes the whole left operand, and stores it after the scratch memory that the product and the
    prologue use.
    """
    assert k.prologue is not None
    inner = k.prologue
    out = inner.outputs[0]

    def inside(op: Operand) -> str:
        at = len(inner.inputs) if op is out else inner.inputs.index(op)
        return f"(({'' if op is out else 'const '}{ctype(op)}*)bufs[{at}])"

    function = emit_loops(inner, f"{name}_pro", inside, costs)
    offset = f"align64(max_of({scratch}, {scratch_bytes(inner, costs)}))"
    size = math.prod(out.shape) * dtypes.DTYPES[out.dtype].size
    left = f"(const {ctype(out)}*)(th.scratch + {offset})"
    operands = ", ".join(f"(void*){place(o)}" for o in inner.inputs)
    call = (
        f"void* left[] = {{{operands}, (void*)(th.scratch + {offset})}};\n  "
        f"Thread alone = {{0, 1, th.pool, th.scratch, 0}};\n  int own = 0;\n  "
        f"if ({name}_pro(left, nullptr, alone, &own)) return 1;\n  "
    )
    return function, call, left, f"{offset} + align64({size})"


def _pack(k: Pack, name: str, place: Place) -> str:
    source, out = k.inputs[0], k.outputs[0]
    struct = _struct(f"{name}_dims", B=k.batch, N=k.n, K=k.k, batch_b=source.strides[0])
    arguments = f"{place(source)}, {source.strides[1]}L, {source.strides[2]}L, {place(out)}, th"
    body = f"(void)counter;\n  pack_b<{name}_dims>({arguments});"
    return struct + _function(name, body, "0")


def _attention(k: Attention, name: str, place: Place) -> str:
    q, key, v = k.inputs[:3]
    out = k.outputs[0]
    dims: dict[str, Any] = dict(
        B=q.shape[0], H=q.shape[1], HK=key.shape[1], SQ=q.shape[2], SK=key.shape[2], DH=q.shape[3], DV=v.shape[3]
    )
    for letter, op in zip("qkvo", (q, key, v, out), strict=True):
        dims |= {f"{letter}_{d}": s for d, s in zip("bhs", op.strides, strict=False)}
    mask = "(const NoMask*)nullptr"
    own = k.inputs[: len(k.inputs) - 2] if k.scaled else k.inputs
    m = own[3] if len(own) > 3 else None
    if k.by_position and m is not None:
        mask = f"(const Positions*){place(m)}"
    elif m is not None:
        dims |= {f"m_{d}": s for d, s in zip("bhqk", m.strides, strict=True)}
        mask = place(m)
    struct = _struct(f"{name}_dims", "AttentionDims", **dims)
    scale = f"{float(k.scale)!r}f"
    causal = "true" if k.causal else "false"
    extra = f" static constexpr bool causal = {causal}; static constexpr float scale = {scale}; }};"
    struct = struct.replace("; };", ";" + extra)
    rows = [f"CacheRows<{ctype(op)}>{{{place(op)}}}" for op in (key, v)]
    if k.scaled:
        scales = k.inputs[-2:]
        rows = [f"CacheRows<{ctype(op)}>{{{place(op)}, {place(s)}}}" for op, s in zip((key, v), scales, strict=True)]
    arguments, valid = f"{place(q)}, {', '.join(rows)}, {mask}, {place(out)}, th, counter", ""
    if k.limited:  # read only the part of the cache that some query attends to
        arguments += ", valid"
        valid = (
            f"long valid = 0;\n  for (long i = 0; i < {q.shape[2]}; i++)\n"
            f"    valid = max_of(valid, {place(own[-1])}[i] + 1);\n"
            f"  valid = min_of(valid, {key.shape[2]});\n  "
        )
    body = f"{valid}attention<{name}_dims>({arguments});"
    return struct + _function(name, body, f"attention_scratch_bytes<{name}_dims, {ctype(q)}, {ctype(key)}>()")
