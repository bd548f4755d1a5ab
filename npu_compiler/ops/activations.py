"""Activation functions."""

from __future__ import annotations

import math
from typing import Any

from ..graph.expr import Expr, const, fn, maximum, minimum, where
from ..graph.graph import Value
from ..support.errors import Reason, Unsupported
from .common import axes_of, names, unary
from .registry import ALL, Scalar, lowers, pointwise
from .samples import UNARY, S, t

sigmoid, tanh, erf, absolute = fn("sigmoid"), fn("tanh"), fn("erf"), fn("abs")
exp, expm1, log1p = fn("exp"), fn("expm1"), fn("log1p")

WIDE = (
    S(t(3, 5, low=-8, high=8)),
    S(t(2, 3, 4, low=-30, high=30, layout="transposed")),
    S(t(9, values=(-math.inf, -100, -1, -0.0, 0, 1, 20.5, 100, math.inf))),
)
NAN = (S(t(4, values=(math.nan, -1, 0, 3))),)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def clip(x: Expr, low: Any, high: Any) -> Expr:
    """Clamp to [low, high]; NaN stays."""
    return minimum(maximum(x, low), high)


def _elu(x: Expr, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    return where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


unary(names("relu"), lambda x: maximum(x, 0), UNARY + NAN, ALL)
for _name, _f in {
    "relu6": lambda x: clip(x, 0, 6),
    "silu": lambda x: x * sigmoid(x),
    "hardsigmoid": lambda x: clip(x + 3, 0, 6) * (1 / 6),
    "hardswish": lambda x: x * clip(x + 3, 0, 6) * (1 / 6),
    "selu": lambda x: _elu(x, SELU_ALPHA, SELU_SCALE),
    "mish": lambda x: x * tanh(log1p(exp(x))),
    "log_sigmoid": lambda x: minimum(x, 0) - log1p(exp(-absolute(x))),
}.items():
    unary(names(_name), _f, UNARY + WIDE + NAN)


@pointwise(
    "aten.gelu.default",
    samples=(*UNARY, *WIDE[:2], *(S(*s.args, approximate="tanh") for s in UNARY), S(t(3, 4), approximate="none")),
)
def gelu(self: Expr, *, approximate: str = "none") -> Expr:
    """Gaussian error linear unit, exact or by its tanh approximation."""
    x = self
    if approximate == "none":
        return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))
    if approximate != "tanh":
        raise ValueError(f"approximate={approximate!r}")
    return x * 0.5 * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@pointwise(
    "aten.hardtanh.default", samples=(*UNARY, S(t(3, 5), -0.5, 0.25), S(t(4, 4, low=-9, high=9), 0.0, 6.0), *NAN)
)
def hardtanh(self: Expr, min_val: Scalar = -1, max_val: Scalar = 1) -> Expr:
    """x clamped to [min_val, max_val]."""
    return clip(self, min_val, max_val)


@pointwise("aten.leaky_relu.default", samples=(*UNARY, S(t(3, 5), 0.2), S(t(2, 2), 0), *NAN))
def leaky_relu(self: Expr, negative_slope: Scalar = 0.01) -> Expr:
    """x, or negative_slope * x below 0."""
    return where(self > 0, self, self * negative_slope)


@pointwise("aten.elu.default", samples=(*UNARY, S(t(3, 5), 0.5), S(t(3, 5), 1.5, 1.25, 0.5), *NAN))
def elu(self: Expr, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Expr:
    """scale * x above 0, scale * alpha * (exp(input_scale * x) - 1) below."""
    return _elu(self, alpha, scale, input_scale)


@pointwise("aten.celu.default", samples=(*UNARY, S(t(3, 5), 0.5), S(t(3, 5), 2.0)))
def celu(self: Expr, alpha: Scalar = 1.0) -> Expr:
    """x above 0, alpha * (exp(x / alpha) - 1) below."""
    return _elu(self, alpha, 1.0, 1.0 / alpha)


@pointwise("aten.softplus.default", samples=(*UNARY, *WIDE, S(t(3, 5), 2.0), S(t(3, 5, low=-9, high=9), 0.5, 3.0)))
def softplus(self: Expr, beta: Scalar = 1, threshold: Scalar = 20) -> Expr:
    """log(1 + exp(beta * x)) / beta; x where beta * x exceeds threshold."""
    scaled = self * beta
    return where(scaled > threshold, self, log1p(exp(scaled)) / beta)


@pointwise(
    "aten.threshold.default",
    samples=(S(t(3, 5), 0.5, -1.0), S(t(2, 3, layout="transposed"), 0, 0), S(t(0), 1.0, 2.0), S(t(), 0.1, 20.0)),
)
def threshold(self: Expr, threshold: Scalar, value: Scalar) -> Expr:
    """x where it exceeds threshold, else value."""
    return where(self <= threshold, const(value, self.dtype), self)


@pointwise("aten.hardshrink.default", samples=(*UNARY, S(t(3, 5), 1.0), *NAN))
def hardshrink(self: Expr, lambd: Scalar = 0.5) -> Expr:
    """x where its magnitude exceeds lambd, else 0."""
    return where(absolute(self) <= lambd, const(0, self.dtype), self)


@pointwise("aten.softshrink.default", samples=(*UNARY, S(t(3, 5), 1.0), *NAN))
def softshrink(self: Expr, lambd: Scalar = 0.5) -> Expr:
    """x moved towards 0 by lambd."""
    return where(self > lambd, self - lambd, where(self < -lambd, self + lambd, self * 0))


@pointwise("aten.rrelu.default", samples=(*UNARY, S(t(3, 5), 0.1, 0.3), S(t(3, 5), 0.1, 0.3, False)))
def rrelu(self: Expr, lower: Scalar = 0.125, upper: Scalar = 1 / 3, training: bool = False) -> Expr:
    """Leaky ReLU with the mean slope; the random slopes of training are refused."""
    if training:
        raise Unsupported(Reason("training", "rrelu in training mode is random", "call model.eval() before capture"))
    return where(self > 0, self, self * ((lower + upper) / 2))


@pointwise("aten._prelu_kernel.default", samples=(S(t(2, 3, 4), t(1, 3, 1)), S(t(2, 3), t(1, 3)), S(t(4), t(1))))
def prelu_kernel(self: Expr, weight: Expr) -> Expr:
    """x, or weight * x below 0; weight broadcasts."""
    return where(self > 0, self, self * weight)


@lowers(
    "aten.prelu.default",
    samples=(
        S(t(2, 3, 4, 5), t(3)),
        S(t(2, 3), t(1)),
        S(t(4), t(1)),
        S(t(2, 3, 4, layout="transposed"), t(3)),
        S(t(2, 3), t()),
    ),
)
def prelu(self: Value, weight: Value) -> Value:
    """Leaky ReLU whose slope is a tensor: one number, or one per channel (dim 1)."""
    spatial = [1] * (self.rank - 2 if weight.numel > 1 else 0)
    return self.graph.pointwise(prelu_kernel, self, weight.reshape(-1, *spatial) if weight.rank else weight)


@lowers(
    "aten.glu.default",
    samples=(S(t(3, 6)), S(t(4, 3), 0), S(t(2, 4, 3, layout="transposed"), 1), S(t(2, 4, 3), -2), S(t(0, 4))),
)
def glu(self: Value, dim: int = -1) -> Value:
    """First half times the sigmoid of the second."""
    (axis,) = axes_of(dim, self.rank)
    half = self.shape[axis] // 2
    a, b = self.slice(axis, 0, half), self.slice(axis, half, 2 * half)
    return self.graph.pointwise(lambda a, b: a * sigmoid(b), a, b)
