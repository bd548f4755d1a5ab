"""The values of a random core graph, and its pointwise nodes: what :mod:`.random_graphs` builds on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_compiler.graph import expr
from npu_compiler.graph.expr import const, fn, index, load, maximum, minimum, where
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.support import dtypes

HALF = ("float16", "bfloat16")
FLOATS = ("float32", "float32", "float32", *HALF, "float64")
INTS = ("int64", "int32", "int16", "int8", "uint8")
ALL = (*FLOATS, *FLOATS, *INTS, "bool")
ERROR = {"float64": 1e-9, "float32": 1e-4, "float16": 6e-3, "bfloat16": 5e-2}
MOST = 600  # elements of a value


class PointwiseMaker:
    """Adds random values to ``graph``; ``error`` is the absolute tolerance of each value, 0 for exact ones."""

    def __init__(self, rng: random.Random, graph: Graph, prefix: str = ""):
        self.rng, self.graph, self.prefix = rng, graph, prefix
        self.data = np.random.default_rng(rng.randint(0, 2**31))
        self.error: dict[Value, float] = {}
        self.pool: list[Value] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}

    # -- choices ------------------------------------------------------------------------------------------------------
    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randint(0, len(options) - 1)]

    def chance(self, p: float) -> bool:
        return self.rng.randint(0, 99) < 100 * p

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.pick((0, 1, 2, 2, 3, 3, 4, 4, 5)) if rank is None else rank
        shape = [self.pick((1, 2, 3, 4, 5, 8, 9)) for _ in range(rank)]
        if rank and self.chance(0.03):
            shape[self.rng.randint(0, rank - 1)] = 0
        while math.prod(shape) > MOST:
            shape[shape.index(max(shape))] //= 2
        return tuple(shape)

    def value(self, *kinds: str, exact: bool = False, rank: int = 0, full: bool = False) -> Value:
        """A value of the pool of one of these dtype kinds, or a new leaf."""
        fits = [
            v for v in self.pool
            if (not kinds or dtypes.DTYPES[v.dtype].kind in kinds) and v.rank >= rank and not (exact and self.error[v])
            and not (full and not v.numel)
        ]  # fmt: skip
        if fits and self.chance(0.9):
            return self.pick(fits[-5:] if self.chance(0.7) else fits)
        options = [d for d in ALL if not kinds or dtypes.DTYPES[d].kind in kinds]
        shape = self.shape(self.rng.randint(max(rank, 1), 4))
        return self.keep(self.leaf(tuple(max(n, 1) for n in shape) if full else shape, self.pick(options)))

    def leaf(
        self, shape: tuple[int, ...], dtype: str, kinds: Sequence[str] = ("input", "input", "weight", "state", "const")
    ) -> Value:
        kind, count = self.pick(kinds), len(self.inputs) + len(self.weights)
        name, data = f"{self.prefix}{kind}{count}", self.array(shape, dtype)
        if kind == "const":
            return self.note(self.graph.const(data))
        (self.inputs if kind == "input" else self.weights)[name] = data
        return self.note(getattr(self.graph, kind)(name, shape, dtype))

    def array(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype == "bool":
            return np.asarray(self.data.random(shape) < 0.5)
        if dtypes.is_float(dtype):
            return np.asarray(self.data.uniform(-1.5, 1.5, shape)).astype(dtypes.numpy_dtype(dtype))
        return self.data.integers(0 if dtype == "uint8" else -4, 5, shape).astype(dtypes.numpy_dtype(dtype))

    def keep(self, v: Value) -> Value:
        self.pool.append(v)
        assert v in self.error, v
        return v

    def note(self, v: Value, *sources: Value, rounds: bool = False) -> Value:
        """Records the tolerance of ``v``: that of its sources, and of its own roundings."""
        error = max((self.error[s] for s in sources), default=0.0)
        if rounds:
            error = max([error, *(ERROR[x.dtype] for x in (v, *sources) if x.dtype in ERROR)])
        self.error[v] = error * (dtypes.is_float(v.dtype) or v.dtype == "bool")
        return v

    def view(self, v: Value, f: Value) -> Value:
        return self.note(f, v)

    def like(self, v: Value, dtype: str) -> Value:
        """Another value of ``dtype`` that broadcasts against ``v``."""
        shape = tuple(n if self.chance(0.7) else 1 for n in v.shape)[
            self.rng.randint(0, v.rank) if self.chance(0.2) else 0 :
        ]
        fits = [u for u in self.pool if u.dtype == dtype and u.rank <= v.rank and _broadcasts(u.shape, v.shape)]
        if fits and self.chance(0.7):
            return self.pick(fits)
        return self.keep(self.leaf(shape, dtype))

    # -- pointwise ----------------------------------------------------------------------------------------------------
    def unary(self) -> Value:
        v = self.value("float")
        f = self.pick(UNARY)
        return self.note(self.graph.pointwise(f, v).cast(v.dtype if self.chance(0.8) else "float32"), v, rounds=True)

    def exact_unary(self) -> Value:
        v = self.value("float", "int", "uint")
        f = self.pick(
            (lambda x: maximum(x, 0), lambda x: minimum(maximum(x, -1), 1), fn("abs"), lambda x: minimum(x, 0))
        )
        return self.note(self.graph.pointwise(f, v).cast(v.dtype), v)

    def binary(self) -> Value:
        v = self.value("float")
        w = self.like(v, v.dtype if self.chance(0.8) else self.pick(FLOATS))
        f = self.pick(
            (
                lambda a, b: (a + b) * 0.5,
                lambda a, b: a * b * 0.5,
                lambda a, b: a - b * 0.25,
                lambda a, b: a / (fn("abs")(b) + 1.0),
            )
        )
        out = self.graph.pointwise(f, v, w)
        out = (
            self.graph.pointwise(lambda x: minimum(maximum(x, -3.0), 3.0), out)
            if self.chance(0.6)
            else self.bounded(out)
        )
        return self.note(out.cast(v.dtype) if self.chance(0.6) else out, v, w, rounds=True)

    def bounded(self, v: Value) -> Value:
        return self.graph.pointwise(fn("tanh"), v)

    def integers(self) -> Value:
        v = self.value("int", "uint")
        w = self.like(v, v.dtype if self.chance(0.7) else self.pick(INTS))
        f = self.pick(
            (
                lambda a, b: a + b,
                lambda a, b: a * b,
                lambda a, b: maximum(a, b),
                lambda a, b: a - minimum(a, b),
                lambda a, b: a // 2 + b,
            )
        )
        low = 0 if "uint8" in (v.dtype, w.dtype) else -4
        return self.note(self.graph.pointwise(lambda a, b: minimum(maximum(f(a, b), low), 4), v, w))

    def condition(self) -> Value:
        v = self.value("float", "int", exact=True)
        w = self.like(v, v.dtype)
        op = fn(self.pick(("lt", "ge", "eq", "ne")))
        return (
            self.note(self.graph.pointwise(op, v, w))
            if not self.error[w]
            else self.note(self.graph.pointwise(lambda a: op(a, 0), v))
        )

    def select(self) -> Value:
        v = self.value("float", "int")
        w, c = self.like(v, v.dtype), self.like(v, "bool")
        if self.chance(0.3) and v.rank:
            d = self.rng.randint(0, v.rank - 1)
            out = self.graph.elementwise(
                v.shape,
                [v],
                where(
                    index(d) < self.rng.randint(0, 4), load(0, v.dtype, expr.identity_index(v.shape)), const(1, v.dtype)
                ),
            )
            return self.note(out, v)
        return self.note(self.graph.pointwise(where, c, v, w, promote=False), v, w, c)

    def cast(self) -> Value:
        v = self.value(exact=self.chance(0.5))
        options = [
            d
            for d in ALL
            if dtypes.is_float(d) or (not self.error[v] and (d != "uint8" or v.dtype in ("bool", "uint8")))
        ]
        return self.note(v.cast(self.pick(options)), v, rounds=dtypes.is_float(v.dtype))

    def shifted(self) -> Value:
        """Padding, reversal, repetition: one load at an affine position."""
        v = self.value(rank=1)
        d = self.rng.randint(0, v.rank - 1)
        idx, shape = [index(i) for i in range(v.rank)], list(v.shape)
        kind = self.pick(("pad", "flip", "repeat", "diagonal"))
        if kind == "flip":
            idx[d] = (shape[d] - 1) - index(d)
        elif kind == "repeat":
            shape[d] *= 2
            idx[d] = index(d) // 2
        elif kind == "diagonal" and v.rank > 1:
            a, b = self.rng.sample(range(v.rank), 2)
            shape[a] = min(shape[a], shape[b])
            shape[b] = 1
            idx[b] = index(a)
        elif kind == "pad":
            before, after = self.rng.randint(0, 2), self.rng.randint(0, 2)
            at = index(d) - before
            inside = (at >= 0) & (at < shape[d])
            idx[d], shape[d] = at, shape[d] + before + after
            return self.note(
                self.graph.elementwise(shape, [v], where(inside, load(0, v.dtype, idx), const(0, v.dtype))), v
            )
        return self.note(self.graph.elementwise(shape, [v], load(0, v.dtype, idx)), v)

    def gather(self) -> Value:
        v = self.value(rank=1, full=True)
        i = self.value("int", exact=True).cast("int64")
        self.note(i)
        if i.rank + v.rank > 6:
            return self.note(i)
        d, n = self.rng.randint(0, v.rank - 1), v.shape
        at = load(1, "int64", [index(d + j) if m != 1 else const(0, "int64") for j, m in enumerate(i.shape)]) % n[d]
        idx = [index(j) for j in range(d)] + [at] + [index(j + i.rank - 1) for j in range(d + 1, v.rank)]
        shape = (*n[:d], *i.shape, *n[d + 1 :])
        return self.note(self.graph.elementwise(shape, [v, i], load(0, v.dtype, idx)), v)


UNARY = (
    fn("tanh"), fn("sigmoid"), fn("erf"), lambda x: fn("exp")(minimum(x, 1.0)) * 0.5, lambda x: x * fn("sigmoid")(x),
    lambda x: fn("sqrt")(fn("abs")(x) + 0.1), lambda x: x * 0.5 + 0.25, fn("sin"), lambda x: fn("rsqrt")(x * x + 0.5),
)  # fmt: skip


def _broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(small[::-1], large[::-1], strict=False))
