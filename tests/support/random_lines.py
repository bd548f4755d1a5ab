"""The lines of random modules: families of PyTorch calls, each with a weight.

A line is a template: {a} is a value and {b} one that broadcasts against it, {d} dims and {e} a dim of a, {f} another
one, {n} the size of e, {k} a bool, {i} a small number, {t} a dtype of floats, {c} a mask like a, {x} an int64 tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from .random_modules import DTYPES, FAMILIES, FLOATS, Maker, kind_of


def table(text: str) -> list[str]:
    return [line.strip() for line in re.split(r";|\n", text) if line.strip()]


UNARY = table("""
    torch.sigmoid({a}); torch.tanh({a}); torch.relu({a}); F.gelu({a}); F.gelu({a}, approximate='tanh'); F.silu({a})
    F.mish({a}); F.elu({a}); F.celu({a}, 0.7); F.selu({a}); F.softplus({a}); F.softplus({a}, 2.0, 3.0)
    F.hardswish({a}); F.hardsigmoid({a}); F.leaky_relu({a}, 0.2); F.softshrink({a}, 0.3); torch.sin({a})
    torch.cos({a}); torch.atan({a}); torch.asinh({a}); torch.erf({a}); torch.expm1(torch.clamp({a}, -3, 2))
    torch.exp(torch.clamp({a}, -4, 2)); -{a}; torch.exp2(torch.clamp({a}, -4, 2)); torch.log(torch.abs({a}) + 0.5)
    torch.log1p(torch.abs({a})); {a} * 0.5; torch.log2(torch.abs({a}) + 1); torch.sqrt(torch.abs({a}) + 0.1)
    torch.rsqrt(torch.abs({a}) + 0.3); {a} + 1; torch.reciprocal(torch.abs({a}) + 0.5); torch.square({a}); 1 - {a}
    {a} / 3; 2.0 ** torch.clamp({a}, -4, 3); torch.clamp({a}, -2, 2) ** 3; torch.cosh(torch.clamp({a}, -2, 2))
    torch.sinh(torch.clamp({a}, -2, 2)); torch.tan(torch.clamp({a}, -1, 1)); torch.logit(torch.clamp({a}, 0.1, 0.9))
    F.logsigmoid({a}); torch.deg2rad({a}); torch.acos(torch.clamp({a}, -0.9, 0.9))
    torch.atanh(torch.clamp({a}, -0.9, 0.9)); {a}.to({t}); {a}.to({t})
""")
MOVED = table("""
    torch.abs({a}); torch.neg({a}); torch.relu({a}); torch.clamp({a}, -1, 2); torch.clamp({a}, min=0)
    torch.clone({a}); {a}.contiguous(); torch.zeros_like({a}); torch.full_like({a}, 2); {a}.detach(); F.relu6({a})
    torch.clamp_max({a}, 1); F.threshold({a}, 0, 0.5); F.hardtanh({a}); torch.nan_to_num({a}); torch.maximum({a}, {b})
    torch.minimum({a}, {b}); torch.fmax({a}, {b}); torch.fmin({a}, {b}); torch.where({c}, {a}, {b})
    torch.masked_fill({a}, {c}, 1); torch.where({c}, {a}, 2); {a}.reshape(-1); {a}.transpose({e}, {f})
    {a}.unsqueeze({e}); {a}.squeeze(); {a}.flatten(); {a}.squeeze({e}); {a}.narrow({e}, {n} // 3, {n} - {n} // 3)
    {a}.select({e}, {i}); torch.flip({a}, {d}); {a}.mT; torch.roll({a}, {i}, {e}); torch.roll({a}, 2); {a}[..., {i}:]
    {a}[..., ::2]; {a}[..., -3:99:3]; {a}[{i}]; {a}.unfold({e}, ({n} + 1) // 2, 1); torch.diagonal({a}, {i}, {e}, {f})
    torch.tril({a}, {i}); torch.triu({a}, {i}); torch.movedim({a}, {e}, {f}); {a}.repeat_interleave(2, {e})
    torch.rot90({a}, {i}); {a}.unflatten({e}, (-1, 1)); {a}.ravel(); torch.tile({a}, (2, 1)); torch.atleast_2d({a})
    {a}.expand(2, *{a}.shape); {a}.expand_as({b}); F.pad({a}, [{i}, 1]); F.pad({a}, [1, 0, {i}, 2], value=-2.5)
    F.pad({a}, [1, {i}], mode='reflect'); F.pad({a}, [2, 1], mode='replicate')
    F.pad({a}, [1, 1, 0, 1], mode='circular'); {a}.permute(*range({a}.ndim)[::-1]); torch.cat([{a}, {a}], {e})
    torch.stack([{a}, {a}], {e}); torch.cat([{a}, {b}.expand_as({a})], {e}); torch.index_select({a}, {e}, {x} % {n})
    {a}[{x} % {a}.shape[0]]; F.embedding({x} % {a}.shape[0], {a}); torch.take({a}, {x} % {a}.numel())
    {a}[..., {x} % {a}.shape[-1]]; {a}[None, {x} % {a}.shape[0]]; torch.index_fill({a}, {e}, {x} % {n}, 2)
    torch.diagonal_scatter({a}, torch.diagonal({a})); torch.select_scatter({a}, {a}.select({e}, 0), {e}, {i})
    F.pixel_shuffle({a}, 2); F.pixel_unshuffle({a}, 1)
    torch.slice_scatter({a}, {a}.narrow({e}, 0, 1), {e}, {n} - 1, {n}); F.interpolate({a}, scale_factor=1.5)
    F.max_pool1d({a}, 2, 1); F.max_pool2d({a}, 3, 2, 1); F.max_pool2d({a}, 2, 2, 0, 2); F.adaptive_max_pool2d({a}, 2)
    torch.arange({n}); torch.eye({n}); torch.full(({n}, 2), 1, dtype={t}); torch.arange({n}, 0, -2)
""")
EXACT = table("""
    torch.floor({a}); torch.ceil({a}); torch.round({a}); torch.trunc({a}); torch.sign({a}); torch.isnan({a}); {a} > 0
    torch.isfinite({a}); torch.frac({a}); torch.logical_not({a}); torch.signbit({a}); {a}.clamp(-50, 50).to(i32)
    {a}.clamp(-50, 50).to(i8); {a}.to(b); {a} < {b}; {a} >= {b}; {a} == {b}; {a} != {b}; torch.amax({a}, {d}, {k})
    torch.amin({a}, {d}, {k}); torch.argmax({a}, {e}, {k}); torch.argmin({a}, {e}, {k}); torch.max({a})
    torch.argmax({a}); torch.any({a}, {e}, {k}); torch.all({a}, {e}, {k}); torch.count_nonzero({a}, {e})
    torch.max({a}, {e}, {k})[0]; torch.cummax({a}, {e})[0]; torch.cummin({a}, {e})[0]
    torch.sort({a}, dim={e}, stable=True)[0]; torch.msort({a}); torch.argsort({a}, dim={e}, stable=True)
    torch.topk({a}, {n} // 2, {e})[0]; torch.kthvalue({a}, 1, {e})[0]
""")
INTEGERS = table("""
    {a} + {b}; {a} * {b}; {a} - {b}; {a} & {b}; {a} | {b}; {a} ^ {b}; ~{a}; {a} // (torch.abs({b}) + 1); -{a}
    torch.div({a}, torch.abs({b}) + 1, rounding_mode='trunc'); {a} % (torch.abs({b}) + 1); torch.abs({a})
    {a} << ({b} & 3); torch.fmod({a}, torch.abs({b}) + 1); {a} >> ({b} & 3); torch.sign({a}); {a} * 3 + 1
    torch.square({a}); {a} // -3; torch.remainder({a}, -5); torch.fmod({a}, 3); {a} % -3; torch.add({a}, {b}, alpha=3)
    torch.sum({a}, {d}, {k}); torch.prod({a}, {e}, {k}); torch.cumsum({a}, {e}); torch.sum({a}, dtype=i32)
    torch.cumprod({a}, {e}); {a} @ {a}.mT; torch.diff({a}, dim={e}); {a}.to(i8); {a}.to(u8); {a}.to(b); {a}.to(i16)
""")
BINARY = table("""
    {a} + {b}; {b} - {a}; {a} * {b}; torch.add({a}, {b}, alpha=2); torch.sub({b}, {a}, alpha=0.5)
    torch.hypot({a}, {b}); {a} / (torch.abs({b}) + 1); torch.atan2({a}, torch.abs({b}) + 0.1)
    torch.lerp({a}, {b}, 0.3); torch.rsub({a}, {b}); torch.logaddexp({a}, {b})
    torch.addcmul({a}, {b}, {b}, value=0.5); torch.addcdiv({a}, {b}, torch.abs({b}) + 1)
    torch.pow(torch.abs({a}) + 0.5, torch.clamp({b}, -2, 2)); F.mse_loss({a}, {b}.expand_as({a}), reduction='none')
    torch.xlogy({a}, torch.abs({b}) + 1); torch.copysign({a}, {b})
""")
ROWS = table("""
    torch.sum({a}); torch.mean({a}); torch.sum({a}, {d}, {k}); torch.mean({a}, {d}, {k})
    torch.sum({a}, {e}, dtype={t}); torch.var({a}, {d}, correction=0, keepdim={k})
    torch.prod(torch.clamp({a}, 0.5, 1.5), {e}, {k}); torch.norm({a}); torch.linalg.vector_norm({a}, 1, {d}, {k})
    torch.linalg.vector_norm({a}, 3, {d}, {k}); torch.logsumexp({a}, {d}, {k}); torch.softmax({a}, {e})
    torch.softmax({a}, {e}, dtype={t}); torch.log_softmax({a}, {e}); F.normalize({a}, dim={e}); torch.cumsum({a}, {e})
    torch.cumprod(torch.clamp({a}, 0.5, 1.5), {e}); torch.nansum({a}, {d}, {k}); torch.logcumsumexp({a}, {e})
    torch.diff({a}, dim={e}); torch.cdist({a}, {a}); torch.trapezoid({a}, dim={e}); {a} @ {a}.mT; {a}.mT @ {a}
    torch.dot({a}.flatten(), {a}.flatten()); torch.outer({a}.flatten()[:40], {a}.flatten()[:9])
    torch.index_add({a}, {e}, {x} % {n}, {a}.index_select({e}, {x} % {n})); F.layer_norm({a}, {a}.shape[-2:])
    F.avg_pool1d({a}, 2, 1); F.avg_pool2d({a}, 3, 2, 1, True, False); F.adaptive_avg_pool2d({a}, 2)
    F.instance_norm({a}); F.interpolate({a}, scale_factor=1.5, mode='bilinear')
    F.interpolate({a}, size=5, mode='linear', align_corners=True); F.interpolate({a}, scale_factor=2, mode='bicubic')
    
""")
WRITES = table("""
    {a}.add_({b}); {a}.mul_({b}); {a}.copy_({b}); {a}.fill_(1); {a}.zero_(); {a}.clamp_(-1, 1); {a}.sub_(1)
    {a}.relu_(); {a}[..., 0] = 2; {a}[0] = {a}[-1]; {a}[..., 1:] = {b}[..., :-1].clone(); {a}.masked_fill_({c}, 1)
    {a}[{c}] = 0; {a}[::2] += 1; {a} += {b}; {a}.neg_(); {a}.transpose(0, -1).mul_(2); {a}.view(-1)[::2].zero_()
    {a}.squeeze().add_(1); {a}.tanh_(); {a}.flatten().add_(1); {a}.select(0, 0).copy_({a}.select(0, -1))
    {a}.narrow(-1, 0, 1).fill_(3); {a}.T.add_({b}.T); {a}.diagonal().fill_(0); {a}.copy_({a}.flip(-1))
    {a}.addcmul_({b}, {b}); torch.add({a}, {b}, out={a}); {a}.mul_({a}); {a}[1:] = {a}[:-1].clone()
    {a}.unsqueeze(0).mul_(0.5); {a}.add_({a}.sum()); {a}.index_fill_(0, {x} % {a}.shape[0], 1)
""")
KEEPING = ("copy_", "fill_", "zero_", "clamp_", "relu_", "] =", "neg_")  # writes after which exact values are exact


def family(weight: int) -> Callable[[Callable[[Maker], None]], Callable[[Maker], None]]:
    def register(f: Callable[[Maker], None]) -> Callable[[Maker], None]:
        FAMILIES[f] = weight
        return f

    return register


def filled(m: Maker, template: str, a: str, fits_in: bool = False, exact: bool = False) -> str:
    """A template with values for its names."""
    t, e = m.values[a], m.dim(a)
    b = c = x = ""
    if "{b}" in template:
        b = m.like(a, None if exact or m.chance(0.8) else DTYPES[m.dtype()], fits_in)
        if exact and not m.exact(b):
            b = m.leaf(t.shape, t.dtype)
    if "{c}" in template:
        c = m.leaf(t.shape, torch.bool) if fits_in else m.like(a, torch.bool)
    if "{x}" in template:
        x = m.leaf((m.rng.randint(1, 6),), torch.int64)
    return template.format(
        a=a, b=b, c=c, x=x, d=m.dims(a) or [0], e=e, f=m.dim(a), n=max(1, m.size(a, e)), k=m.chance(0.5),
        i=m.rng.randint(-2, 2), t=m.dtype(FLOATS),
    )  # fmt: skip


@family(12)
def unary(m: Maker) -> None:
    m.add(filled(m, m.pick(UNARY), m.value("f" if m.chance(0.9) else "fib")))


@family(30)
def moved(m: Maker) -> None:
    m.add(filled(m, m.pick(MOVED), m.value()), exact=True)


@family(9)
def exact(m: Maker) -> None:
    m.add(filled(m, m.pick(EXACT), m.value(exact=True), exact=True), exact=True)


@family(7)
def integers(m: Maker) -> None:
    m.add(filled(m, m.pick(INTEGERS), m.value("i")), exact=True)


@family(13)
def binary(m: Maker) -> None:
    m.add(filled(m, m.pick(BINARY), m.value("f")))


@family(12)
def rows(m: Maker) -> None:
    m.add(filled(m, m.pick(ROWS), m.value("f")))


@family(3)
def split(m: Maker) -> None:
    texts = ("torch.chunk({a}, 3, {e})", "torch.split({a}, 2, {e})", "torch.unbind({a}, {e})")
    m.add(filled(m, m.pick(texts), m.value(rank=1)), exact=True, count=None)


@family(9)
def product(m: Maker) -> None:
    a = m.value("f", rank=1, most=4)
    t = m.values[a]
    k, n, d = t.shape[-1], m.pick((1, 2, 3, 7, 16, 17, 33)), t.dtype
    style = m.pick(("linear", "linear", "matmul", "transposed", "batched", "einsum", "vector", "addmm"))
    if style == "linear":
        bias = f", {m.leaf((n,), d, m.chance(0.8))}" if m.chance(0.7) else ""
        m.add(f"F.linear({a}, {m.leaf((n, k), d, m.chance(0.8))}{bias})")
    elif style == "batched":
        batch = tuple(s if m.chance(0.6) else 1 for s in t.shape[:-2])
        m.add(f"torch.matmul({a}, {m.leaf((*batch, k, n), d)})")
    elif style == "einsum":
        letters = "abcd"[: t.ndim]
        other = "".join([*m.rng.sample(letters, m.rng.randint(1, t.ndim)), *["x"] * m.chance(0.5)])
        sizes = dict(zip(letters, t.shape, strict=True)) | {"x": n}
        out = "".join(m.rng.sample(sorted({*letters, *other}), m.rng.randint(0, len({*letters, *other}))))
        m.add(f"torch.einsum('{letters},{other}->{out}', {a}, {m.leaf([sizes[c] for c in other], d)})")
    elif style == "addmm":
        scales = f"beta={m.pick((1, 0.5, 0))}, alpha={m.pick((1, 2))}"
        m.add(f"torch.addmm({m.leaf((n,), d)}, {a}.reshape(-1, {k}), {m.leaf((k, n), d)}, {scales})")
    else:
        shape = {"matmul": (k, n), "transposed": (n, k), "vector": (k,)}[style]
        m.add(f"{a} @ {m.leaf(shape, d)}{'.mT' * (style == 'transposed')}")


@family(5)
def convolution(m: Maker) -> None:
    n = m.pick((1, 1, 2, 2, 2, 3))
    a = m.value("f", rank=n + 1, most=n + 2, full=True)
    d, c = m.values[a].dtype, m.values[a].shape[-n - 1]
    groups = m.pick([g for g in (1, 1, 1, 2, c) if c % g == 0])
    k, size = groups * m.pick((1, 1, 2, 3, 8)), [m.rng.randint(1, 3) for _ in range(n)]
    bias = m.leaf((k,), d, True) if m.chance(0.6) else "None"
    stride, padding = ([m.rng.randint(low, 2) for _ in range(n)] for low in (1, 0))
    options = f"{bias}, {stride}, {padding}, groups={groups}"
    if m.chance(0.2):
        m.add(f"F.conv_transpose{n}d({a}, {m.leaf((c, k // groups, *size), d, True)}, {options})")
    else:
        options += f", dilation={m.rng.randint(1, 2)}"
        m.add(f"F.conv{n}d({a}, {m.leaf((k, c // groups, *size), d, m.chance(0.85))}, {options})")


@family(4)
def norm(m: Maker) -> None:
    a = m.value("f", rank=1, full=True)
    t = m.values[a]
    shape, c = list(t.shape[-m.rng.randint(1, t.ndim) :]), t.shape[1] if t.ndim > 1 else 1
    style = m.pick(("layer_norm", "rms_norm", "batch_norm", "group_norm"))
    full = style in ("layer_norm", "rms_norm")
    w, b = (m.leaf(shape if full else (c,), t.dtype, True) for _ in range(2))
    if style == "batch_norm":
        m.add(f"F.batch_norm({a}, {w}, torch.abs({b}) + 0.5, {w}, {b})")
    elif style == "group_norm":
        m.add(f"F.group_norm({a}, {m.pick([g for g in range(1, c + 1) if c % g == 0])}, {w}, {b})")
    else:
        m.add(f"F.{style}({a}, {shape}, {w}, {b if style == 'layer_norm' else 1e-3})")


@family(2)
def attention(m: Maker) -> None:
    if m.nonfinite:
        return  # PyTorch spreads NaN from keys that the mask hides
    b, h, sq, sk, d = (m.pick(o) for o in ((1, 2), (1, 2, 4), (1, 3, 17), (1, 5, 16), (1, 4, 8, 12)))
    dtype, g = DTYPES[m.dtype(FLOATS)], m.pick((1, h))
    q, k, v = m.leaf((b, h, sq, d), dtype), m.leaf((b, g, sk, d), dtype), m.leaf((b, g, sk, 5), dtype)
    mask = f"attn_mask={m.leaf((b, 1, sq, sk), m.pick((torch.bool, dtype)))}"
    style = mask if m.chance(0.4) else f"is_causal={m.chance(0.4)}"
    m.add(f"F.scaled_dot_product_attention({q}, {k}, {v}, {style}{', enable_gqa=True' * (g != h)})")


@family(14)
def write(m: Maker) -> None:
    """Inputs keep their contents, because a program has to; weights become state."""
    kept = {m.values[n].untyped_storage()._cdata for n in (*m.inputs, *(() if m.chance(0.2) else m.weights))}
    found = [n for n, t in m.values.items() if t.numel() and t.untyped_storage()._cdata not in kept]
    a, template = m.pick(found[-6:]), m.pick(WRITES)
    text = filled(m, template, a, fits_in=True)
    integers = kind_of(m.values[a].dtype) != "f" and any(
        m.values[b].dtype != m.values[a].dtype for b in re.findall(r"v\d+", text) if b in m.values and b not in m.inputs
    )
    if not integers:
        m.write(a, text, any(k in template for k in KEEPING))
