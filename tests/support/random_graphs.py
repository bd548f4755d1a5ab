"""Random core graphs whose results two correct evaluations agree on.

Floating values stay of order one, integers between -4 and 4. A value is *exact* when no rounding went into it; only
exact values are compared, sorted or made integers, because there an error in the last bit would show as another result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npu_compiler.graph.expr import fn, index, load, maximum, minimum
from npu_compiler.graph.graph import Value
from npu_compiler.support import dtypes

from .random_pointwise import ALL, HALF, MOST, PointwiseMaker


class Maker(PointwiseMaker):
    """Adds one random program to ``graph``."""

    def build(self, steps: int) -> Maker:
        for _ in range(self.rng.randint(1, 3)):
            self.keep(self.leaf(self.shape(), self.pick(ALL)))
        for _ in range(steps):
            v = getattr(self, self.pick(STEPS))()
            if v is not None and v.numel <= MOST:
                self.keep(v)
        for i in range(self.rng.randint(1, 4)):
            v = self.pick(self.pool[-6:])
            self.graph.outputs.append((f"{self.prefix}o{i}", v))
        for key, state in self.states():
            self.graph.updates.append((key, self.update(state)))
        return self

    def states(self) -> list[tuple[str, Value]]:
        return [(v.node.attrs["key"], v) for v in dict.fromkeys(self.pool) if v.op == "state"]

    def update(self, state: Value) -> Value:
        """What a state becomes: another value of its type, a permutation of itself, or itself with something
        written."""
        same = [v for v in self.pool if v.shape == state.shape and v.dtype == state.dtype]
        if self.chance(0.3):
            return self.pick(same)
        if self.chance(0.3) and state.rank:
            perm = self.rng.sample(range(state.rank), state.rank)
            return self.note(state.permute(*perm).reshape(*state.shape), state)
        return self.write(state) or state

    # -- rows ---------------------------------------------------------------------------------------------------------
    def axes(self, v: Value) -> list[int]:
        if self.chance(0.5):
            return [v.rank - 1]
        return sorted(self.rng.sample(range(v.rank), self.rng.randint(0, v.rank)))

    def reduce(self) -> Value:
        v = self.value("float", rank=1)
        axes = self.axes(v)
        n = max(1, math.prod(v.shape[a] for a in axes))
        if self.chance(0.5) or not v.numel:
            out = self.note(v.sum(axes) * (1.0 / n), v, rounds=True)
        else:
            out = self.note(self.graph.reduce(self.pick(("max", "min")), v, axes), v)
        return self.dropped(out, axes)

    def exact_reduce(self) -> Value | None:
        v = self.value("float", "int", "bool", exact=True, rank=1, full=True)
        kinds = ["argmax", "argmin", "max", "min"] + (["sum"] if v.dtype in ("bool", "int64") else [])
        axes = self.axes(v)
        out = self.graph.reduce(self.pick(kinds), v, axes)
        if dtypes.is_int(out.dtype):
            out = self.graph.pointwise(lambda x: minimum(x, 4), out)
        return self.dropped(self.note(out), axes)

    def dropped(self, out: Value, axes: list[int]) -> Value:
        if self.chance(0.4):
            return self.note(out.reshape(*(n for d, n in enumerate(out.shape) if d not in axes)), out)
        return out

    def norm(self) -> Value:
        v = self.value("float", rank=1, full=True)
        axes = self.axes(v)
        style, g = self.pick(("softmax", "layer", "rms", "log_softmax")), self.graph
        x = v.cast(dtypes.opmath(v.dtype))
        if style == "rms":
            y = x * g.pointwise(lambda s: fn("rsqrt")(s + 0.1), (x * x).mean(axes))
        elif style == "layer":
            c = x - x.mean(axes)
            y = c * g.pointwise(lambda s: fn("rsqrt")(s + 0.1), (c * c).mean(axes))
        else:
            e = g.pointwise(fn("exp"), x - x.amax(axes))
            y = e / e.sum(axes) if style == "softmax" else x - x.amax(axes) - g.pointwise(fn("log"), e.sum(axes))
        self.note(y, v, rounds=True)
        if self.chance(0.5):
            w = self.leaf(v.shape[-1:], v.dtype, ("weight",))
            y = self.note(y * w, y, w, rounds=True)
        return self.note(self.bounded(y).cast(v.dtype), y, rounds=True)

    # -- views --------------------------------------------------------------------------------------------------------
    def reshape(self) -> Value:
        v = self.value()
        n, shape = v.numel, []
        while n > 1 and len(shape) < 5:
            f = self.pick([f for f in range(1, n + 1) if n % f == 0])
            shape.append(f)
            n //= f
        if v.numel == 0:
            shape, n = [*v.shape, self.rng.randint(1, 3)], 1
        return self.note(v.reshape(*shape, *([n] if n > 1 else [])), v)

    def permute(self) -> Value:
        v = self.value(rank=1)
        return self.note(v.permute(*self.rng.sample(range(v.rank), v.rank)), v)

    def slice(self) -> Value:
        v = self.value(rank=1)
        d = self.rng.randint(0, v.rank - 1)
        start = self.rng.randint(0, max(0, v.shape[d] - 1))
        return self.note(
            v.slice(
                d,
                start,
                self.rng.randint(start, v.shape[d]) if self.chance(0.1) else v.shape[d],
                self.rng.randint(1, 2),
            ),
            v,
        )

    def expand(self) -> Value:
        v = self.value()
        shape = [self.pick((1, 2, 3)) if n == 1 else n for n in v.shape]
        return self.note(v.expand(*([2] if self.chance(0.3) else []), *shape), v)

    def concat(self) -> Value:
        v = self.value(rank=1)
        d = self.rng.randint(0, v.rank - 1)

        def fits(u: Value) -> bool:
            return (
                u.dtype == v.dtype
                and u.rank == v.rank
                and all(a == b for i, (a, b) in enumerate(zip(u.shape, v.shape, strict=True)) if i != d)
            )

        parts = [self.pick([u for u in self.pool if fits(u)]) for _ in range(self.rng.randint(1, 3))]
        parts.insert(self.rng.randint(0, len(parts)), v)
        return self.note(self.graph.concat(parts, d), *parts)

    # -- anchors ------------------------------------------------------------------------------------------------------
    def matmul(self) -> Value:
        v = self.value("float", "int", rank=2)
        k, n = v.shape[-1], self.pick((1, 3, 8, 17, 33))
        if v.dtype == "int64" and self.error[v] == 0:
            w = self.leaf((k, n), "int64")
            return self.note(self.graph.pointwise(lambda x: minimum(maximum(x, -4), 4), v.matmul(w)))
        if not dtypes.is_float(v.dtype):
            v = self.note(v.cast("float32"), v)
        style = self.pick(("static", "static", "transposed", "batched", "self"))
        if style == "self":
            w = self.note(v.transpose(-1, -2), v)
        elif style == "batched":
            batch = tuple(b if self.chance(0.5) else 1 for b in v.shape[:-2])[self.rng.randint(0, v.rank - 2) :]
            w = self.leaf((*((2,) * (not v.rank - 2) or batch), k, n), v.dtype)
        elif style == "transposed":
            w = self.leaf((n, k), v.dtype)
            w = self.note(w.transpose(0, 1), w)
        else:
            w = self.leaf((k, n), v.dtype)
        return self.finished(v.matmul(w) * (1.0 / max(k, 1)), v, w)

    def finished(self, out: Value, *sources: Value) -> Value:
        """An anchor's result behind a random epilogue."""
        self.note(out, *sources, rounds=True)
        dtype = sources[0].dtype
        if self.chance(0.3):
            out = self.note(out.cast(dtype), out, rounds=True)
        if self.chance(0.6) and out.rank:
            w = self.leaf(out.shape[-1:], self.pick(("float32", dtype)), ("weight", "weight", "input"))
            out = self.note(
                self.graph.pointwise(self.pick((lambda a, b: a + b, lambda a, b: a * b)), out, w), out, w, rounds=True
            )
        if self.chance(0.4):
            self.keep(out)  # a second user
        if self.chance(0.4):
            w = self.like(out, out.dtype)
            out = self.note((out + w) * 0.5, out, w, rounds=True)
        out = self.graph.pointwise(self.pick((lambda x: minimum(maximum(x, -2.0), 2.0), fn("tanh"))), out)
        self.note(out, *sources, rounds=True)
        return self.note(out.cast(dtype), out, rounds=True)

    def conv(self) -> Value | None:
        v = self.value("float", rank=3)
        c = self.pick((1, 2, 4, 6))
        v = v.cast("float32") if v.dtype == "float64" and self.chance(0.7) else v
        self.note(v, self.pool[self.pool.index(v)] if v in self.pool else v.node.inputs[0])
        if v.rank > 4 or not v.numel:
            return None
        if v.rank == 3:
            v = self.view(v, v.reshape(1, *v.shape))
        if self.chance(0.5):
            v = self.view(v, v.permute(0, 2, 3, 1))
        c = v.shape[3]
        groups = self.pick([g for g in (1, 1, 2, c) if c % g == 0])
        r, s = self.rng.randint(1, min(3, v.shape[1] + 1)), self.rng.randint(1, min(3, v.shape[2] + 1))
        k = groups if groups == c and self.chance(0.7) else groups * self.pick((1, 3, 8))
        w = self.leaf((k, r, s, c // groups), v.dtype, ("weight", "weight", "weight", "input"))
        dilation = (self.rng.randint(1, 2), 1)
        pad = [self.rng.randint(0, 2) for _ in range(4)]
        pad[2] += max(0, dilation[0] * (r - 1) + 1 - v.shape[1] - pad[0] - pad[2])
        pad[3] += max(0, s - v.shape[2] - pad[1] - pad[3])
        y = self.graph.conv2d(v, w, (self.rng.randint(1, 2), self.rng.randint(1, 2)), pad, dilation, groups)
        y = self.note(y * (1.0 / (r * s * c // groups)), v, w, rounds=True)
        return self.finished(y, v, w)

    def attend(self) -> Value:
        b, h, sq, sk, d = (self.pick(o) for o in ((1, 2), (1, 2, 4), (1, 3, 5), (1, 4, 7), (1, 4, 8)))
        dtype, g = self.pick(("float32", "float32", *HALF, "float64")), self.pick((1, h))
        q, k, v = (self.leaf(s, dtype, ("input",)) for s in ((b, sq, h, d), (b, sk, g, d), (b, g, sk, 5)))
        mask = (
            self.leaf((self.pick((1, b)), 1, self.pick((1, sq)), sk), self.pick(("bool", "float32", dtype)), ("input",))
            if self.chance(0.5)
            else None
        )
        out = self.graph.attention(
            q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v, mask, 0.5, mask is None and self.chance(0.5)
        )
        self.note(out, q, k, v, rounds=True)
        return self.note(out.permute(0, 2, 1, 3).reshape(b, sq, -1), out) if self.chance(0.7) else out

    # -- the rest -----------------------------------------------------------------------------------------------------
    def scatter(self) -> Value | None:
        return self.write(self.value(rank=1, full=True))

    def write(self, base: Value) -> Value | None:
        """``base`` with a window, or elements at data-dependent rows, overwritten or added to."""
        if not base.rank or not base.numel:
            return None
        d = self.rng.randint(0, base.rank - 1)
        n = self.rng.randint(1, base.shape[d])
        shape = (*base.shape[:d], n, *base.shape[d + 1 :])
        fits = [v for v in self.pool if v.shape == shape and v.dtype == base.dtype]
        src = self.pick(fits) if fits and self.chance(0.6) else self.leaf(shape, base.dtype)
        mode = "add" if self.error[base] + self.error[src] == 0 and base.dtype == "int64" else "set"
        idx: list[Any] = [index(i) for i in range(base.rank)]
        if self.chance(0.5):
            idx[d] = index(d) + self.rng.randint(0, base.shape[d] - n)
            return self.note(self.graph.scatter(base, src, [], idx), base, src)
        rows = self.leaf((n,), "int64", ("input",))
        idx[d] = load(0, "int64", [index(d)]) % base.shape[d]
        out = self.graph.scatter(base, src, [rows], idx, mode)
        return self.note(
            self.graph.pointwise(lambda x: minimum(maximum(x, -4), 4), out) if mode == "add" else out, base, src
        )

    def scan(self) -> Value | None:
        v = self.value("float", "int", rank=1, full=True)
        if v.dtype in HALF:
            return None
        kind = self.pick(("max", "min", "sum"))
        out = self.note(self.graph.scan(kind, v, self.rng.randint(0, v.rank - 1)), v, rounds=kind == "sum")
        if kind == "sum" and dtypes.is_float(v.dtype):
            return self.note(self.bounded(out), out, rounds=True)
        return self.note(self.graph.pointwise(lambda x: minimum(maximum(x, -4), 4), out), out) if kind == "sum" else out

    def sort(self) -> Value:
        v = self.value("float", "int", exact=True, rank=1, full=True)
        axis = self.rng.randint(0, v.rank - 1)
        values, order = self.graph.sort(v, axis, self.chance(0.5), self.rng.randint(1, v.shape[axis]))
        self.keep(self.note(values))
        return self.note(self.graph.pointwise(lambda x: minimum(x, 4), order))


STEPS = (
    "unary unary exact_unary binary binary binary integers condition select cast shifted gather reduce reduce "
    "exact_reduce norm norm reshape reshape permute permute slice expand concat concat matmul matmul conv conv attend "
    "scatter scan sort"
).split()


def assert_equal(maker: Maker, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Outputs and states of this maker's program are equal within the tolerance of their values."""
    values = dict(maker.graph.outputs) | {f"state:{k}": v for k, v in maker.graph.updates}
    compare({n: maker.error[v] for n, v in values.items() if v in maker.error}, got, want)


def compare(error: dict[str, float], got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, tolerance in error.items():
        a, b = got[name], want[name]
        assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, a.dtype, b.shape, b.dtype)
        if tolerance:
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=name
            )
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
