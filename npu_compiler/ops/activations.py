"""Activation functions."""

from __future__ import annotations

from ..expr import Expr, fn, maximum
from ..graph import Value
from .registry import pointwise
from .samples import UNARY

sigmoid = fn("sigmoid")


@pointwise("aten.relu.default", samples=UNARY, dtypes=("float32", "float16", "bfloat16", "int64"))
def relu(self: Value) -> Expr:
    return maximum(self, 0)


@pointwise("aten.silu.default", samples=UNARY)
def silu(self: Value) -> Expr:
    return self * sigmoid(self)
