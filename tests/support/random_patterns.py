"""Patterns of models in random modules: several lines that belong together, such as a rotated position, a gate, a cache
that a step writes, or a masked softmax; and lines with operands of several dtypes, indices or windows.

The templates of single lines are those of :mod:`tests.support.random_lines`.
"""

from __future__ import annotations

import torch

from .random_lines import family, filled, table
from .random_modules import DTYPES, FLOATS, INTS, NAMES, Maker, kind_of

# Operands of any dtypes; {s} is a tensor without dims.
MIXED = table("""
    {a} + {b}; {a} * {b}; {b} / (torch.abs({a} * 1) + 2); {a} + 1.5; {a} * True; {a} / 2; {a} * {s}; {s} - {a} * 1
    torch.where({c}, {a}, 1.5); torch.where({c}, {a}, {b}); torch.where({c}, {s}, {a}); {a} + {b} * {s}; {a} * 1
    torch.cat([{a}, {b}.expand_as({a})], {e}); torch.maximum({a}, {b}); torch.sum({a}, {d}, {k}); {a} + {a}
    torch.cumsum({a}, {e}); torch.mean({a}, {d}, dtype={t}); {a} * {c}; torch.sqrt(torch.abs({a} * 1)); {a} ** 2
    torch.sigmoid({a}); torch.exp(torch.clamp({a} * 1, -3, 2)); torch.rsub({b} * 1, {a}); torch.minimum({a}, {s})
    torch.cumprod(torch.clamp({a} * 1, -1, 2), {e}); torch.full_like({a}, 1.0, dtype={t}) + {a}; {a} * {n}
    torch.add({a} * 1, {b}, alpha=2); torch.softmax({a}, {e}, dtype={t}); torch.sum({a}, {e}, dtype={t}); {s} * 2
    torch.lerp({a}.to({t}), {b}.to({t}), {s}.to({t})); torch.prod(torch.clamp({a} * 1, -1, 2), {e}, {k}, dtype={t})
    torch.true_divide({a}, {n}); torch.atan2({a} * 1, torch.abs({b} * 1) + 2); ({a} != 0) * {b}
    {a} ** {s}.clamp(0, 2); torch.clamp({a} * 1, {s}, {s} + 2); torch.masked_fill({a} * 1.0, {c}, {s}.to({t}))
    torch.std({a} * 1.0, {d}); torch.addcmul({a}, {b}, {c} * 1); torch.var({a} * 1.0, {e}, keepdim={k})
    torch.square({a}); torch.abs({a} * 1)
""")
DECIDED = table("""
    {a} > {b}; {a} == {b}; {a} != {s}; {a} <= 0.5; torch.logical_and({a}, {b}); torch.logical_xor({a}, {s})
    {a} >= {s}; torch.logical_or({a}, {b}); torch.isin({a}, {b}); torch.any({a}); torch.all({a}, {e}, {k})
    torch.sign({a} * 1); torch.bucketize({a}, torch.arange(-4, 5, 2))
    torch.searchsorted(torch.arange(-3, 4), {a} * 1, right={k})
    torch.argsort({a}, dim={e}, descending={k}, stable=True)
    torch.sort({a}, dim={e}, descending={k}, stable=True)[1]; torch.sum({a} > {b}, {d}); torch.cummax({a}, {e})[1]
    torch.max({a}, {e}, {k})[1]; torch.topk({a}, {n}, {e})[0]; torch.floor({a} * 1)
    torch.gather({a}, {e}, torch.argsort({a}, dim={e}, stable=True))
    torch.argsort(torch.argsort({a}, dim={e}, stable=True), {e}); torch.cumsum({a} > 0, {e})
    torch.sum(({a} > 0).to({t}), {e}); {a}.clamp(-9, 9).to(i64) // 2; torch.median({a}, {e})[0]
    torch.argmax(({a} > 0).to(i32), {e}); torch.aminmax({a}, dim={e})[1]; torch.isclose({a}, {a})
    torch.amax({a}, {d}); torch.bitwise_and({a} > 0, {b} > 0); ~({a} > {b}); ({a} > 0) ^ ({b} > 0)
    F.one_hot({x} % 5, 5); torch.unique({x} * 0); torch.nonzero({a}).shape[0] * torch.ones(2)
    torch.histc({a} * 1.0, 4, -3, 3); torch.bincount({x} % 4, minlength=4)
    torch.cumsum(torch.sort({a}, dim={e}, stable=True)[0] > 0, {e}); torch.tril(({a} > 0), {i})
    torch.cumsum({c}, {e}) - 1
""")
INDEXED = table("""
    torch.gather({a}, {e}, {y} % {n}); torch.take_along_dim({a}, {y} % {n}, {e})
    torch.scatter({a}, {e}, {y} % {n}, 2); torch.scatter({a}, {e}, torch.argsort({y}, dim={e}, stable=True), {a})
    {a}[{x} % {a}.shape[0], {x} % {a}.shape[1]]; torch.scatter_reduce({a}, {e}, {y} % {n}, {a}, 'amax')
    {a}[{x}[:, None] % {a}.shape[0], {x} % {a}.shape[1]]
    torch.scatter_reduce({a}, {e}, {y} % {n}, {a}, 'amin', include_self=False)
    {a}[{x} % {a}.shape[0], :, {x} % {a}.shape[2]]; torch.index_put({a}, ({x} % {a}.shape[0],), {a}[0])
    {a}[:, {x} % {a}.shape[1]]; {a}[..., None, {x} % {a}.shape[-1]]; torch.index_put({a}, ({c},), {s}.to({a}.dtype))
    {a}[:, {x} % {a}.shape[1], None, 1:]; {a}[{x}[None] % {a}.shape[0]]
    torch.index_copy({a}, {e}, torch.argsort({x})[:1] % {n}, {a}.narrow({e}, 0, 1)); F.unfold({a}, 2, 1, 1, 2)
    torch.where({c}, {a}, {a}.flip({e})); {a}[-{x}.abs() % {a}.shape[0]]
    F.embedding({x}[:, None] % {a}.shape[0], {a}); F.channel_shuffle({a}, 2); F.pad({a}, [-1, 1])
    F.pad({a}, [1, -1, 0, 2], value=3); F.pad({a}, [1, 2, 3, 0, 1, 1]); F.interpolate({a}, size=3)
    F.interpolate({a}, scale_factor=0.6, mode='nearest-exact'); F.max_pool3d({a}, 2, 1, 1)
    F.adaptive_max_pool1d({a}, 3); F.max_pool2d({a}, (1, 3), (2, 1), (0, 1), ceil_mode=True); {a}.reshape(2, -1)
    F.pad({a}, [1, 0, 1, 1], mode='reflect'); F.pad({a}, [1, 2, 0, 1], mode='replicate'); {a}.view(2, -1)
    {a}.repeat(2, 1); torch.hstack([{a}, {a}]); torch.block_diag({a}, {a}); {a}.swapaxes({e}, {f})
    {a}.expand(3, *{a}.shape).reshape(-1)
    {a}.clone(memory_format=torch.contiguous_format).as_strided((2, 2), (1, 2)); torch.tensor_split({a}, 3, {e})[1]
    {a}.reshape(-1, 2).T.reshape(-1); {a}.flip(0, -1); {a}.unfold(-1, 2, 2).flatten(-2)
    {a}.unfold({e}, 2, 1).transpose(-1, {f}); {a}.T.reshape(-1)[::3]; {a}.view(-1, 1)
    torch.roll({a}, ({i}, 1), ({e}, {f})); {a}.roll(1, 0).roll(-1, 0)
    {a}.narrow({e}, 1, {n} - 1) if {n} > 1 else {a}; torch.cat([{a}, {a}.flip({e}), {a}.narrow({e}, 0, 1)], {e})
    torch.stack([{a}, {a}.flip({e})], -1).flatten(-2)
    torch.cat([{a}.narrow({e}, {n} - 1, 1), {a}.narrow({e}, 0, {n} - 1)], {e})
    torch.max_pool1d({a}, 3, 2, 1, 1, True); {a}.view(i16) if {a}.element_size() == 2 else {a}.view(i32)
    torch.masked_select({a}, {a} != {a}); {a}.movedim(0, -1); torch.tril_indices({n}, {n}, {i})
    torch.cartesian_prod({x}, {x}); torch.broadcast_tensors({a}, {b})[1] + 0
""")
SUMMED = table("""
    torch.scatter_add({a}, {e}, {y} % {n}, {a})
    torch.index_put({a}, ({x} % {a}.shape[0],), {a}[:1], accumulate=True)
    torch.index_put({a}, ({x} % {a}.shape[0], {x} % {a}.shape[1]), {a}[0, 0], accumulate=True)
    F.cosine_similarity({a}, {b}); torch.scatter_reduce({a}, {e}, {y} % {n}, {a}, 'mean')
    torch.einsum('...ij,...kj->...ik', {a}, {a}); torch.einsum('...i->...', {a}); torch.einsum('...ij->...ji', {a})
    torch.einsum('i...,i...->...', {a}, {a}); torch.einsum('...i,...i->...', {a}, {b}.expand_as({a}))
    torch.tensordot({a}, {a}, [[{e}], [{e}]]); torch.inner({a}, {a})
    torch.softmax(torch.masked_fill({a}, {c}, float('-inf')), {e}); torch.softmax(torch.tril({a}) * 4, -1)
    torch.softmax({a}.masked_fill({c}, -1e4), {e}) * ~{c}
    torch.logsumexp(torch.masked_fill({a}, {c}, float('-inf')), {e})
    F.fold(F.unfold({a}, 2, 1, 1, 2), {a}.shape[-2:], 2, 1, 1, 2)
    F.interpolate({a}, size=(3, 5), mode='bilinear', align_corners={k})
    F.interpolate({a}, scale_factor=0.7, mode='area'); F.interpolate({a}, size=(2, 3, 4), mode='trilinear')
    F.interpolate({a}, scale_factor=(0.5, 1.3), mode='bicubic', align_corners={k}); F.avg_pool3d({a}, 2, 1, 1)
    F.interpolate({a}, scale_factor=0.6, mode='bilinear', antialias=True); F.adaptive_avg_pool1d({a}, 3)
    F.glu({a}, {e}); F.avg_pool2d({a}, (3, 1), (1, 2), (1, 0), {k}, {k}); F.lp_pool2d(torch.abs({a}) + 0.1, 2, 2)
    F.adaptive_avg_pool2d({a}, (1, 3)); F.local_response_norm({a}, 3); torch.std_mean({a}, {e})[0]
    torch.var_mean({a}, {d}, correction=0)[1]; F.cross_entropy({a}, {a}.softmax(1), reduction='none')
    F.smooth_l1_loss({a}, {b}.expand_as({a}), reduction='none')
    F.kl_div({a}, {b}.expand_as({a}), reduction='none', log_target=True); F.huber_loss({a}, {b}.expand_as({a}))
    F.bilinear({a}, {a}, {a}.new_ones(2, {a}.shape[-1], {a}.shape[-1])); torch.addmv({a}[:, 0], {a}, {a}[0])
    torch.kron({a}, {b}); torch.baddbmm({a}, {a}, {a}.mT @ {a}, beta=0.5); torch.bmm({a}, {a}.mT)
    torch.mv({a}, {a}[0]); {a}.mT @ {a}[..., 0, None]
    ({a} - {a}.mean({e}, True)) * torch.rsqrt({a}.var({e}, correction=0, keepdim=True) + 1e-2)
    {a} * torch.sigmoid({a}.mean({d}, True)); {a} / (torch.linalg.vector_norm({a}, dim={e}, keepdim=True) + 0.1)
    {a} - {a}.logsumexp({e}, True); {a} + {a}.sum(); {a} * torch.rsqrt({a}.square().mean(-1, True) + 1e-3)
    torch.exp({a} - {a}.amax({e}, True)).sum({e}, {k}); {a} * {a}.mean(); torch.cumsum({a}.flip({e}), {e}).flip({e})
    torch.cumsum(torch.cumsum({a}, {e}), {f}) / 9; torch.fft.rfft({a}).real; F.prelu({a}, {a}.new_full((1,), 0.3))
    F.group_norm({a}, 1); torch.view_as_real(torch.complex({a}.to(f32), {a}.to(f32)))
    torch.softmax({a}, {e}) @ {a}.mT; torch.log(torch.softmax({a}, {e}) + 1e-2); F.softmin({a}, {e})
    torch.logcumsumexp({a}, {e})
    F.grid_sample({a}, torch.tanh({a}[:, :2].expand(-1, 2, -1, -1).movedim(1, -1)), align_corners={k})
    torch.matmul({a}, {a}.mT).softmax(-1)
    F.grid_sample({a}, F.affine_grid({a}.new_full(({a}.shape[0], 2, 3), 0.4), {a}.shape, {k}), padding_mode='border')
""")
STATE = table("""
    {a}[{x} % {a}.shape[0]] = 1; {a}[:, {x} % {a}.shape[1]] = 2; {a}[..., 1:] = {a}[..., :-1].clone()
    {a}[-1:].zero_(); {a}.index_copy_(0, {x}[:1] % {a}.shape[0], {a}[-1:].clone())
    {a}.index_add_(0, {x} % {a}.shape[0], {a}[{x} % {a}.shape[0]]); {a}.scatter_(-1, {y} % {a}.shape[-1], 1)
    {a}.copy_({a}.roll(1, 0)); {a}.mul_(0.9).add_({b}, alpha=0.1); {a}.abs_(); {a}.lerp_({b}, 0.25)
    {a}.masked_fill_({c}, 0); {a}[..., ::2].copy_({a}[..., 1::2]); {a}.reshape(-1)[1:].mul_(2)
    {a}.transpose(0, -1)[0] = {a}.transpose(0, -1)[-1].clone(); {a}.chunk(2, -1)[0].add_(1); {a}.split(1)[0].neg_()
    {a}.unbind(-1)[0].fill_(2); {a}.flip(-1).mul_(0); {a}.view(-1)[{x} % {a}.numel()] = 0
    {a}.addcdiv_({b}, {b}.abs() + 1); {a}.swapaxes(0, -1).clamp_(-1, 1)
    {a}.narrow(0, 0, 1).copy_({b}.expand_as({a}).narrow(0, 0, 1)); {a}.sigmoid_(); {a} *= 2; {a}[{a} > 0] = 0
    {a}.scatter_add_(0, {y} % {a}.shape[0], {a}.clone()); {a}.T[0] += 1; {a}.sub_({a}.mean()); {a}.square_()
    {a}.index_put_(({x} % {a}.shape[0],), {a}[:1].clone()); {a}.unfold(-1, 1, 2).zero_()
    {a}.expand(1, *{a}.shape)[0].mul_(3); {a}[..., :1] = {a}[..., -1:]; {a}[..., None][..., 0] = {b}; {a}.t_()
    {a}.squeeze_(); {a}.unsqueeze_(0).add_(1); {a}[torch.arange({a}.shape[0]), 0] = 5
    {a}.diagonal(dim1=0, dim2=-1).add_(1); {a}.fill_diagonal_(1); {a}.where({c}, {a}).neg_()
""")
# Writes after which exact values are exact.
KEEPING = (
    "] = 1", "] = 2", "] = 0", "] = 5", "roll", ".clone()", "masked_fill_", "scatter_(", "fill_", "abs_", "neg_",
    "zero_",
)  # fmt: skip


def then(m: Maker, text: str, exact: bool = False) -> str:
    """The value of another line; a ValueError if it was left out."""
    before = len(m.lines)
    m.add(text, exact)
    if len(m.lines) == before:
        raise ValueError("refused")
    return [*m.values][-1]


def completed(m: Maker, template: str, a: str, **options: bool) -> str:
    """A template with values for its names and for {s}, a tensor without dims, and {y}, int64 numbers like a."""
    s = y = ""
    if "{s}" in template:
        s = m.leaf((), DTYPES[m.dtype((*FLOATS, *INTS, "b"))])
    if "{y}" in template:
        y = m.leaf(m.values[a].shape, torch.int64)
    return filled(m, template.replace("{s}", s).replace("{y}", y), a, **options)


def other(m: Maker, a: str, exact: bool) -> str:
    """A value of any dtype that broadcasts against ``a``."""
    b = m.like(a, DTYPES[m.dtype((*FLOATS, *INTS, "b"))])
    return b if m.exact(b) or not exact else m.leaf(m.values[a].shape, m.values[b].dtype)


@family(12)
def mixed(m: Maker) -> None:
    a, template = m.value("fiib"), m.pick(MIXED)
    m.add(completed(m, template.replace("{b}", other(m, a, False)) if m.chance(0.7) else template, a))


@family(8)
def decided(m: Maker) -> None:
    a, template = m.value("fiib", exact=True), m.pick(DECIDED)
    template = template.replace("{b}", other(m, a, True)) if m.chance(0.7) else template
    m.add(completed(m, template, a, exact=True), exact=True)


@family(14)
def indexed(m: Maker) -> None:
    m.add(completed(m, m.pick(INDEXED), m.value(rank=1)), exact=True)


@family(12)
def summed(m: Maker) -> None:
    template = m.pick(SUMMED)
    if m.nonfinite and template.startswith("torch.var_mean"):
        return  # PyTorch's mean of a row with an infinity is NaN, unless the last element is the infinity
    m.add(completed(m, template, m.value("f", rank=1)))


@family(8)
def state(m: Maker) -> None:
    """A buffer or a value that is written."""
    kept = {m.values[n].untyped_storage()._cdata for n in m.inputs}
    found = [n for n, t in m.values.items() if t.numel() and t.ndim and t.untyped_storage()._cdata not in kept]
    a, template = m.pick(found[-6:] if m.chance(0.6) else found), m.pick(STATE)
    if kind_of(m.values[a].dtype) == "f" and (m.exact(a) or "> 0" not in template):
        m.write(a, completed(m, template, a, fits_in=True), any(k in template for k in KEEPING))


@family(4)
def rotated(m: Maker) -> None:
    """Positions by rotation: halves, or neighbours."""
    a = m.value("f", rank=2, fits=lambda t: t.shape[-1] % 2 == 0 and t.shape[-1] > 0)
    n, d = m.values[a].shape[-1] // 2, m.values[a].dtype
    if m.chance(0.6):
        angle = m.leaf((m.values[a].shape[-2], 2 * n), d)
        half = then(m, f"torch.cat([-{a}[..., {n}:], {a}[..., :{n}]], -1)", exact=True)
        then(m, f"{a} * torch.cos({angle}) + {half} * torch.sin({angle})")
    else:
        c, s = m.leaf((m.values[a].shape[-2], n), d), m.leaf((n,), d)
        even, odd = f"{a}[..., ::2]", f"{a}[..., 1::2]"
        then(m, f"torch.stack([{even} * {c} - {odd} * {s}, {even} * {s} + {odd} * {c}], -1).flatten(-2)")


@family(4)
def gated(m: Maker) -> None:
    a = m.value("f", rank=1, fits=lambda t: t.shape[-1] % 2 == 0 and t.shape[-1] > 0)
    m.add(f"{a}.chunk(2, -1)", exact=True, count=2)
    gate, up = [*m.values][-2:]
    hidden = then(m, f"{m.pick(('F.silu', 'torch.sigmoid', 'F.gelu', 'torch.relu'))}({gate}) * {up}")
    n, d = m.values[hidden].shape[-1], m.values[hidden].dtype
    then(m, f"{hidden} @ {m.leaf((n, m.pick((1, 3, n, 16))), d, True)}")


@family(4)
def heads(m: Maker) -> None:
    """Attention by hand: projections, heads, a mask, a softmax and their way back."""
    a = m.value("f", rank=3, most=3, full=True)
    (b, s, n), d, h, k = m.values[a].shape, m.values[a].dtype, m.pick((1, 2, 3)), m.pick((1, 4, 5))
    joint = then(m, f"F.linear({a}, {m.leaf((3 * h * k, n), d, True)}) / {n}")
    if m.chance(0.5):
        m.add(f"{joint}.view({b}, {s}, 3, {h}, {k}).permute(2, 0, 3, 1, 4).unbind(0)", exact=True, count=3)
    else:
        parts = f"[t.reshape({b}, {s}, {h}, {k}).transpose(1, 2) for t in {joint}.chunk(3, -1)]"
        m.add(parts, exact=True, count=3)
    q, key, v = [*m.values][-3:]
    scores = then(m, m.pick((f"{q} @ {key}.mT * 0.3", f"torch.einsum('bhqd,bhkd->bhqk', {q}, {key})")))
    if not m.nonfinite and m.chance(0.6):  # PyTorch spreads NaN from keys that the mask hides
        mask = f"torch.ones({s}, {s}, dtype=b).tril()"
        masked = (f"{scores}.masked_fill(~{mask}, float('-inf'))", f"torch.where({mask}, {scores}, -1e4)")
        scores = then(m, f"torch.softmax({m.pick(masked)}, -1)")
    else:
        scores = then(m, f"torch.softmax({scores}, -1, dtype=f32).to({v}.dtype)")
    then(
        m,
        m.pick(
            (
                f"({scores} @ {v}).transpose(1, 2).reshape({b}, {s}, -1)",
                f"torch.einsum('bhqk,bhkd->bqhd', {scores}, {v})",
            )
        ),
    )


@family(3)
def windows(m: Maker) -> None:
    """Windows of a shifted image and their way back, as in Swin."""
    b, h, w, c, s, d = (
        m.pick((1, 2)),
        m.pick((2, 4)),
        m.pick((4, 6)),
        m.pick((1, 3, 8)),
        m.pick((0, 1)),
        DTYPES[m.dtype(FLOATS)],
    )
    a = then(m, f"torch.roll({m.leaf((b, h, w, c), d)}, (-{s}, -{s}), (1, 2))", exact=True)
    a = then(
        m, f"{a}.view({b}, {h // 2}, 2, {w // 2}, 2, {c}).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, {c})", exact=True
    )
    a = then(m, f"torch.softmax({a} @ {a}.mT, -1) @ {a} / 2" if m.chance(0.7) else f"F.layer_norm({a}, [{c}])")
    a = then(
        m,
        f"{a}.view({b}, {h // 2}, {w // 2}, 2, 2, {c}).permute(0, 1, 3, 2, 4, 5).reshape({b}, {h}, {w}, {c})",
        exact=True,
    )
    then(m, f"torch.roll({a}, ({s}, {s}), (1, 2)){m.pick(('', '.permute(0, 3, 1, 2)', '[:, 1:]'))}", exact=True)


@family(4)
def cached(m: Maker) -> None:
    """A step writes to a buffer and reads it."""
    rows, n, d = m.pick((3, 5, 8)), m.pick((1, 4, 6)), DTYPES[m.dtype(FLOATS)]
    cache, new, at = m.leaf((rows, n), d, True), m.leaf((m.pick((1, 2)), n), d, False), m.rng.randint(0, 1)
    k = m.values[new].shape[0]
    rolled = f"{cache}.copy_(torch.cat([{cache}[{k}:], {new}]))"
    styles = (f"{cache}[{at}:{at + k}] = {new}", rolled, f"{cache}.index_copy_(0, torch.arange({at}, {at + k}), {new})",
              f"{cache}[{at}:{at + k}].copy_({new})", f"{cache}.narrow(0, {at}, {k}).add_({new})",
              f"{cache}[torch.arange({k}) + {at}] = {new}")  # fmt: skip
    before = then(m, f"{cache}[{at}:] * 1") if m.chance(0.4) else ""
    style = m.pick(styles)
    m.write(cache, style, "add_" not in style)
    then(m, f"torch.softmax({new} @ {cache}.T / 2, -1) @ {cache}" + (f" + {before}.sum(0)" if before else ""))


@family(3)
def recurrent(m: Maker) -> None:
    """Steps of a recurrence over a dim."""
    a = m.value("f", rank=2, most=2, full=True)
    n, d, k = m.values[a].shape[1], m.values[a].dtype, m.pick((1, 3, 4))
    w, u, h = m.leaf((k, n), d, True), m.leaf((k, k), d, True), f"torch.zeros({k}, dtype={a}.dtype)"
    states = []
    for i in range(min(3, m.values[a].shape[0])):
        h = then(
            m,
            m.pick(
                (
                    f"torch.tanh({w} @ {a}[{i}] + {u} @ {h})",
                    f"torch.sigmoid({w} @ {a}[{i}]) * {h} + F.linear({a}[{i}], {w})",
                )
            ),
        )
        states.append(h)
    then(m, f"torch.stack([{', '.join(states)}], {m.pick((0, 1))})", exact=True)


@family(5)
def windowed(m: Maker) -> None:
    """Convolutions with odd options, and what stands around them."""
    n = m.pick((1, 2, 2, 2))
    a = m.value("f", rank=n + 2, most=n + 2, full=True)
    d, c = m.values[a].dtype, m.values[a].shape[1]
    groups = m.pick([g for g in (1, 1, 2, 3, c) if c % g == 0])
    k, size = groups * m.pick((1, 2, 4)), [m.rng.randint(1, 4) for _ in range(n)]
    if m.chance(0.5):
        stride, dilation = ([m.rng.randint(1, 3) for _ in range(n)] for _ in range(2))
        out = [m.rng.randint(0, max(s, t) - 1) for s, t in zip(stride, dilation, strict=True)]
        options = f"None, {stride}, {[m.rng.randint(0, 2) for _ in range(n)]}, {out}, {groups}, {dilation}"
        y = then(m, f"F.conv_transpose{n}d({a}, {m.leaf((c, k // groups, *size), d, True)}, {options})")
    else:
        padding = m.pick(("'same'", "'valid'", [m.rng.randint(0, 3) for _ in range(n)]))
        options = f"{m.leaf((k,), d, True)}, 1, {padding}, {m.rng.randint(1, 3)}, {groups}"
        x = f"F.pad({a}, {[m.rng.randint(0, 2) for _ in range(2 * n)]})" if m.chance(0.4) else a
        y = then(m, f"F.conv{n}d({x}, {m.leaf((k, c // groups, *size), d, True)}, {options})")
    w, b = (m.leaf((k,), d, True) for _ in range(2))
    ends = (
        f"F.relu(F.batch_norm({y}, {w}, {b}.abs() + 0.5, {w}, {b}))", f"{y} + F.silu({y})", f"{y}.flatten(1)",
        f"F.relu6({y}).mean((2, -1))", f"{y} * torch.sigmoid({y}.mean(-1, True))", f"F.max_pool{n}d({y}, 2, 2, 1)",
        f"{y}[:, ::2]", f"{y}.movedim(1, -1)",
    )  # fmt: skip
    then(m, m.pick(ends))


@family(3)
def routed(m: Maker) -> None:
    """The largest scores choose rows, whose results are added to where they belong."""
    tokens, experts, n, k, d = (
        m.pick((1, 3, 5)),
        m.pick((2, 4)),
        m.pick((2, 5)),
        m.pick((1, 2)),
        DTYPES[m.dtype(FLOATS)],
    )
    order = m.leaf((tokens, experts), torch.int64, False)
    scores = then(m, f"torch.argsort({order}, dim=-1, stable=True).to({NAMES[d]}) / 4", exact=True)  # no two are equal
    x, w = m.leaf((tokens, n), d, False), m.leaf((experts, n, 3), d, True)
    m.add(f"torch.topk({scores}, {k}, -1)", exact=True, count=2)
    best, which = [*m.values][-2:]
    share = then(m, f"torch.softmax({best}, -1)")
    if m.chance(0.5):
        y = then(m, f"torch.einsum('tn,tknm->tkm', {x}, {w}[{which}])")
        then(m, f"({y} * {share}[..., None]).sum(1)")
    else:
        dense = then(m, f"torch.zeros_like({scores}).scatter({m.pick((1, -1))}, {which}, {share})")
        then(m, f"torch.einsum('te,tn,enm->tm', {dense}, {x}, {w})")
