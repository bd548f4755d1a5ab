"""Random PyTorch modules: ops of all families on tensors of all dtypes and odd shapes, with views, writes in place,
aliases among inputs and outputs, and weights.

A module is its source text: lines of Python over the values ``v0``, ``v1``, … and the weights ``self.w0``, … Every
line was run once while the module was made, and lines that PyTorch refuses were left out. A failing module therefore
shrinks by leaving out lines, and what remains is a readable example.

A value is *exact* when no rounding went into it. Only exact values are compared, sorted, rounded or made integers,
because there an error in the last bit would show as another result.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HALF = ("f16", "bf16")
FLOATS = ("f32", "f32", "f32", *HALF, "f64")
INTS = ("i64", "i64", "i32", "i16", "i8", "u8")
DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b": torch.bool,
}  # fmt: skip
NAMES = {t: n for n, t in DTYPES.items()}
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17)
MOST = 3000  # elements of a value
LARGEST = 1e3  # magnitude of a value
_NAME = re.compile(r"\bself\.w\d+\b|\bv\d+\b")


def names(text: str) -> list[str]:
    """The values and weights that a line refers to."""
    return _NAME.findall(text)


@dataclass
class Program:
    """A module as text, with its inputs and weights. ``exact``: names of outputs that have no rounding errors."""

    inputs: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    lines: list[str]
    outputs: list[str]
    exact: set[str] = field(default_factory=set)

    def text(self) -> str:
        body = [*self.lines, f"return ({', '.join(self.outputs)},)"]
        return "\n".join([f"def forward({', '.join(['self', *self.inputs])}):", *("    " + line for line in body)])

    def module(self, wide: bool = False) -> nn.Module:
        """The module; ``wide`` has float64 for each floating dtype."""
        scope: dict[str, Any] = _scope(wide)
        exec(self.text(), scope)
        made = type("Random", (nn.Module,), {"forward": scope["forward"]})()
        for name, w in self.weights.items():
            made.register_buffer(name.removeprefix("self."), _widened(w) if wide else w.clone())
        return made.eval()

    def arguments(self, wide: bool = False) -> list[torch.Tensor]:
        """Fresh inputs with the strides and aliases of the originals."""
        kept: dict[int, torch.Tensor] = {}
        return [_copied(t, kept, wide) for t in self.inputs.values()]

    def eager(self, wide: bool = False) -> list[torch.Tensor]:
        with torch.no_grad():
            return [t.clone() for t in self.module(wide)(*self.arguments(wide))]

    def describe(self) -> str:
        tensors = {**self.inputs, **self.weights}
        heads = [f"# {n}: {NAMES[t.dtype]}{list(t.shape)} strides {t.stride()}" for n, t in tensors.items()]
        return "\n".join([*heads, self.text()])

    def smaller(self) -> Iterator[Program]:
        """Programs with one output, or without one of the lines and all that depends on it."""
        if len(self.outputs) > 1:
            for o in self.outputs:
                yield replace(self, outputs=[o])._trimmed()
        for i in reversed(range(len(self.lines))):
            gone: set[str] = set()
            kept: list[str] = []
            for j, line in enumerate(self.lines):
                made, _, rest = line.partition(" = ") if re.match(r"v\d+(, v\d+)* = ", line) else ("", "", line)
                if j == i or gone & set(names(rest)):
                    gone |= set(names(made))
                else:
                    kept.append(line)
            outputs = [o for o in self.outputs if o not in gone]
            if outputs:
                yield replace(self, lines=kept, outputs=outputs)._trimmed()

    def _trimmed(self) -> Program:
        used = set(names("\n".join([*self.lines, *self.outputs])))
        inputs = {n: t for n, t in self.inputs.items() if n in used}
        return replace(
            self, inputs=inputs or dict([*self.inputs.items()][:1]),
            weights={n: t for n, t in self.weights.items() if n in used},
        )  # fmt: skip


def _scope(wide: bool) -> dict[str, Any]:
    dtypes = {n: torch.float64 if wide and t.is_floating_point else t for n, t in DTYPES.items()}
    return {"torch": torch, "F": F, **dtypes}


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t.clone()


def _copied(t: torch.Tensor, kept: dict[int, torch.Tensor], wide: bool) -> torch.Tensor:
    storage = t.untyped_storage()
    if storage.data_ptr() not in kept or not storage.nbytes():
        flat = torch.empty(0, dtype=t.dtype).set_(storage)
        kept[storage.data_ptr()] = _widened(flat) if wide else flat.clone()
    return kept[storage.data_ptr()].as_strided(t.shape, t.stride(), t.storage_offset())


class Maker:
    """Makes one program. ``nonfinite``: inputs may have infinities and NaN."""

    def __init__(self, rng: random.Random, nonfinite: bool = False):
        self.rng, self.nonfinite = rng, nonfinite
        self.data = np.random.default_rng(rng.randint(0, 2**31))
        self.inputs: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.inexact: set[int] = set()  # storages
        self.lines: list[str] = []

    # -- choices ------------------------------------------------------------------------------------------------------
    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randint(0, len(options) - 1)]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.pick((0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5)) if rank is None else rank
        shape = [self.pick(SIZES) for _ in range(rank)]
        if rank and self.chance(0.04):
            shape[self.rng.randint(0, rank - 1)] = 0
        while math.prod(shape) > MOST // 4:
            shape[shape.index(max(shape))] //= 2
        return tuple(shape)

    def array(self, shape: Sequence[int], dtype: torch.dtype, nonfinite: bool) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.from_numpy(np.asarray(self.data.random(shape) < 0.5))
        if not dtype.is_floating_point:
            low = 0 if dtype == torch.uint8 else -9
            return torch.from_numpy(np.asarray(self.data.integers(low, 10, shape))).to(dtype)
        values = np.asarray(self.data.standard_normal(shape) * 1.5)
        if nonfinite and values.size and self.chance(0.7):
            where = self.data.random(shape) < 0.1
            extremes = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, -6e4])
            values = np.where(where, self.data.choice(extremes, shape), values)
        return torch.from_numpy(values).to(dtype)

    def leaf(self, shape: Sequence[int], dtype: torch.dtype, weight: bool | None = None) -> str:
        """A new input, perhaps a view of another layout, or a weight."""
        if weight is None:
            weight = self.chance(0.3)
        t = self.array(shape, dtype, self.nonfinite and not weight)
        if not weight and t.ndim and self.chance(0.35):
            t = self.strided(t)
        name = f"self.w{len(self.weights)}" if weight else f"v{len(self.values)}"
        (self.weights if weight else self.inputs)[name] = t
        self.values[name] = t.clone() if weight else t
        return name

    def strided(self, t: torch.Tensor) -> torch.Tensor:
        kind = self.pick(("transposed", "stepped", "offset", "expanded"))
        if kind == "transposed":
            order = self.rng.sample(range(t.ndim), t.ndim)
            back = [order.index(i) for i in range(t.ndim)]
            return t.permute(order).contiguous().permute(back)
        if kind == "expanded":
            d = self.rng.randint(0, t.ndim - 1)
            return t.narrow(d, 0, min(1, t.shape[d])).expand(t.shape) if t.shape[d] else t
        larger = torch.zeros([2 * n + 1 for n in t.shape], dtype=t.dtype)
        step = 2 if kind == "stepped" else 1
        view = larger[tuple(slice(1, 1 + step * n, step) if n else slice(0, 0) for n in t.shape)]
        return view.copy_(t)

    def exact(self, name: str) -> bool:
        return self.values[name].untyped_storage()._cdata not in self.inexact

    def value(
        self, kinds: str = "fib", exact: bool = False, rank: int = 0, most: int = 9, full: bool = False,
        fits: Callable[[torch.Tensor], bool] | None = None, new: float = 0.12,
    ) -> str:  # fmt: skip
        """A value of one of the kinds f(loat), i(nteger), b(ool), or a new leaf."""
        found = [
            n for n, t in self.values.items()
            if kind_of(t.dtype) in kinds and rank <= t.ndim <= most and (not exact or self.exact(n))
            and not (full and not t.numel()) and (fits is None or fits(t))
        ]  # fmt: skip
        if found and not self.chance(new):
            return self.pick(found[-6:] if self.chance(0.6) else found)
        dtype = DTYPES[self.pick([d for d in (*FLOATS, *FLOATS, *INTS, "b") if kind_of(DTYPES[d]) in kinds])]
        shape = self.shape(self.rng.randint(rank, max(rank, min(most, 4))))
        return self.leaf(tuple(max(n, 1) for n in shape) if full else shape, dtype)

    def like(self, name: str, dtype: torch.dtype | None = None, fits_in: bool = False, new: float = 0.3) -> str:
        """A value that broadcasts against ``name``; with ``fits_in`` the result has the shape of ``name``."""
        t = self.values[name]
        dtype = dtype or t.dtype

        def broadcasts(u: torch.Tensor) -> bool:
            try:
                shape = torch.broadcast_shapes(u.shape, t.shape)
            except RuntimeError:
                return False
            return u.dtype == dtype and (shape == t.shape if fits_in else math.prod(shape) <= MOST)

        found = [n for n, u in self.values.items() if broadcasts(u)]
        if found and not self.chance(new):
            return self.pick(found)
        shape = [n if self.chance(0.7) else 1 for n in t.shape]
        return self.leaf(shape[self.rng.randint(0, t.ndim) if self.chance(0.2) else 0 :], dtype)

    def dim(self, name: str) -> int:
        n = self.values[name].ndim
        return self.rng.randint(-n, n - 1) if n else self.pick((0, -1))

    def dims(self, name: str) -> list[int]:
        n = self.values[name].ndim
        return sorted(self.rng.sample(range(n), self.rng.randint(1, n))) if n else []

    def size(self, name: str, d: int) -> int:
        t = self.values[name]
        return t.shape[d] if t.ndim else 1

    def dtype(self, options: Sequence[str] = (*FLOATS, *INTS, "b")) -> str:
        return str(self.pick(options))

    # -- lines --------------------------------------------------------------------------------------------------------
    def build(self, steps: int) -> Program:
        for _ in range(self.rng.randint(1, 3)):
            self.leaf(self.shape(), DTYPES[self.dtype((*FLOATS, *FLOATS, *INTS, "b"))], weight=False)
        tries, families, weights = 0, [*FAMILIES], [*FAMILIES.values()]
        while len(self.lines) < steps and tries < 20 * steps:
            tries += 1
            family = self.rng.choices(families, weights)[0]
            with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):  # refused
                family(self)
        made = [n for n in self.values if n not in self.inputs and n not in self.weights]
        pool = made[-6:] or [*self.inputs]
        outputs = [self.pick(pool) for _ in range(self.rng.randint(1, 4))]
        if self.chance(0.15):
            outputs.append(self.pick([*self.values]))
        exact = {o for o in outputs if self.exact(o)}
        return Program(self.inputs, self.weights, self.lines, outputs, exact)._trimmed()

    def add(self, text: str, exact: bool = False, count: int | None = 1) -> None:
        """Run an expression and keep its results if PyTorch accepts it and they are small. ``exact``: the results of
        exact operands are exact. ``count``: how many results there are; None: any number."""
        scope = {**_scope(False), "self": _Weights(self.values), **self.values}
        used = names(text)
        with torch.no_grad():
            out = eval(text, scope)
        results = list(out) if isinstance(out, tuple | list) else [out]
        if not results or (len(results) != count and count is not None):
            return
        for r in results:
            if not isinstance(r, torch.Tensor) or r.dtype not in NAMES or r.numel() > MOST or r.ndim > 6:
                return
            if r.is_floating_point() and not self.nonfinite and r.numel():
                if not r.isfinite().all():
                    return
                if r.abs().max() > LARGEST:
                    return self.add(f"torch.clamp({text}, -3, 3)") if count == 1 and len(results) == 1 else None
        made = [f"v{len(self.values) + i}" for i in range(len(results))]
        self.lines.append(f"{', '.join(made)}{',' * (len(made) == 1 and count is None)} = {text}")
        pure = exact and all(self.exact(n) for n in used)
        for n, r in zip(made, results, strict=True):
            self.values[n] = r
            if r.is_floating_point() and not pure:
                self.inexact.add(r.untyped_storage()._cdata)

    def write(self, target: str, text: str, exact: bool) -> None:
        """A statement that changes ``target`` in place."""
        scope = {**_scope(False), "self": _Weights(self.values), **self.values}
        t = self.values[target]
        before = t.untyped_storage().clone()
        pure = exact and all(self.exact(n) for n in names(text))
        with torch.no_grad():
            exec(text, scope)
        small = not t.is_floating_point() or not t.numel() or (t.isfinite().all() and t.abs().max() < LARGEST)
        if not small and not self.nonfinite:
            t.untyped_storage().copy_(before)
            return
        self.lines.append(text)
        if t.is_floating_point() and not pure:
            self.inexact.add(t.untyped_storage()._cdata)


class _Weights:
    """``self`` while lines are tried."""

    def __init__(self, values: dict[str, torch.Tensor]):
        self._values = values

    def __getattr__(self, name: str) -> torch.Tensor:
        return self._values[f"self.{name}"]


# A family adds one line. Those in tests/support/random_lines.py register themselves, with their weight.
FAMILIES: dict[Callable[[Maker], None], int] = {}


def kind_of(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"
