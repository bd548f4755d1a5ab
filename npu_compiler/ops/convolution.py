"""Convolutions of one to three spatial dims, also transposed: channels-first ops on channels-last primitives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd, prod
from typing import NamedTuple

from ..graph.direct_convolution import direct_convolution
from ..graph.expr import Expr, const, fn, index, load, where
from ..graph.graph import Value
from ..support.dtypes import opmath
from .common import MAX_STEPS, bounded, inner_taps, ints
from .registry import lowers
from .samples import S, Sample, t

Ints = int | list[int]
Sizes = Sequence[int]
Pairs = Sequence[tuple[int, int]]
MAX_CONVOLUTIONS = 16  # into which a transposed one is divided
# The most channels of all taps along the depth that become those of one convolution, for each input pixel of a result:
# with more, or with fewer results, partial sums take less time than the joined copy of the input.
JOINED = 192
DIRECT = 27  # terms of a depthwise convolution of three dims that one loop nest adds


def channels_last(x: Value, spatial: int) -> Value:
    """[N, C, ...] or [C, ...] -> [N, ..., C]."""
    x = x if x.rank == spatial + 2 else x.reshape(1, *x.shape)
    return x.permute(0, *range(2, x.rank), 1)


def channels_first(y: Value, batched: bool) -> Value:
    """[N, ..., C] -> [N, C, ...], without N if there was none."""
    y = y.permute(0, y.rank - 1, *range(1, y.rank - 1))
    return y if batched else y.reshape(*y.shape[1:])


def spread(x: Value, steps: Sequence[int], before: Sequence[int], sizes: Sequence[int]) -> Value:
    """Place the elements of [N, ..., C] ``steps`` apart, after ``before`` zeros, in zeros of spatial ``sizes``.

    A negative ``before`` crops.
    """
    inside: list[Expr] = []
    idx = [index(0)]
    for d, (step, lo, n) in enumerate(zip(steps, before, x.shape[1:-1], strict=True), 1):
        at = index(d) - lo
        inside += [at >= 0, at < n * step] + ([fn("eq")(at % step, 0)] if step > 1 else [])
        idx.append(at // step)
    value = load(0, x.dtype, [*idx, index(x.rank - 1)])
    guard = reduce(lambda a, b: a & b, inside)
    shape = (x.shape[0], *sizes, x.shape[-1])
    return x.graph.elementwise(shape, [x], where(guard, value, const(0, x.dtype)))


def core(
    x: Value, w: Value, stride: Sizes, padding: Pairs, dilation: Sizes, groups: int, bias: Value | None = None
) -> Value:
    """Convolve x [N, ..., C] with w [K, ..., C/groups], and add bias [K]. One spatial dim is a row of height 1; three
    are two, whose channels are those of all taps of the depth, or with many channels a sum over these taps. The bias
    follows the convolution at once, so that it becomes its epilogue. Taps that only read padding are left out."""
    w, padding = _inside(x, w, stride, padding, dilation)
    if len(stride) == 1:
        x, w = x.reshape(x.shape[0], 1, *x.shape[1:]), w.reshape(w.shape[0], 1, *w.shape[1:])
        y = core(x, w, (1, *stride), ((0, 0), *padding), (1, *dilation), groups, bias).cast(x.dtype)
        return y.reshape(y.shape[0], *y.shape[2:])
    if len(stride) == 2:
        (top, bottom), (left, right) = padding
        y = x.graph.conv2d(x, w, stride, (top, left, bottom, right), dilation, groups)
        return y if bias is None else y + bias
    n, depth = x.shape[0], x.shape[1] + sum(padding[0])
    if any(padding[0]):
        x = spread(x, (1, 1, 1), (padding[0][0], 0, 0), (depth, *x.shape[2:4]))
    taps, reach = bounded(w.shape[1], MAX_STEPS, "taps along the depth"), dilation[0] * (w.shape[1] - 1)
    planes = (depth - reach - 1) // stride[0] + 1
    if groups == 1 and taps > 1 and taps * x.shape[-1] <= JOINED // prod(stride[1:]):
        shape = (n, planes, *x.shape[2:4], taps, x.shape[-1])
        at = [index(0), index(1) * stride[0] + index(4) * dilation[0], index(2), index(3), index(5)]
        joined = x.graph.elementwise(shape, [x], load(0, x.dtype, at)).reshape(n * planes, *shape[2:4], -1)
        plane = w.permute(0, 2, 3, 1, 4).reshape(w.shape[0], *w.shape[2:4], -1)
        y = core(joined, plane, stride[1:], padding[1:], dilation[1:], 1, bias)
        return y.reshape(n, planes, *y.shape[1:])
    parts = []
    for tap in range(taps):
        begin = tap * dilation[0]
        slab = x.slice(1, begin, begin + (planes - 1) * stride[0] + 1, stride[0])
        plane = w.slice(1, tap, tap + 1).reshape(w.shape[0], *w.shape[2:])
        slab = slab.reshape(n * planes, *x.shape[2:])
        parts.append(core(slab, plane, stride[1:], padding[1:], dilation[1:], groups, None if tap else bias))
    y = reduce(lambda a, b: a + b, parts)
    return y.reshape(n, planes, *y.shape[1:])


def _depthwise(
    x: Value, w: Value, stride: Sizes, padding: Pairs, dilation: Sizes, groups: int, bias: Value | None
) -> Value:
    """Convolve like :func:`core`, with one node for all terms."""
    w, padding = _inside(x, w, stride, padding, dilation)
    out = list(map(_results, x.shape[1:-1], w.shape[1:-1], stride, padding, dilation))
    x, front = x.permute(0, 4, 1, 2, 3), [pair[0] for pair in padding]
    y = direct_convolution(x, w, stride, front, dilation, groups, out, opmath(x.dtype)).permute(0, 2, 3, 4, 1)
    return y if bias is None else y + bias


def _results(size: int, taps: int, step: int, padding: tuple[int, int], spacing: int) -> int:
    """Return the size of the result along a dim."""
    return (size + sum(padding) - spacing * (taps - 1) - 1) // step + 1


def _inside(x: Value, w: Value, stride: Sizes, padding: Pairs, dilation: Sizes) -> tuple[Value, Pairs]:
    """Return the taps of the filters that read elements of x, and the padding for them: dilated filters are often
    larger than the last feature maps of a network."""
    pairs = []
    for d, (step, pair, spacing) in enumerate(zip(stride, padding, dilation, strict=True), 1):
        size, taps = x.shape[d], w.shape[d]
        out = _results(size, taps, step, pair, spacing)
        inner, pair = inner_taps(size, out, taps, step, pair, spacing)
        if len(inner) < taps:
            w = w.slice(d, inner.start, inner.stop)
        pairs.append(pair)
    return w, pairs


def check_groups(groups: int, *channels: int) -> None:
    """Check that ``groups`` divides every count in ``channels``; raises ``ValueError``."""
    if type(groups) is not int or groups < 1:
        raise ValueError(f"groups is {groups!r}, expected a positive whole number")
    for count in channels:
        if count % groups:
            raise ValueError(f"{count} channels cannot be divided into {groups} groups")


def convolve(
    x: Value, w: Value, bias: Value | None, stride: Ints, padding: Ints | str, dilation: Ints, groups: int
) -> Value:
    """Convolve x [N, C, ...] or [C, ...] with w [K, C/groups, ...].

    ``padding`` may be 'valid' or 'same', which puts an odd zero at the end.
    """
    n = w.rank - 2
    check_groups(groups, x.shape[-n - 1], w.shape[0])
    if w.shape[1] * groups != x.shape[-n - 1]:
        raise ValueError(f"the weight takes {w.shape[1]} * {groups} channels, the input has {x.shape[-n - 1]}")
    step, spacing = ints(stride, n), ints(dilation, n)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(spacing, w.shape[2:], strict=True)]
        pairs = [(p // 2, p - p // 2) for p in total]
    else:
        pairs = [(p, p) for p in ints(0 if isinstance(padding, str) else padding, n)]
    w = w.cast(x.dtype).permute(0, *range(2, n + 2), 1)
    convolved = _depthwise if n == 3 and 1 < groups == x.shape[-4] and 0 < prod(w.shape[1:]) <= DIRECT else core
    y = convolved(channels_last(x, n), w, step, pairs, spacing, groups, bias)
    return channels_first(y.cast(x.dtype), x.rank == n + 2)


def convolve_transposed(
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> Value:
    """Apply the adjoint of convolution to x [N, C, ...] or [C, ...] with w [C, K/groups, ...]."""
    n, batched = w.rank - 2, x.rank == w.rank
    check_groups(groups, x.shape[-n - 1])
    if w.shape[0] != x.shape[-n - 1]:
        raise ValueError(f"the weight takes {w.shape[0]} channels, the input has {x.shape[-n - 1]}")
    step, pad, extra, spacing = (ints(v, n) for v in (stride, padding, output_padding, dilation))
    x, w = channels_last(x, n), w.cast(x.dtype)
    reach = [d * (k - 1) for d, k in zip(spacing, w.shape[2:], strict=True)]
    size = zip(x.shape[1:-1], step, pad, reach, extra, strict=True)
    out = [(i - 1) * s - 2 * p + r + e + 1 for i, s, p, r, e in size]
    kinds = [phases_of(k, s, d) for k, s, d in zip(w.shape[2:], step, spacing, strict=True)]
    if max(step) > 1 and prod(map(len, kinds)) <= MAX_CONVOLUTIONS:
        y = _by_phases(x, w, step, pad, out, spacing, groups, kinds)
    else:
        y = _mirrored(x, w, step, pad, out, reach, spacing, groups)
    return channels_first(y if bias is None else y + bias, batched)


def _mirrored(
    x: Value, w: Value, step: Sizes, pad: Sizes, out: Sizes, reach: Sizes, spacing: Sizes, groups: int
) -> Value:
    """Compute it as a convolution of the dilated input with the mirrored kernel."""
    n, kernel = len(step), w.shape[2:]
    x = spread(
        x, step, [r - p for r, p in zip(reach, pad, strict=True)], [o + r for o, r in zip(out, reach, strict=True)]
    )
    per_group, channels = w.shape[1], x.shape[-1] // groups
    mirrored = [k - 1 - index(d) for d, k in enumerate(kernel, 1)]
    source = [index(0) // per_group * channels + index(n + 1), index(0) % per_group, *mirrored]
    w = w.graph.elementwise((per_group * groups, *kernel, channels), [w], load(0, w.dtype, source))
    return core(x, w, (1,) * n, [(0, 0)] * n, spacing, groups)


class Phases(NamedTuple):
    """Neighbouring phases of a dim whose results are one convolution of the input: ``width`` phases, whose first taps
    are ``tap`` and those after it, have ``taps`` each. Result q begins ``shift`` inputs after input q."""

    width: int
    tap: int
    taps: int
    shift: int


def phases_of(kernel: int, step: int, spacing: int) -> list[Phases]:
    """Return the phases of one dim in order. Result o = q * step + phase (before padding) is the sum over the taps r
    and inputs i with i * step + r * spacing = o: of every ``step / gcd(step, spacing)``-th tap."""
    common = gcd(step, spacing)
    found: list[Phases] = []
    for phase in range(step):
        tap = next((r for r in range(step // common) if (phase - r * spacing) % step == 0), kernel)
        taps, shift = len(range(tap, kernel, step // common)), (phase - tap * spacing) // step
        last = found[-1] if found else None
        if last and last.taps == taps and (not taps or (tap, shift) == (last.tap + last.width, last.shift)):
            found[-1] = last._replace(width=last.width + 1)
        else:
            found.append(Phases(1, tap, taps, shift))
    return found


def _by_phases(
    x: Value, w: Value, step: Sizes, pad: Sizes, out: Sizes, spacing: Sizes, groups: int, kinds: list[list[Phases]]
) -> Value:  # fmt: skip
    """Compute it phase by phase: results ``step`` apart are a convolution of the input with some of the taps.

    Phases that :class:`Phases` joins share one convolution, whose channels then become pixels. No product has a factor
    that is an inserted zero.
    """
    n = len(step)
    lengths = [max((o - 1 + p) // s + 1, i) for o, p, s, i in zip(out, pad, step, x.shape[1:-1], strict=True)]

    def joined(d: int, phases: list[Phases]) -> Value:
        """Return [N, lengths ..., phases ..., K] for some phases of the first d dims and all phases of the others."""
        if d == n:
            return _phases(x, w, step, spacing, phases, lengths, groups)
        return x.graph.concat([joined(d + 1, [*phases, p]) for p in kinds[d]], 1 + n + d)

    pairs = [d for m in range(1, n + 1) for d in (m, m + n)]
    y = joined(0, []).permute(0, *pairs, 2 * n + 1)
    y = y.reshape(x.shape[0], *(m * s for m, s in zip(lengths, step, strict=True)), groups * w.shape[1])
    for d, (p, o) in enumerate(zip(pad, out, strict=True), 1):
        y = y.slice(d, p, p + o)
    return y


def _phases(
    x: Value, w: Value, step: Sizes, spacing: Sizes, phases: Sequence[Phases], lengths: Sizes, groups: int
) -> Value:  # fmt: skip
    """Return [N, lengths ..., phases ..., K], the results of phases that share a convolution.

    Its channels are [groups, phases ..., K / groups]."""
    n, outputs, counts, taps = len(step), w.shape[1], [p.width for p in phases], [p.taps for p in phases]
    channels, columns = x.shape[-1] // groups, prod(counts) * outputs
    if 0 in taps:
        shape = (x.shape[0], *lengths, *counts, groups * outputs)
        dtype = x.dtype if n == 1 else opmath(x.dtype)  # that of core()
        return x.graph.elementwise((), [], const(0, dtype)).expand(*shape)
    source = [index(0) // columns * channels + index(n + 1), index(0) % outputs]
    phase = index(0) % columns // outputs
    common = [gcd(s, d) for s, d in zip(step, spacing, strict=True)]
    for d in reversed(range(n)):
        between = step[d] // common[d]
        source.insert(2, phases[d].tap + phase % counts[d] + (taps[d] - 1 - index(d + 1)) * between)
        phase = phase // counts[d]
    w = w.graph.elementwise((groups * columns, *taps, channels), [w], load(0, w.dtype, source))
    dilation = [s // c for s, c in zip(spacing, common, strict=True)]
    sides = []
    for d, (p, length) in enumerate(zip(phases, lengths, strict=True)):
        size = x.shape[d + 1]
        after = length - size + p.shift
        if after < 0:  # the last inputs contribute to other phases only
            x = x.slice(d + 1, 0, size + after)
        sides.append(((p.taps - 1) * dilation[d] - p.shift, max(after, 0)))
    y = core(x, w, (1,) * n, sides, dilation, groups)
    if groups > 1:  # the group is the outermost dim of the channels, and becomes part of K
        y = y.reshape(x.shape[0], *lengths, groups, *counts, outputs)
        y = y.permute(*range(n + 1), *range(n + 2, 2 * n + 2), n + 1, 2 * n + 2)
    return y.reshape(x.shape[0], *lengths, *counts, groups * outputs)


CONV1D = (
    S(t(2, 3, 9), t(4, 3, 3), t(4)),
    S(t(2, 4, 9), t(4, 1, 3), t(4), [2], [1], [1], 4),
    S(t(3, 12), t(4, 3, 3), None, [1], [2], [2]),
    S(t(2, 4, 9, layout="transposed"), t(6, 2, 1), t(6), [3], [0], [1], 2),
)
CONV2D = (
    S(t(2, 3, 7, 8), t(4, 3, 3, 3), t(4)),
    S(t(1, 4, 9, 9), t(4, 1, 3, 3), t(4), [2, 2], [1, 1], [1, 1], 4),
    S(t(2, 4, 8, 9), t(6, 2, 3, 2), None, [1, 2], [2, 1], [2, 1], 2),
    S(t(3, 8, 8), t(5, 3, 1, 1), t(5)),
    S(t(2, 3, 8, 6, layout="transposed"), t(4, 3, 5, 5), t(4), [2, 2], [2, 2]),
    S(t(0, 3, 5, 5), t(4, 3, 3, 3), t(4)),
    S(t(1, 16, 6, 6), t(24, 16, 3, 3), t(24), [1, 1], [1, 1]),
    S(t(1, 4, 5, 5), t(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4),
)
CONV3D = (
    S(t(1, 2, 5, 6, 7), t(3, 2, 3, 3, 3), t(3)),
    S(t(2, 2, 4, 6, 6), t(4, 1, 2, 2, 2), t(4), [2, 2, 2], [1, 0, 1], [1, 2, 1], 2),
    S(t(2, 4, 5, 5), t(3, 2, 1, 3, 3), None, [1, 1, 1], [0, 1, 1]),
)


@lowers("aten.conv1d.default", samples=CONV1D)
@lowers("aten.conv2d.default", samples=CONV2D)
@lowers("aten.conv3d.default", samples=CONV3D)
def conv(
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """Convolution (cross-correlation) with zero padding."""
    return convolve(input, weight, bias, stride, padding, dilation, groups)


def named_padding(x: tuple[int, ...], w: tuple[int, ...], n: int) -> list[Sample]:
    """Return samples for 'valid' and 'same' padding."""
    return [
        S(t(*x), t(*w), t(w[0]), [1] * n, "same"),
        S(t(*x), t(*w), None, [1] * n, "same", [2] * n),
        S(t(*x), t(*w), t(w[0]), [2] * n, "valid"),
        S(t(*x[1:]), t(*w)),
    ]


@lowers("aten.conv1d.padding", samples=named_padding((2, 3, 9), (4, 3, 4), 1))
@lowers("aten.conv2d.padding", samples=named_padding((2, 3, 9, 8), (4, 3, 3, 4), 2))
@lowers("aten.conv3d.padding", samples=named_padding((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), 3))
def conv_named_padding(
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Ints = 1,
    padding: str = "valid",
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """Convolution with 'valid' (no) or 'same' padding."""
    return convolve(input, weight, bias, stride, padding, dilation, groups)


TRANSPOSED1D = (
    S(t(2, 3, 5), t(3, 4, 3), t(4)),
    S(t(2, 4, 5), t(4, 2, 3), t(4), [2], [1], [1], 2),
    S(t(3, 6), t(3, 4, 2), None, [3], [0], [0], 1, [2]),
)
TRANSPOSED2D = (
    S(t(2, 3, 5, 4), t(3, 4, 3, 3), t(4)),
    S(t(2, 4, 5, 5), t(4, 3, 3, 3), t(6), [2, 2], [1, 1], [1, 1], 2),
    S(t(3, 4, 6), t(3, 4, 2, 3), None, [3, 1], [0, 1], [1, 0], 1, [1, 2]),
    S(t(1, 3, 5, 5), t(3, 2, 1, 2), t(2), [1, 1], [1, 1]),
    S(t(1, 8, 4, 4), t(8, 8, 2, 2), t(8), [2, 2]),
    S(t(2, 3, 5, 4), t(3, 4, 4, 3), t(4), [2, 3], [1, 2], [1, 0]),
    S(t(1, 3, 4, 5), t(3, 4, 2, 3), None, [3, 2], [2, 0]),
)

TRANSPOSED3D = (
    S(t(2, 4, 2, 3, 2), t(4, 1, 2, 2, 2), t(2), [2, 2, 2], [0, 1, 0], [1, 0, 0], 2),
    S(t(1, 2, 3, 4, 3), t(2, 3, 3, 2, 3), t(3), [2, 2, 1], [1, 0, 1], [1, 0, 0]),
    S(t(2, 3, 3, 4), t(2, 2, 2, 3, 1), None, [1, 2, 1], [0, 1, 0], [0, 1, 0], 1, [2, 1, 1]),
)


@lowers("aten.conv_transpose1d.default", samples=TRANSPOSED1D)
@lowers("aten.conv_transpose2d.input", samples=TRANSPOSED2D)
@lowers("aten.conv_transpose3d.input", samples=TRANSPOSED3D)
def conv_transpose(
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    """Transposed convolution."""
    return convolve_transposed(input, weight, bias, stride, padding, output_padding, groups, dilation)


GENERAL = [
    *(
        S(x, w, b, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        for x, w, b in (s.args[:3] for s in (CONV2D[0], *CONV2D[4:7]))
    ),
    S(t(2, 4, 9), t(4, 2, 3), None, [1], [2], [2], False, [0], 2),
    S(t(2, 4, 5), t(4, 2, 3), t(4), [2], [1], [1], True, [1], 2),
    S(t(2, 4, 5, 5), t(4, 3, 3, 3), t(6), [2, 2], [1, 1], [1, 2], True, [1, 1], 2),
    S(t(1, 8, 4, 4), t(8, 8, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
]


@lowers("aten.convolution.default", samples=GENERAL)
@lowers("aten._convolution.default", samples=[S(*s.args, False, False, False, False) for s in GENERAL])
@lowers("aten._convolution.deprecated", samples=[S(*s.args, False, False, False) for s in GENERAL])
def convolution(
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    benchmark: bool = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
) -> Value:
    """Any convolution; the last three arguments choose among equal algorithms."""
    if transposed:
        return convolve_transposed(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolve(input, weight, bias, stride, padding, dilation, groups)
