"""Random ``loops`` kernels: shapes, strides, dtypes, guards, gathers, reductions, temporaries and several outputs."""

from __future__ import annotations

import math

import numpy as np

from npu_compiler.graph import expr
from npu_compiler.graph.expr import Expr, const, index, load
from npu_compiler.schedule.kernel import LoopBody, Loops, Operand, Stage
from npu_compiler.support import dtypes

from .cpu_harness import operand

REAL = [n for n, d in dtypes.DTYPES.items() if d.kind != "complex" and n != dtypes.FLOAT8]  # see test_float8.py
SIZES = [0, 1, 1, 2, 3, 3, 5, 7, 8, 12, 16, 17, 31, 32, 33, 40]


class Maker:
    """Builds one kernel from a random stream."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.inputs: list[Operand] = []

    def pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def kernel(self) -> Loops:
        rank = int(self.rng.integers(1, 5))
        self.domain = tuple(
            self.pick(SIZES) if self.chance(0.9) or rank > 2 else self.pick((100, 257, 1500)) for _ in range(rank)
        )
        while math.prod(self.domain) > 20000:
            self.domain = tuple(max(1, n // 2) for n in self.domain)
        axes = tuple(d for d in range(rank) if self.chance(0.4)) if self.chance(0.6) else ()
        self.axes = axes
        stages = self.reduction() if axes else []
        outputs: list[Operand] = []
        for _ in range(int(self.rng.integers(1, 3)) - bool(outputs)):
            per_row = bool(axes) and self.chance(0.5)
            self.row_only = per_row
            e = self.scalar(self.pick(REAL), 3)
            shape = tuple(1 if per_row and d in axes else n for d, n in enumerate(self.domain))
            outputs.append(self.strided(shape, e.dtype, output=True))
            idx = expr.identity_index(shape)
            stages.append(Stage("store", e, output=len(outputs) - 1, index=idx, per_row=per_row))
        body = LoopBody(self.domain, axes, tuple(stages))
        return Loops(label="random", inputs=tuple(self.inputs), outputs=tuple(outputs), body=body)

    def reduction(self) -> list[Stage]:
        stages: list[Stage] = []
        self.known: list[Expr] = []
        empty = any(self.domain[d] == 0 for d in self.axes)
        for _ in range(int(self.rng.integers(1, 4))):
            self.row_only = False
            if self.chance(0.3):
                e = self.scalar(self.pick(("float32", "float64", "int64", "bool", "float16")), 3)
                stages.append(Stage("temp", e))
                self.known.append(expr.stage(len(stages) - 1, e.dtype))
                self.temps = getattr(self, "temps", set()) | {self.known[-1]}
                continue
            kind = self.pick(("sum", "max", "min", "argmax", "argmin", "prod") if not empty else ("sum", "prod"))
            e = self.scalar(self.pick(("float32", "float32", "float64", "int64", "int32", "uint8", "bool")), 2)
            if kind in ("sum", "prod"):
                e = e.cast("int64" if dtypes.category(e.dtype) < 2 else dtypes.opmath(e.dtype))
            if kind == "prod" and dtypes.is_float(e.dtype):
                e = expr.call("add", expr.call("mul", expr.fn("tanh")(e), 2.0**-9), 1.0)
            elif kind in ("argmax", "argmin") or (
                kind in ("max", "min") and dtypes.is_float(e.dtype) and self.chance(0.5)
            ):
                e = self.leaf(e.dtype)  # exact values, so that ties are the same
            stages.append(Stage("reduce", e, reduce=kind))
            self.known.append(expr.stage(len(stages) - 1, "int64" if kind.startswith("arg") else e.dtype))
        return stages

    # -- operands -------------------------------------------------------------------------------------------------
    def strided(self, shape: tuple[int, ...], dtype: str, output: bool = False) -> Operand:
        order = list(range(len(shape)))
        if self.chance(0.3):
            self.rng.shuffle(order)
        strides, step = [0] * len(shape), 1
        for d in reversed(order):
            gap = self.pick((1, 1, 1, 2, 3)) if self.chance(0.2) else 1
            strides[d] = step * gap
            step *= max(1, shape[d]) * gap
        if not output and order and self.chance(0.1):
            strides[self.pick(order)] = 0
        return operand(shape, dtype, strides, offset=self.pick((0, 0, 5)))

    def read(self, shape: tuple[int, ...], dtype: str, idx: list[Expr]) -> Expr:
        same = [i for i, o in enumerate(self.inputs) if o.shape == shape and o.dtype == dtype]
        if same and self.chance(0.5):
            return load(self.pick(same), dtype, idx)
        self.inputs.append(self.strided(shape, dtype))
        return load(len(self.inputs) - 1, dtype, idx)

    # -- expressions ----------------------------------------------------------------------------------------------
    def dims(self) -> list[int]:
        return [d for d in range(len(self.domain)) if not (self.row_only and d in self.axes)]

    def leaf(self, dtype: str) -> Expr:
        usable = [
            k
            for k in getattr(self, "known", [])
            if k.dtype == dtype and not (self.row_only and k in getattr(self, "temps", ()))
        ]
        if usable and self.chance(0.4):
            return self.pick(usable)
        if self.chance(0.1):
            return const(self.number(dtype), dtype)
        dims = [d for d in self.dims() if self.chance(0.75)]
        if not dims or 0 in self.domain:
            dims = self.dims()
        shape, idx, guard = [], [], None
        for d in dims:
            n, i = self.domain[d], index(d)
            style = self.rng.random()
            if style < 0.72 or n == 0:
                shape.append(n)
            elif style < 0.8:  # shifted and guarded, as padding is
                shift = int(self.rng.integers(-3, 4))
                i = i + shift
                inside = (i >= 0) & (i < n)
                guard = inside if guard is None else guard & inside
                shape.append(n)
            elif style < 0.87:
                k = self.pick((2, 3, 4))
                i, other = i // k, i % k
                shape.append((n + k - 1) // k)
                if self.chance(0.5):
                    idx.append(i)
                    shape.append(k)
                    i = other
            elif style < 0.93:  # reversed or strided
                i = (n - 1) - i if self.chance(0.5) else i * 2
                shape.append(2 * n)
            else:  # gathered
                where_from = self.read((n,), "int64", [i])
                i = where_from.cast("int64")
                i = expr.minimum(expr.maximum(i, 0), 40)
                shape.append(41)
            idx.append(i)
        e = self.read(tuple(shape), dtype, idx)
        return e if guard is None else expr.where(guard, e, self.number(dtype))

    def number(self, dtype: str):
        if dtype == "bool":
            return self.chance(0.5)
        return float(self.rng.integers(-8, 9)) / 4 if dtypes.is_float(dtype) else int(self.rng.integers(0, 9))

    def scalar(self, dtype: str, depth: int) -> Expr:
        if depth == 0 or self.chance(0.2):
            return self.leaf(dtype)
        if self.chance(0.2):
            return self.convert(dtype, depth)
        if self.chance(0.15):
            return expr.where(self.condition(depth - 1), self.scalar(dtype, depth - 1), self.scalar(dtype, depth - 1))
        if dtype == "bool":
            return self.condition(depth)
        a = self.scalar(dtype, depth - 1)
        if dtypes.is_float(dtype):
            exact = ("neg", "abs", None, None)  # a half result of anything else may be rounded either way
            curved = ("tanh", "sigmoid", "exp", "cos", "sqrt", None)
            one = self.pick(exact if dtypes.DTYPES[dtype].size == 2 else exact + curved)
            if one == "sqrt":
                a = expr.fn("abs")(a)
            if one == "exp":
                a = expr.minimum(a, 2.0)
            if one:
                return expr.fn(one)(a)
            return expr.fn(self.pick(("add", "sub", "mul", "maximum", "minimum")))(a, self.scalar(dtype, depth - 1))
        if dtype == "int64" and self.chance(0.2) and self.dims():
            return index(self.pick(self.dims())) * int(self.rng.integers(-3, 4)) + a
        if self.chance(0.3):
            return expr.fn(self.pick(("floordiv", "remainder", "shr")))(a, int(self.rng.integers(1, 5)))
        if self.chance(0.2):
            return expr.fn(self.pick(("neg", "abs", "not") if dtype != "uint8" else ("not",)))(a)
        return expr.fn(self.pick(("add", "sub", "mul", "maximum", "minimum", "and", "or", "xor")))(
            a, self.scalar(dtype, depth - 1)
        )

    def convert(self, dtype: str, depth: int) -> Expr:
        """A cast whose rounding cannot differ between two correct evaluations."""
        source = self.pick(REAL)
        if dtypes.is_float(source) and not dtypes.is_float(dtype):
            a = self.leaf(source)  # exact
            return a.cast(dtype) if dtype != "uint8" else expr.fn("abs")(a).cast(dtype)
        return self.scalar(source, depth - 1).cast(dtype)

    def condition(self, depth: int) -> Expr:
        if self.chance(0.3) and self.dims():
            return expr.fn(self.pick(("lt", "ge", "eq", "gt", "ne")))(
                index(self.pick(self.dims())), int(self.rng.integers(0, 20))
            )
        if self.chance(0.2) and depth:
            return expr.fn(self.pick(("and", "or", "xor", "eq", "lt")))(
                self.condition(depth - 1), self.condition(depth - 1)
            )
        if self.chance(0.1):
            return ~self.leaf("bool")
        dtype = self.pick(("float32", "int64", "uint8", "bool", "float64", "float16"))
        a = self.leaf(dtype)
        if dtype == "bool":
            return a
        return expr.fn(self.pick(("lt", "le", "gt", "ge", "eq", "ne")))(a, self.number(dtype))
