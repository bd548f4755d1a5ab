"""The calls that benchmarks/ops.py measures: the conformance samples of the registered ops, grown to a size.

A sample shows a legal call of an op, but it is tiny. :class:`Growth` finds out by trial, with PyTorch, which of its
numbers must be doubled together so that the call stays legal (both reduced dims of a matmul, or a dim and the size that
an argument repeats). It then doubles the smallest of these groups until all tensors together have the wanted bytes. A
second list of shapes is therefore not needed: an op that is added to the registry is measured.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from npu_compiler.graph.graph import Graph
from npu_compiler.ops import REGISTRY, OpDef, lower_call
from npu_compiler.ops.samples import Sample, T
from npu_compiler.support import dtypes
from npu_compiler.support.errors import Unsupported
from tests.conformance.cases import SUMMING, Case

Place = tuple[int | str, ...]  # the way to a number in a sample: argument, element of a list, dim of a tensor
# Samples per op. Arguments choose kernels in these families; elsewhere the first sample stands for all.
SAMPLES = {"convolution": 20, "attention": 4, "linear_algebra": 3, "reductions": 3, "pooling": 2}
MAX_DIM = 1 << 24  # no number is doubled beyond it
TRIAL_BYTES = 2048
WEIGHTS = ("weight", "bias", "running_mean", "running_var")
# What the compiler and PyTorch raise for calls that they do not support; AttributeError: an overload that this version
# of PyTorch does not have.
REFUSALS = (
    Unsupported, RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, AttributeError, AssertionError
)  # fmt: skip
# What PyTorch's devices disagree on. Its CPU computes the exact GELU, its CUDA kernel the tanh approximation, up to
# 4.7e-4 apart. Its CPU divides by a number, its CUDA kernel multiplies by the reciprocal. Of several updates of an
# element, its CPU keeps the last one.
DEFINED_BY_CPU = (
    "aten._addmm_activation.default", "quantized_decomposed.*choose_qparams*", "aten.scatter.src",
)  # fmt: skip
INDEXED = ("indexing", "scattering")  # what is read there may be larger than what is written


@dataclass(frozen=True, eq=False)
class GrownCase(Case):
    """A conformance case whose sample was grown. ``aliases``: the other overloads that its declaration covers.
    ``device``: where PyTorch computes the results, those in float64 too, unless its devices disagree."""

    grown: Sample
    size: str
    aliases: tuple[str, ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.op_type}-{self.number}-{self.dtype}-{self.size}"

    @property
    def sample(self) -> Sample:
        return self.grown

    @property
    def weights(self) -> Collection[int]:  # type: ignore[override]
        """Parameters of modules: programs hold them in the layout of their kernels."""
        named = zip(self.sample.args, self.op.params, strict=False)
        names = [p.name for a, p in named for _ in filter(lambda x: isinstance(x, T), a if type(a) is list else [a])]
        return [i for i, name in enumerate(names) if name in WEIGHTS]

    def _run(self, f: Callable[[torch.Tensor], torch.Tensor], wide: bool = False) -> list[torch.Tensor]:
        device = "cpu" if any(fnmatch.fnmatchcase(self.op_type, g) for g in DEFINED_BY_CPU) else self.device
        return [t.cpu() for t in super()._run(lambda t: f(t).to(device), wide)]

    def forget_results(self) -> None:
        """Free what PyTorch computed; it is computed again when it is needed."""
        for name in ("eager", "reference"):
            self.__dict__.pop(name, None)

    def forget(self) -> None:
        """Free all tensors; they are made again when they are needed."""
        self.forget_results()
        for name in ("arguments", "encoded"):
            self.__dict__.pop(name, None)


def declarations(pattern: str) -> Iterator[tuple[list[str], OpDef]]:
    """Return each declaration with those of its overloads that match a glob of ``pattern``, with or without 'aten.';
    commas separate globs."""
    globs = pattern.split(",")
    found: dict[int, tuple[list[str], OpDef]] = {}
    for op_type, op in REGISTRY.items():
        if any(fnmatch.fnmatchcase(name, g) for name in (op_type, op_type.removeprefix("aten.")) for g in globs):
            found.setdefault(id(op), ([], op))[0].append(op_type)
    yield from found.values()


def grown_cases(pattern: str, dtype: str, sizes: dict[str, int]) -> Iterator[GrownCase]:
    """Return the cases of the matching ops in ``dtype``, in each of the ``sizes`` (name -> bytes of all tensors).

    Ops that take no ``dtype`` appear in the first dtype of their declaration if ``dtype`` is float32, otherwise not.
    """
    for (first, *others), op in declarations(pattern):
        takes = dtype in op.dtypes or (dtype == "float64" and "float32" in op.dtypes)
        if not takes and dtype != "float32":
            continue
        chosen, measured = dtype if takes else op.dtypes[0], 0
        for number, sample in enumerate(op.samples):
            case = GrownCase(first, op, number, chosen, sample, "", tuple(others))
            growth = Growth.of(case)
            if growth is None:
                continue
            for size, nbytes in sizes.items():
                yield replace(case, grown=growth.to(nbytes), size=size)
            measured += 1
            if measured == SAMPLES.get(op.family, 1):
                break


# -- places of numbers in a sample -------------------------------------------------------------------------------------
def _tensors(sample: Sample) -> dict[Place, T]:
    return {place: x for place, x in _leaves(sample) if isinstance(x, T)}


def _leaves(sample: Sample) -> Iterator[tuple[Place, Any]]:
    def walk(place: Place, x: Any) -> Iterator[tuple[Place, Any]]:
        if isinstance(x, list | tuple):
            for i, y in enumerate(x):
                yield from walk((*place, i), y)
        else:
            yield place, x

    for i, a in enumerate(sample.args):
        yield from walk((i,), a)
    for name, a in sample.kwargs:
        yield from walk((name,), a)


def _numbers(sample: Sample) -> dict[Place, int]:
    """Dims of tensors (the place ends in the dim), upper bounds of indices, and other integers above 1."""
    found: dict[Place, int] = {}
    for place, x in _leaves(sample):
        if isinstance(x, T):
            found |= {(*place, "dim", d): n for d, n in enumerate(x.shape)}
            if x.dtype == "int64" and x.values is None and x.high > 1:
                found[(*place, "high")] = int(x.high)
        elif type(x) is int and x > 1:
            found[place] = x
    return found


def _scaled(sample: Sample, factors: dict[Place, int]) -> Sample:
    """Return the sample with numbers multiplied, and tensors contiguous."""

    def change(place: Place, x: Any) -> Any:
        if isinstance(x, T):
            shape = tuple(n * factors.get((*place, "dim", d), 1) for d, n in enumerate(x.shape))
            if x.values is not None and x.dtype is None and math.isfinite(sum(x.values)):  # drawn anew
                x = replace(x, values=None, low=min(x.values), high=max(x.values))
            count = math.prod(shape)
            if x.dtype == "int64" and x.values is not None and len(set(x.values)) == len(x.values) < count:
                x = replace(x, values=range(count - 1, -1, -1))  # indices stay distinct
            by = factors.get((*place, "high"), 1)
            return replace(x, shape=shape, layout="contiguous", low=x.low * by, high=x.high * by)
        if isinstance(x, list | tuple):
            return type(x)(change((*place, i), y) for i, y in enumerate(x))
        return x * factors[place] if place in factors else x

    args = tuple(change((i,), a) for i, a in enumerate(sample.args))
    return Sample(args, tuple((name, change((name,), a)) for name, a in sample.kwargs))


# -- growing -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Growth:
    """A sample and the groups of its numbers that may be doubled, each without regard to the others.

    ``results``: elements of the results of the sample. ``gains``: by which factor a group's doubling changes them.
    """

    sample: Sample
    dtype: str
    groups: tuple[frozenset[Place], ...]
    results: int
    gains: tuple[float, ...]

    @classmethod
    def of(cls, case: GrownCase) -> Growth | None:
        """Find the groups of a case's sample; None if it cannot grow, or if PyTorch or the compiler refuses it."""
        sample = _scaled(case.sample, {})
        tensors = _tensors(sample)
        tried = _trial(case, sample)
        if tried is None or not tried[0] or not all(math.prod(x.shape) for x in tensors.values()):
            return None
        base, sums = tried
        sums = sums or case.family in INDEXED
        groups: list[frozenset[Place]] = []
        gains: list[float] = []
        numbers = _numbers(sample)
        fixed = _filter_sizes(case, sample)
        for place in numbers:
            if place in fixed or any(place in g for g in groups) or ("dim" not in place and tensors):
                continue
            for group in _candidates(place, numbers):
                if group & fixed.union(*groups):
                    continue
                after = _trial(case, _scaled(sample, dict.fromkeys(group, 2)))
                # Not a filter, which would leave smaller results, and not what an op that computes nothing leaves out.
                if after is None or after[0] < base or (after[0] == base and not sums):
                    continue
                grown = cls(sample, case.dtype, (*groups, group), base, (*gains, after[0] / base))
                if _trial(case, grown.to(TRIAL_BYTES)) is not None:  # together with the groups found before
                    groups.append(group)
                    gains.append(after[0] / base)
                    break
        return cls(sample, case.dtype, tuple(groups), base, tuple(gains)) if groups else None

    def to(self, nbytes: int) -> Sample:
        """Return the sample with about ``nbytes`` in its tensors and results."""
        factors = [1] * len(self.groups)
        numbers = _numbers(self.sample)

        def scaled() -> dict[Place, int]:
            by = {place: f for group, f in zip(self.groups, factors, strict=True) for place in group}
            for place in (p for p in numbers if p[-1] == "high" and p not in by):  # indices reach as far as a dim
                dims = (p for p in by if "dim" in p and p[:1] != place[:1] and numbers[p] == numbers[place])
                by[place] = max((by[p] for p in dims), default=1)
            return by

        def largest(g: int) -> int:
            return max(numbers[place] for place in self.groups[g]) * factors[g]

        while self._bytes(scaled(), factors) < nbytes:
            g = min(range(len(factors)), key=largest)
            if largest(g) >= MAX_DIM:
                break
            factors[g] *= 2
        return _scaled(self.sample, scaled())

    def _bytes(self, scaled: dict[Place, int], factors: Sequence[int]) -> float:
        total = self.results * dtypes.DTYPES[self.dtype].size
        result = float(total)
        for factor, gain in zip(factors, self.gains, strict=True):
            result *= gain ** math.log2(factor)
        given = 0
        for place, x in _tensors(self.sample).items():
            elements = math.prod(n * scaled.get((*place, "dim", d), 1) for d, n in enumerate(x.shape))
            given += elements * dtypes.DTYPES[x.dtype or self.dtype].size
        return result + given


def _filter_sizes(case: GrownCase, sample: Sample) -> frozenset[Place]:
    """The spatial dims of a convolution's weight: a model's filters stay as small as the sample's."""
    at = next((i for i, p in enumerate(case.op.params) if p.name == "weight"), None)
    if case.family != "convolution" or at is None:
        return frozenset()
    return frozenset(place for place in _numbers(sample) if place[:2] == (at, "dim") and int(place[2]) >= 2)


def _candidates(place: Place, numbers: dict[Place, int]) -> Iterator[frozenset[Place]]:
    """Groups with the number at ``place``, the likely ones first: with dims of the same size and position from the
    right in other tensors; alone; with one, two, then all dims of its size; each also with one other integer."""
    own = place[: place.index("dim")] if "dim" in place else place
    dims = [p for p in numbers if "dim" in p and p[: p.index("dim")] != own and numbers[p] == numbers[place]]
    ranks: dict[Place, int] = {}
    for p in numbers:
        if "dim" in p:
            ranks[p[: p.index("dim")]] = ranks.get(p[: p.index("dim")], 0) + 1

    def from_right(p: Place) -> int:
        return ranks[p[: p.index("dim")]] - int(p[-1])

    aligned = [p for p in dims if "dim" in place and from_right(p) == from_right(place)]
    plain = [frozenset({place, *aligned}), frozenset({place}), *(frozenset({place, p}) for p in dims)]
    plain += [frozenset({place, *some}) for some in itertools.combinations(dims, 2)] if len(dims) < 8 else []
    plain.append(frozenset({place, *dims}))
    yield from dict.fromkeys(plain)
    others = [p for p in numbers if "dim" not in p]
    exact = sorted(others, key=lambda p: numbers[p] != numbers[place])
    for group in dict.fromkeys(plain):
        for p in exact:
            yield group | {p}


def _trial(case: GrownCase, sample: Sample) -> tuple[int, bool] | None:
    """Return the number of elements of the results, and whether the op reduces or sorts, so that numbers that leave the
    results as they are still make work. None: the compiler or PyTorch refuses the call."""
    tried, graph = replace(case, grown=sample), Graph()
    try:
        inputs, attrs = tried.encoded
        values = [graph.input(f"in{i}", tuple(t.shape), dtypes.parse(t.dtype)) for i, t in enumerate(inputs)]
        lower_call(graph, case.op_type, values, attrs)  # first, because illegal calls can crash PyTorch
        results = tried.eager
    except REFUSALS:
        return None
    return sum(t.numel() for t in results), any(n.op in SUMMING or n.op == "sort" for n in graph.nodes)
