"""Batch, layer, group, instance and RMS norm. Statistics are float32; half types are rounded at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..graph.expr import Expr, fn
from ..graph.graph import Value
from ..support import dtypes as dt
from ..support.errors import Reason, Unsupported
from .reductions import moments
from .registry import lowers
from .samples import S, t

rsqrt = fn("rsqrt")
Parameter = Value | None


def per_channel(v: Value, rank: int) -> Value:
    """Reshape [C] to broadcast along dim 1 of a tensor of ``rank`` dims."""
    return v.reshape(-1, *[1] * (rank - 2))


def affine(y: Value, weight: Parameter, bias: Parameter) -> Value:
    """Return y * weight + bias in one pointwise op; either may be None."""
    given = [v for v in (weight, bias) if v is not None]

    def f(x: Expr, *rest: Expr) -> Expr:
        x = x * rest[0] if weight is not None else x
        return x + rest[-1] if bias is not None else x

    return y.graph.pointwise(f, y, *given) if given else y


def inverse_deviation(variance: Value, eps: float) -> Value:
    """Return 1 / sqrt(variance + eps)."""
    return variance.graph.pointwise(lambda v: rsqrt(v + eps), variance)


def normalise(x: Value, axes: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """Return (x - mean) / deviation over ``axes``, the mean, and 1 / deviation (axes stay as size 1)."""
    variance, mean = moments(x, axes)
    scale = inverse_deviation(variance, eps)
    return x.graph.pointwise(lambda a, m, s: (a - m) * s, x, mean, scale), mean, scale


# -- batch norm -------------------------------------------------------------------------------------------------------
def with_statistics(x: Value, weight: Parameter, bias: Parameter, mean: Value, var: Value, eps: float) -> Value:
    """Return x * scale + shift along dim 1; both depend on weights alone and are computed at load time."""
    g = x.graph
    scale = inverse_deviation(var, eps)
    scale = scale * weight if weight is not None else scale
    if bias is None:
        shift = g.pointwise(lambda m, s: -(m * s), mean, scale)
    else:
        shift = g.pointwise(lambda b, m, s: b - m * s, bias, mean, scale)
    return affine(x, per_channel(scale, x.rank), per_channel(shift, x.rank))


def refuse_training(training: bool) -> None:
    """Raise ``Unsupported`` for training mode, which updates statistics."""
    if training:
        detail = "batch statistics in training mode change the running statistics"
        raise Unsupported(Reason("training", detail, "call model.eval() before capture"))


def no_statistics(x: Value) -> list[Value]:
    """Return the two empty tensors that replace saved statistics in inference."""
    return [x.graph.const(np.zeros(0, np.float32)) for _ in range(2)]


C3 = t(3, low=0.5, high=2)
STATS = (t(3), t(3, low=0.1, high=3))
IMAGES = (t(2, 3, 4, 5), t(2, 3, layout="transposed"), t(1, 3, 7), t(0, 3, 2, 2), t(2, 3, 2, 2, 2))
BN = [S(x, C3, t(3), *STATS, False, 0.1, 1e-5, False) for x in IMAGES]
BN_PLAIN = [S(x, None, None, *STATS, False, 0.1, 1e-3, False) for x in IMAGES[:2]]
MIXED = t(2, 3, 4, 5), *(t(3, dtype="float32", low=0.1, high=2) for _ in range(4))


@lowers("aten.batch_norm.default", samples=[*BN, *BN_PLAIN, S(*MIXED, False, 0.1, 1e-5, True)])
def batch_norm(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Value:
    """Batch normalisation by running statistics; training mode is refused."""
    refuse_training(training)
    return with_statistics(input, weight, bias, running_mean, running_var, eps)


@lowers(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    samples=[S(*s.args[:-1]) for s in BN + BN_PLAIN],
)
def native_batch_norm(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Batch normalisation by running statistics, and two empty tensors for statistics."""
    refuse_training(training)
    return with_statistics(input, weight, bias, running_mean, running_var, eps), *no_statistics(input)


NO_TRAINING = [S(*s.args[:5], *s.args[6:-1]) for s in BN + BN_PLAIN]


@lowers("aten._native_batch_norm_legit_no_training.default", samples=NO_TRAINING)
def batch_norm_no_training(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Batch normalisation by running statistics, and two empty tensors for statistics."""
    return with_statistics(input, weight, bias, running_mean, running_var, eps), *no_statistics(input)


@lowers("aten._batch_norm_no_update.default", samples=NO_TRAINING)
def batch_norm_no_update(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Batch normalisation by running statistics, and three empty tensors."""
    out = with_statistics(input, weight, bias, running_mean, running_var, eps)
    return out, *no_statistics(input), input.graph.const(np.zeros(0, np.uint8))


@lowers(
    "aten._native_batch_norm_legit.no_stats",
    samples=[
        S(x, w, b, True, 0.1, 1e-5) for x, w, b in ((IMAGES[0], C3, t(3)), (IMAGES[0], None, None), (t(4, 3), C3, t(3)))
    ],
)
def batch_norm_no_stats(
    input: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    """Normalisation by the batch's own statistics, which are also returned ([C] each)."""
    axes = [d for d in range(input.rank) if d != 1]
    y, mean, scale = normalise(input, axes, eps)
    weight, bias = (per_channel(v, input.rank) if v is not None else None for v in (weight, bias))
    return affine(y, weight, bias), mean.reshape(-1), scale.reshape(-1)


# -- layer and RMS norm -----------------------------------------------------------------------------------------------
LAYERS = (
    (t(3, 5), [5], t(5), t(5)),
    (t(2, 3, 4), [3, 4], t(3, 4), t(3, 4)),
    (t(2, 4, 3, layout="transposed"), [3], None, None),
    (t(4, 130, low=50, high=52), [130], t(130), None),
    (t(0, 4), [4], t(4), t(4)),
    (t(6), [6], None, None),
)


def trailing(x: Value, normalized_shape: Sequence[int]) -> range:
    """Return the axes that ``normalized_shape`` names; raises ``ValueError`` if it does not fit."""
    return range(x.rank - len(normalized_shape), x.rank)


@lowers("aten.native_layer_norm.default", samples=[S(*s, 1e-5) for s in LAYERS])
def native_layer_norm(
    input: Value, normalized_shape: list[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """Normalisation over the trailing dims; also the mean and 1 / deviation, with those dims as 1."""
    y, mean, scale = normalise(input, trailing(input, normalized_shape), eps)
    return affine(y, weight, bias), mean, scale


@lowers("aten.layer_norm.default", samples=[*(S(*s) for s in LAYERS), S(t(3, 5), [5], t(5), t(5), 1e-2, False)])
def layer_norm(
    input: Value,
    normalized_shape: list[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-05,
) -> Value:
    """Normalisation over the trailing dims."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


RMS = [S(*s[:3]) for s in LAYERS] + [S(*s[:3], 1e-3) for s in LAYERS[:3]]


@lowers("aten._fused_rms_norm.default", samples=[S(*s[:3], e) for s in LAYERS[:5] for e in (1e-6, None)])
def fused_rms_norm(
    input: Value, normalized_shape: list[int], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """x / sqrt(mean(x * x) + eps) over the trailing dims, and the factor; eps defaults to the arithmetic dtype's."""
    floor = float(np.finfo(dt.numpy_dtype(dt.opmath(input.dtype))).eps) if eps is None else eps
    scale = inverse_deviation((input * input).mean(trailing(input, normalized_shape)), floor)
    return affine(input * scale, weight, None), scale


@lowers("aten.rms_norm.default", samples=RMS)
def rms_norm(input: Value, normalized_shape: list[int], weight: Value | None = None, eps: float | None = None) -> Value:
    """x / sqrt(mean(x * x) + eps) over the trailing dims."""
    return fused_rms_norm(input, normalized_shape, weight, eps)[0]


# -- group and instance norm ------------------------------------------------------------------------------------------
GROUPS = (
    (t(2, 6, 4, 5), 3, t(6), t(6)),
    (t(2, 6), 2, t(6), t(6)),
    (t(3, 4, 7), 4, None, None),
    (t(1, 4, 2, 3, 2), 1, t(4), None),
    (t(0, 4, 3), 2, t(4), t(4)),
)


def grouped(x: Value, groups: int, weight: Parameter, bias: Parameter, eps: float) -> tuple[Value, Value, Value]:
    """Normalisation of [N, C, ...] over each group of channels; mean and 1 / deviation are [N, groups]."""
    n, c, *spatial = x.shape
    split = x.reshape(n, groups, c // groups, *spatial)
    y, mean, scale = normalise(split, range(2, split.rank), eps)
    shape = 1, groups, c // groups, *(1 for _ in spatial)  # of the groups, so that one kernel does all
    weight, bias = (v.reshape(*shape) if v is not None else None for v in (weight, bias))
    return affine(y, weight, bias).reshape(*x.shape), mean.reshape(n, groups), scale.reshape(n, groups)


@lowers(
    "aten.group_norm.default",
    samples=[*(S(*s) for s in GROUPS), S(*GROUPS[0], 1e-2, False), S(t(3, 4, 7, layout="transposed"), 4)],
)
def group_norm(
    input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-05
) -> Value:
    """Normalisation of [N, C, ...] over each group of channels."""
    return grouped(input, num_groups, weight, bias, eps)[0]


@lowers(
    "aten.native_group_norm.default",
    samples=[S(x, w, b, x.shape[0], x.shape[1], math.prod(x.shape[2:]), g, 1e-5) for x, g, w, b in GROUPS],
)
def native_group_norm(
    input: Value, weight: Value | None, bias: Value | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Value, Value, Value]:
    """Normalisation of [N, C, HxW] over each group of channels; mean and 1 / deviation are [N, group]."""
    return grouped(input, group, weight, bias, eps)


@lowers(
    "aten.instance_norm.default",
    samples=(
        S(t(2, 3, 4, 5), C3, t(3), None, None, True, 0.1, 1e-5, False),
        S(t(2, 3, 7), None, None, None, None, True, 0.1, 1e-3, False),
        S(t(2, 3, 4, layout="transposed"), C3, t(3), *STATS, False, 0.1, 1e-5, False),
        S(t(2, 3, 4), None, None, *STATS, False, 0.1, 1e-5, False),
    ),
)
def instance_norm(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Value:
    """Normalisation per sample and channel, by its own statistics or, in inference, by the running ones."""
    if not use_input_stats:
        given = [v for v in (weight, bias, running_mean, running_var) if v is not None]  # absent tensors leave no gap
        weight, bias = ([*given[:-2], None, None][:2]) if running_var is None else (weight, bias)
        return with_statistics(input, weight, bias, given[-2], given[-1], eps)
    refuse_training(running_mean is not None)
    return grouped(input, input.shape[1], weight, bias, eps)[0]
