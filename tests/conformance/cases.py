"""Conformance cases, generated from the registry: every overload x sample x dtype as an IR call with expected results.

A case knows its PyTorch arguments, the IR encoding of the call (``inputs`` and ``attrs``), PyTorch eager's results in
the same dtype and the results in float64. :func:`compile_cases` lowers many cases into one core graph, because
compiling for a real target costs seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed

from npu_compiler.aten.tensor_lists import list_attrs
from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph, Value
from npu_compiler.ops import REGISTRY, OpDef, lower_call
from npu_compiler.ops.samples import Sample, T
from npu_compiler.pipeline import compile_graph
from npu_compiler.support import dtypes
from npu_compiler.support.host_arrays import to_array
from npu_compiler.target_config import target_config
from npu_runtime import CPUBackend, Executor, load_weights
from npu_runtime.backends.metal import MetalBackend
from npu_runtime.backends.metal import missing_parts as metal_missing

from ..metal_emulator import ORDERS
from ..support import cuda_gpu
from ..support.metal_backend import EmulatedMetal
from ..support.sweeps import FULL

Arrays = Mapping[str, np.ndarray]


def run_on_cpu(graph: Graph, inputs: Arrays) -> Arrays:
    """Compile for the CPU target and run."""
    program = compile_graph(graph)
    return Executor(program, load_weights(program, {}), CPUBackend()).run(
        {k: np.array(v, order="C") for k, v in inputs.items()}
    )


def run_on_metal(graph: Graph, inputs: Arrays) -> Arrays:
    """Compile for Metal and run on this Mac's GPU. Elsewhere run in the emulator, in several orders of threads: not a
    bit may depend on the order."""
    program = compile_graph(graph, "metal")
    if not metal_missing():
        gpu = MetalBackend()
        return Executor(program, load_weights(program, {}, gpu), gpu).run(
            {k: np.array(v, order="C") for k, v in inputs.items()}
        )
    found: Arrays | None = None
    for order in ORDERS if FULL else ("ascending", "shuffled"):
        backend = EmulatedMetal(order, seed=7)
        executor = Executor(program, load_weights(program, {}, backend), backend)
        results = executor.run({k: np.array(v, order="C") for k, v in inputs.items()})
        found = found or results
        differ = [k for k in found if found[k].tobytes() != results[k].tobytes()]
        assert not differ, f"results depend on the order of threads ({order}): {', '.join(differ)}"
    assert found is not None
    return found


def run_on_cuda(graph: Graph, inputs: Arrays) -> Arrays:
    """Compile for the GPU at hand and run on it."""
    program = compile_graph(graph, "cuda")
    backend = cuda_gpu.backend()
    executor = Executor(program, load_weights(program, {}, backend), backend)
    return executor.run({k: np.array(v, order="C") for k, v in inputs.items()})


# Targets under test: name -> callable(graph, inputs by name) -> outputs by name.
TARGETS: dict[str, Callable[[Graph, Arrays], Arrays]] = {
    "interp": interp.run,
    "cpu": run_on_cpu,
    "metal": run_on_metal,
    "cuda": run_on_cuda,
}
MARKS = {"cuda": cuda_gpu.marks(), "metal": [pytest.mark.metal]}

DOUBLE = frozenset(("float64",))  # which not every target holds
PROGRAM = 200  # cases that are compiled together, of one family

SUMMING = frozenset(("reduce", "matmul", "conv2d", "attention", "scan", "scatter"))


@dataclass(frozen=True, eq=False)
class Case:
    """One call of one overload. ``str(case)`` names it in messages, such as ``aten.add.Tensor-2-float16``."""

    op_type: str
    op: OpDef
    number: int
    dtype: str
    weights: ClassVar[Collection[int]] = ()  # tensors that are weights of the program, not inputs

    def __str__(self) -> str:
        return f"{self.op_type}-{self.number}-{self.dtype}"

    @property
    def family(self) -> str:
        """The file that declares the op; cases of one family are compiled together."""
        return self.op.family

    @property
    def sample(self) -> Sample:
        return self.op.samples[self.number]

    @property
    def quantised(self) -> bool:
        return self.op_type.startswith("quantized_decomposed.")

    @cached_property
    def overload(self) -> Any:
        return overload_of(self.op_type)

    @cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample's arguments with T replaced by tensors; other values as they stand in IR attrs."""
        count = 0

        def make(a: Any) -> Any:
            nonlocal count
            if isinstance(a, T):
                count += 1
                seed = zlib.crc32(f"{self.op_type}-{self.number}-{count}".encode())
                return make_tensor(a, a.dtype or self.dtype, np.random.default_rng(seed))
            return [make(x) for x in a] if isinstance(a, list | tuple) else a

        return tuple(make(a) for a in self.sample.args), {k: make(v) for k, v in self.sample.kwargs}

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the tensors of the call: those that the sample states, and the results of a quantising op."""
        stated = {a.dtype for a in self.sample.args if isinstance(a, T) and a.dtype}
        return stated | ({str(r.dtype).removeprefix("torch.") for r in self.eager} if self.quantised else set())

    @cached_property
    def encoded(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Inputs and attrs of the IR node for this call."""
        return encode(self.overload._schema, *self.arguments)

    @cached_property
    def eager(self) -> list[torch.Tensor]:
        """PyTorch's results in the dtype under test; where it has no such kernel, float32's rounded to that dtype."""
        try:
            return self._run(lambda t: t)
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for" not in str(error):
                raise
            low = getattr(torch, self.dtype)
            wide = self._run(lambda t: t.float() if t.dtype == low else t)
            return [t.to(low) if t.dtype == torch.float32 else t for t in wide]

    @cached_property
    def reference(self) -> list[torch.Tensor]:
        """The results with every floating argument, and every floating dtype asked for, widened to float64. Rounding to
        integers is defined in the dtype of the arguments, so that of quantised models has PyTorch's results."""
        if self.quantised:
            return self.eager
        return self._run(lambda t: t.double() if t.is_floating_point() else t, wide=True)

    def called_with(
        self, f: Callable[[torch.Tensor], torch.Tensor], wide: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the overload itself, each tensor changed by ``f``; ``wide`` asks for float64 where the call
        asks for a floating dtype."""

        def convert(a: Any) -> Any:
            if isinstance(a, torch.Tensor):
                return f(a)
            if isinstance(a, str) and a in dtypes.DTYPES:
                return torch.float64 if wide and dtypes.is_float(a) else getattr(torch, a)
            return [convert(x) for x in a] if isinstance(a, list) else a

        args, kwargs = self.arguments
        return [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}

    def _run(self, f: Callable[[torch.Tensor], torch.Tensor], wide: bool = False) -> list[torch.Tensor]:
        args, kwargs = self.called_with(f, wide)
        with torch.no_grad():
            out = self.overload(*args, **kwargs)
        if out is None:  # an op without results
            return []
        return list(out) if isinstance(out, tuple | list) else [out]


def overload_of(op_type: str) -> Any:
    """PyTorch's op of an IR name, such as 'aten.add.Tensor'."""
    namespace, name, overload = op_type.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def make_tensor(spec: T, dtype: str, rng: np.random.Generator) -> torch.Tensor:
    """A deterministic tensor of ``spec``; 'transposed' and 'strided' ones really are non-contiguous."""
    shape = list(spec.shape)
    if spec.layout == "transposed" and len(shape) >= 2:
        shape[-2:] = shape[:-3:-1]
    if spec.layout == "strided" and shape:
        shape[-1] *= 2
    kind = dtypes.DTYPES[dtype].kind
    if spec.values is not None:
        wide = np.resize(np.array(spec.values), spec.shape)  # a sample that was made larger repeats its values
    elif kind == "float":
        wide = rng.uniform(spec.low, spec.high, shape)
    elif kind == "bool":
        wide = rng.integers(0, 2, shape)
    else:
        low = max(spec.low, 0) if kind == "uint" else spec.low
        wide = rng.integers(int(np.ceil(low)), max(int(np.ceil(spec.high)), int(np.ceil(low)) + 1), shape)
    t = torch.from_numpy(np.array(wide)).to(getattr(torch, dtype))
    if spec.values is not None:
        return t
    if spec.layout == "transposed" and len(shape) >= 2:
        return t.transpose(-1, -2)
    return t[..., ::2] if spec.layout == "strided" and shape else t


def encode(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The IR form of a call: tensors in schema order, everything else in attrs under its schema name.

    Positional arguments that equal their default are dropped at the tail, as export does.
    """
    args = list(args)
    while args and (p := schema.arguments[len(args) - 1]).has_default_value() and same_value(p.default_value, args[-1]):
        args.pop()
    given = {p.name: a for p, a in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    inputs: list[torch.Tensor] = []
    attrs: dict[str, Any] = {}
    lists: list[list[torch.Tensor | None]] = []
    for p in schema.arguments:
        if p.name not in given:
            continue
        a = given[p.name]
        if isinstance(a, torch.Tensor):
            inputs.append(a)
        elif isinstance(a, list) and "Tensor" in str(p.type):
            tensors = [t for t in a if t is not None]
            inputs += tensors
            lists.append(a)
        elif a is not None or "Tensor" not in str(p.type):
            attrs[p.name] = a
    return inputs, attrs | list_attrs(lists)


def same_value(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """A numpy view with the tensor's own strides."""
    return to_array(t)


def all_cases() -> list[Case]:
    return [
        Case(op_type, op, number, dtype)
        for op_type, op in sorted(REGISTRY.items())
        for number in range(len(op.samples))
        for dtype in op.dtypes
    ]


def cases_for(target: str) -> list[Case]:
    """Every case in numpy. A compiled target runs every sample of a declaration once, in dtypes that take turns (of
    those it has): the first four and every third one of the others, the emulator every fifth. Names of one declaration
    share its lowering, so its samples are dealt out to them. ``NPU_CONFORMANCE=full`` runs all of them in all dtypes.
    """
    cases = all_cases()
    if target == "interp":
        return cases
    supported = target_config(target).dtypes
    narrow = not supported >= DOUBLE
    cases = [
        c
        for c in cases
        if c.dtype in supported and not (narrow and (c.op.arithmetic == "float64" or not c.dtypes <= supported))
    ]
    if FULL:
        return cases
    cases = [c for c in cases if (c.number % 5 == 0 if target == "metal" else c.number < 4 or c.number % 3 == 0)]
    turns: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        turns.setdefault((case.op_type, case.number), []).append(case)
    numbers: dict[str, list[int]] = {}
    for op_type, number in turns:
        numbers.setdefault(op_type, []).append(number)
    return [
        group[turn % len(group)]
        for turn, group in enumerate(turns.values())
        if group[0].number in dealt(group[0], numbers[group[0].op_type])
    ]


def dealt(case: Case, numbers: list[int]) -> list[int]:
    """Those of the samples ``numbers`` that the name of this case runs, out of the names of its declaration: each
    sample has one name, and each name one sample at least."""
    names = case.op.op_types
    share = names.index(case.op_type)
    return numbers[share :: len(names)] or [numbers[share % len(numbers)]]


@dataclass
class Batch:
    """Many cases in one graph. ``failed`` holds the error of each case that could not be lowered."""

    graph: Graph = field(default_factory=Graph)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[Case, list[str]] = field(default_factory=dict)
    summing: dict[Case, bool] = field(default_factory=dict)
    failed: dict[Case, Exception] = field(default_factory=dict)

    def add(self, case: Case) -> None:
        tensors, attrs = case.encoded
        values: list[Value] = []
        for i, t in enumerate(tensors):
            name = f"{case}.in{i}"
            self.inputs[name] = to_numpy(t)
            add = self.graph.weight if i in case.weights else self.graph.input
            values.append(add(name, tuple(t.shape), dtypes.parse(t.dtype)))
        before = len(self.graph.nodes)
        results = lower_call(self.graph, case.op_type, values, attrs)
        names = []
        for i, (got, want) in enumerate(zip(results, case.eager, strict=True)):
            assert got is not None, f"result {i} is missing"
            assert got.shape == tuple(want.shape), f"result {i} is {got}, PyTorch's has shape {list(want.shape)}"
            names.append(f"{case}.out{i}")
            self.graph.outputs.append((names[-1], got.cast(dtypes.parse(want.dtype))))
        self.outputs[case] = names
        self.summing[case] = any(n.op in SUMMING for n in self.graph.nodes[before:])


def compile_cases(cases: Sequence[Case]) -> Batch:
    """One graph for all cases; one that cannot be lowered is reported in ``failed`` and does not disturb the others."""
    batch = Batch()
    for case in cases:
        try:
            batch.add(case)
        except Exception as error:  # reported by the case's own test
            batch.failed[case] = error
    batch.graph.clean()
    return batch


def check(case: Case, got: Sequence[np.ndarray], summing: bool, partial_sum: float = 0.0) -> None:
    """The gate. ``AssertionError`` with the worst element where a result differs from PyTorch's by more than allowed.

    Integers and bools are equal. Floats have infinities and NaN where PyTorch has them, and elsewhere an error against
    the float64 result of at most 1.1 x eager's worst in that tensor plus 2 units in the last place (1 for half types);
    results of sums get 4 float32 units of the largest magnitude involved, since the order of a sum is free, and one of
    ``partial_sum``.
    """
    for number, (out, eager, exact) in enumerate(zip(got, case.eager, case.reference, strict=True)):
        where = f"{case} {case.sample} result {number}"
        want = to_numpy(eager)
        assert out.dtype == want.dtype, f"{where}: dtype {out.dtype}, PyTorch's is {want.dtype}"
        assert out.shape == want.shape, f"{where}: shape {out.shape}, PyTorch's is {want.shape}"
        if not eager.is_floating_point():
            bad = np.argwhere(out != want)
            first = tuple(bad[0]) if len(bad) else ()
            assert not len(bad), f"{where}: {len(bad)} differ, the first at {first}: {out[first]} != {want[first]}"
            continue
        out, want = out.astype(np.float64), want.astype(np.float64)
        special = ~np.isfinite(want)
        same = np.array_equal(out[special], want[special], equal_nan=True) and np.isfinite(out[~special]).all()
        assert same, f"{where}: NaN or infinities differ\n{out}\n{want}"
        wide = np.where(exact.isfinite(), exact.double(), want)
        summed = max(partial_sum / 4, *map(largest, (exact, *case.encoded[0]))) if summing else 0.0
        out, want, wide = (x[~special] for x in (out, want, wide))
        check_errors(where, dtypes.parse(eager.dtype), out, want, wide, summed)


def check_errors(where: str, dtype: str, out: np.ndarray, eager: np.ndarray, exact: np.ndarray, summed: float) -> None:
    """Finite float64 vectors: ours, eager's and the exact result, all rounded to ``dtype`` once but for the last."""
    if not exact.size:
        return
    error, eager_error = np.abs(out - exact), np.abs(eager - exact)
    floor = (2 if dtype in ("float32", "float64") else 1) * ulp(dtype, exact)
    if summed:
        floor = floor + 4 * ulp(dtypes.opmath(dtype), summed)
    # Where float64 lands on the other side of a step, as in floor(), eager's error there excuses no other element.
    usual = eager_error <= 32 * floor
    typical = eager_error[usual].max() if usual.any() else 0.0
    with np.errstate(over="ignore"):
        allowed = 1.1 * np.maximum(eager_error, typical) + floor
    i = int(np.argmax(error - allowed))
    assert error[i] <= allowed[i], (
        f"{where}: error {error[i]:.3g} against float64 ({out[i]} for {exact[i]}); "
        f"eager's worst is {eager_error.max():.3g}, allowed {allowed[i]:.3g}"
    )


def ulp(dtype: str, x: Any) -> np.ndarray:
    """Distance between neighbours of ``dtype`` at the magnitude of ``x``."""
    info = torch.finfo(getattr(torch, dtype))
    return np.ldexp(info.eps, np.frexp(np.maximum(np.abs(x), info.tiny))[1] - 1)


def largest(t: torch.Tensor) -> float:
    """Largest finite magnitude of a floating tensor, else 0."""
    if not t.is_floating_point() or not t.numel():
        return 0.0
    return float(t.double().nan_to_num(0.0, 0.0, 0.0).abs().max())
