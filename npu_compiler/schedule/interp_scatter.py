"""The kernels of scattered updates in numpy: see ``targets/simt/kernels/scatter_updates.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.expr_interp import evaluate
from .kernel import ScatterResult, ScatterUpdates

Array = np.ndarray[Any, Any]
INFINITY = 0x7F800000  # the bits of a float32


def scatter_updates(k: ScatterUpdates, inputs: Sequence[Array], out: Array) -> None:
    """Add the updates to ``out``, or raise the numbers in it."""
    (stage,), domain = k.body.stages, k.body.domain
    update = np.broadcast_to(evaluate(stage.expr, domain, inputs), domain)
    place = tuple(np.broadcast_to(evaluate(i, domain, inputs), domain) for i in stage.index)
    if k.computes == "integers":
        np.add.at(out, place, update)
        return
    if k.computes == "latest":
        np.maximum.at(out, place, update)
        return
    x = np.ascontiguousarray(update, np.float32)
    if k.computes == "magnitudes":
        np.maximum.at(out, place, x.view(np.int32) & 0x7FFFFFFF)
        return
    magnitude = inputs[-2][place]
    finite = magnitude < INFINITY
    fixed = np.rint(np.ldexp(np.where(finite, x, 0).astype(np.float64), _shift(k.carry_bits, magnitude)))
    infinities = np.where(np.isinf(x), np.where(x < 0, 1 << 32, 1), 0)
    np.add.at(out, place, np.where(finite, fixed.astype(np.int64), infinities))


def scatter_result(k: ScatterResult, inputs: Sequence[Array], out: Array) -> None:
    """Store the base plus the sums in ``out``."""
    magnitude, total, base = inputs
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.ldexp(total.astype(np.float32), -_shift(k.carry_bits, magnitude))
        positive, negative = total & 0xFFFFFFFF != 0, total >> 32 != 0
        infinite = np.where(positive, np.float32(np.inf), 0) + np.where(negative, np.float32(-np.inf), 0)
        found = np.where(magnitude < INFINITY, found, np.where(magnitude == INFINITY, infinite, np.float32(np.nan)))
        out[...] = np.where(magnitude == 0, base, base + found.astype(np.float32))


def _shift(carry_bits: int, magnitude: Array) -> Array:
    """Return the binary logarithm of the number of units in 1."""
    return 61 - carry_bits - np.maximum(magnitude >> 23, 1) + 127
