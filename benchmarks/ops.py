"""Every native op beside PyTorch eager, at three sizes: one figure per declaration in the op registry.

    python benchmarks/ops.py                                  float32 on the CPU, one thread, the worst ratio first
    python benchmarks/ops.py --dtypes float16,bfloat16,float64
    python benchmarks/ops.py --ops 'softmax*' --sizes memory  a glob of overloads, some sizes
    python benchmarks/ops.py --target cuda                    on an NVIDIA GPU
    python benchmarks/ops.py --target cuda --float32-precision tf32     both sides may round operands to TF32
    python benchmarks/ops.py --quick --seconds 90             what can be measured in so many seconds
    python benchmarks/ops.py --gate                           exit status 1 if an op is too slow or wrong
    python benchmarks/ops.py --table                          print the stored results again

The calls are the ops' conformance samples, grown (op_cases.py) until all tensors of a call together have a size:
*small* (4 KiB: the cost of a call), *cache* (512 KiB; 16 MiB on a GPU: the L2 cache) and *memory* (64 MiB; 256 MiB on a
GPU). Many ops are compiled into one program, each as an entry point.

Both sides run in turns in one process, on the same number of threads. For npusim, a run that is bound to its inputs and
outputs (``Executor.bind``) is measured; parameters of modules are weights of the program. For PyTorch, a call of the
overload is measured, which allocates its results. Both include
their call from Python, about 1 µs. If a result of PyTorch is a view of an argument, a contiguous copy of it is
included, because the results of a program are tensors of their own. The C library keeps freed memory, so that PyTorch
does not map new pages for each result. A burst is as many calls as take 0.3 ms (GPU: 1 ms, between two events). Bursts
alternate, and the ratio is the median over the rounds. An op above its limit is measured twice more, so that one
disturbance does not decide.

The verdict is the gate of the conformance tests: every element within units in the last place of float64, or as good
as eager's. For float64 itself PyTorch has no wider dtype: there results may differ from eager's by 32 units in the last
place of an element, or 4 of the largest magnitude, of sums also of a partial sum of random terms.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from op_cases import GrownCase, grown_cases
from ops_results import LIMITS, Figure, guarantee, merged, table, write_pages
from readme import hardware, publish, results_path, without_files

from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import compile_graphs
from npu_compiler.support import dtypes
from npu_runtime import Executor, load_weights
from npu_runtime.registry import get_backend
from tests.conformance.cases import check, compile_cases, to_numpy
from tests.conformance.cases import largest as magnitude

SIZES = {
    "cpu": {"small": 4 << 10, "cache": 512 << 10, "memory": 64 << 20},
    "cuda": {"small": 4 << 10, "cache": 16 << 20, "memory": 256 << 20},
}
BURST_S = {"cpu": 3e-4, "cuda": 1e-3}
ROUNDS, SECONDS = 15, 0.4  # of one op: at most so many rounds, and no more than 3 after so many seconds
FEW_RESULTS = 16  # whose errors do not show what is usual
PROGRAM = 60  # ops that are compiled together
DTYPES = ("float32", "float16", "bfloat16", "float64")


class Machine:
    """The target's backend, PyTorch's device, and how a burst of calls is timed."""

    def __init__(self, target: str, threads: int, float32_precision: str = "highest"):
        self.target = target
        self.float32_precision = float32_precision
        self.gpu = target == "cuda"
        if self.gpu:  # the CPU only checks results
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = float32_precision == "tf32"
        else:
            torch.set_num_threads(threads)
        self.backend = get_backend("cuda") if self.gpu else get_backend("cpu", threads=threads)
        self.stream = torch.cuda.ExternalStream(self.backend.stream.ptr) if self.gpu else None  # type: ignore[attr-defined]
        self.name = torch.cuda.get_device_name() if self.gpu else hardware()
        if not self.gpu and sys.platform == "linux":
            keep_freed_memory()

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        """Return an argument on the device, contiguous as ours are."""
        return t.contiguous().cuda() if self.gpu else t.contiguous()

    def burst(self, run: Callable[[], Any], count: int, ours: bool) -> float:
        """Return the seconds per call of ``count`` calls."""
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - start) / count
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = self.stream if ours else torch.cuda.current_stream()
        first.record(stream)
        for _ in range(count):
            run()
        last.record(stream)
        last.synchronize()
        return first.elapsed_time(last) / count * 1e-3


def keep_freed_memory() -> None:
    """Let the C library keep freed memory: mapping the pages of every new result would be most of eager's time."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


# -- one op ------------------------------------------------------------------------------------------------------------
def eager_call(case: GrownCase, machine: Machine) -> Callable[[], Any]:
    """Return PyTorch's call of a case, with copies of results that are views of arguments."""
    args, kwargs = case.called_with(machine.tensor)
    if machine.gpu:
        args = ["cuda" if a == "cpu" else a for a in args]
    overload = case.overload

    def call() -> Any:
        return overload(*args, **kwargs)

    given = {t.untyped_storage().data_ptr() for t in _tensors([*args, *kwargs.values()])}
    if not any(t.untyped_storage().data_ptr() in given for t in _tensors([call()])):
        return call

    def call_and_copy() -> Any:
        return [t.clone(memory_format=torch.contiguous_format) for t in _tensors([call()])]

    return call_and_copy


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def compare(
    ours: Callable[[], Any], eager: Callable[[], Any], machine: Machine, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds per call of each round's bursts, ours and eager's in turns."""
    contenders = [(ours, True), (eager, False)]
    counts = []
    for run, mine in contenders:
        machine.burst(run, 1, mine)
        counts.append(max(1, min(500, round(BURST_S[machine.target] / machine.burst(run, 1, mine)))))
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    for turn in range(rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        for i in order:
            run, mine = contenders[i]
            taken[i].append(machine.burst(run, counts[i], mine))
        if turn >= 2 and time.perf_counter() > end:
            break
    return taken


def measure(case: GrownCase, executor: Executor, names: list[str], summing: bool, m: Machine, rounds: int) -> Figure:
    """Measure one entry point beside eager, and check its results."""
    copies = [t.clone(memory_format=torch.contiguous_format) for t in case.encoded[0]]  # aligned as models' tensors are
    arrays = {f"{case}.in{i}": to_numpy(t) for i, t in enumerate(copies)}
    given = [m.backend.allocate_buffer(arrays[s.name]) for s in executor.inputs]
    results = [m.backend.allocate_empty(o.shape, dtypes.numpy_dtype(o.dtype)) for o in executor.outputs]
    bound = executor.bind(given, results)
    bound()
    bound.finish()
    arrays = {spec.name: buffer.to_numpy() for spec, buffer in zip(executor.outputs, results, strict=True)}
    wrong = verdict(case, [arrays[n] for n in names], summing)
    case.forget_results()
    eager = eager_call(case, m)
    ours_s, eager_s = compare(bound, eager, m, rounds)
    for _ in range(2):
        if _ratio(ours_s, eager_s) > LIMITS[m.target]:
            more = compare(bound, eager, m, rounds)
            ours_s, eager_s = ours_s + more[0], eager_s + more[1]
    figure = Figure(
        case.op_type, list(case.aliases), case.family, repr(case.sample)[:300], case.dtype, case.size,
        len(executor.entry.calls), statistics.median(ours_s), statistics.median(eager_s), min(ours_s), min(eager_s),
        _ratio(ours_s, eager_s), wrong,
    )  # fmt: skip
    if figure.ratio > LIMITS[m.target]:
        figure.slower_because = guarantee(m.target, case.op_type, case.dtype)
    return figure


def verdict(case: GrownCase, results: list[np.ndarray], summing: bool) -> str:
    """Return what the gate says about the results of a case, in one line; empty if they pass."""
    try:
        results = settle_ties(case, results)
        if case.dtype != "float64":
            check(case, results, summing, partial_sum(case, results))
        for got, want in zip(results, map(to_numpy, case.eager), strict=True):
            if case.dtype == "float64" and got.size:
                largest = np.abs(want[np.isfinite(want)], dtype=np.float64).max(initial=0.0)
                if summing:  # partial sums of both signs, which may be larger than the result
                    inputs = [t for t in case.encoded[0] if t.numel()]
                    terms = math.prod(sorted(t.numel() for t in inputs)[-2:]) / got.size  # at least those of a sum
                    largest = max(largest, random_sum(inputs, max(1.0, terms)))
                unit = np.finfo(got.dtype if np.issubdtype(got.dtype, np.floating) else np.float64).eps
                np.testing.assert_allclose(got, want, rtol=16 * unit, atol=2 * unit * largest)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def partial_sum(case: GrownCase, results: list[np.ndarray]) -> float:
    """Return the magnitude that a partial sum of random terms has if there are few results, else 0."""
    inputs = [t for t in case.encoded[0] if t.numel()]
    count = max((r.size for r in results), default=0)
    if not inputs or not 0 < count <= FEW_RESULTS:
        return 0.0
    return random_sum(inputs, max(t.numel() for t in inputs) / count)


def random_sum(inputs: Sequence[torch.Tensor], terms: float) -> float:
    """Return the usual magnitude of a sum of ``terms`` products of elements of the inputs, of either sign."""
    return math.prod(max(1.0, magnitude(t)) for t in inputs) * math.sqrt(terms)


def settle_ties(case: GrownCase, results: list[np.ndarray]) -> list[np.ndarray]:
    """Return the results of an op that sorts, with PyTorch's positions in place of ours if ours are other places of
    equal elements: their order is free unless the op is stable."""
    if case.family != "sorting" or case.op_type.endswith(".stable") or results[-1].dtype != np.int64:
        return results
    (x,), attrs = case.encoded
    elements, want, ours = to_numpy(x), to_numpy(case.eager[-1]), results[-1]
    if not x.dim() or ours.shape != want.shape:
        return results
    axis = attrs.get("dim", -1) % x.dim()
    if ours.ndim < x.dim():  # one position of each row, whose dim is left out
        ours, want = np.expand_dims(ours, axis), np.expand_dims(want, axis)
    distinct = (np.diff(np.sort(ours, axis), axis=axis) != 0).all()
    if distinct and (ours >= 0).all() and (ours < elements.shape[axis]).all():
        found, wanted = (np.take_along_axis(elements, at, axis).astype(np.float64) for at in (ours, want))
        if np.array_equal(found, wanted, equal_nan=True):
            return [*results[:-1], want.reshape(results[-1].shape)]
    return results


def _ratio(ours: list[float], eager: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, eager, strict=True))


# -- all ops -----------------------------------------------------------------------------------------------------------
def sweep(
    cases: list[GrownCase], machine: Machine, rounds: int, until: float, figures: list[Figure], skipped: dict[str, str]
) -> None:
    """Measure the cases, but begin none at or after ``until`` (of ``time.perf_counter``). Add to ``figures`` the
    results, and to ``skipped`` why the other cases have none."""
    for at in range(0, len(cases), PROGRAM):
        if time.perf_counter() >= until:
            skipped |= {str(case): "no time was left" for case in cases[at:]}
            break
        batch = [replace(case, device="cuda" if machine.gpu else "cpu") for case in cases[at : at + PROGRAM]]
        graphs: dict[str, Graph] = {}
        weights: dict[str, np.ndarray] = {}
        facts: dict[str, tuple[GrownCase, list[str], bool]] = {}
        for case in batch:
            lowered = compile_cases([case])
            held = (
                {f"{case}.in{i}": lowered.inputs[f"{case}.in{i}"].copy() for i in case.weights}
                if lowered.outputs
                else {}
            )
            case.forget()
            if case in lowered.failed:
                skipped[str(case)] = f"{type(lowered.failed[case]).__name__}: {lowered.failed[case]}"[:200]
            elif lowered.outputs[case]:
                entry = f"e{len(graphs)}"
                weights |= held
                graphs[entry] = lowered.graph
                facts[entry] = case, lowered.outputs[case], lowered.summing[case]
        if not graphs:
            continue
        start = time.perf_counter()
        program = compile_graphs(graphs, machine.target, float32_precision=machine.float32_precision)
        print(f"{at + len(batch)} of {len(cases)}: {len(graphs)} compiled in {time.perf_counter() - start:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
        store = load_weights(program, weights, machine.backend)
        for entry, (case, names, summing) in facts.items():
            if time.perf_counter() >= until:
                skipped[str(case)] = "no time was left"
                continue
            try:
                executor = Executor(program, store, machine.backend, entry)
                figures.append(measure(case, executor, names, summing, machine, rounds))
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError) or "not implemented" not in str(error):
                    raise
                skipped[str(case)] = f"PyTorch: {error}".splitlines()[0][:200]
            case.forget()


def _store(results: dict[str, Any]) -> None:
    """Write results into the file of their machine, beside those of other calls there."""
    path = results_path("ops", results["hardware"])
    publish(merged([json.loads(path.read_text()), results]) if path.exists() else results, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=LIMITS, default="cpu")
    parser.add_argument("--ops", default="*", metavar="GLOBS", help="overloads, such as 'softmax*,add.Tensor'")
    parser.add_argument("--sizes", help="some of small, cache and memory; default: all, with --quick small and cache")
    parser.add_argument("--dtypes", default="float32", help=f"some of {', '.join(DTYPES)}, or all")
    parser.add_argument("--threads", type=int, default=1, help="of npusim and of PyTorch, on the CPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="three rounds, and no large tensors")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no measurement after so many seconds")
    parser.add_argument("--float32-precision", choices=("highest", "tf32"), default="highest",
                        help="of products and convolutions of both sides, on a GPU")  # fmt: skip
    parser.add_argument("--gate", action="store_true", help="exit status 1 if an op is above the limit or wrong")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there; a complete run writes to "
                        "benchmarks/results/ops_MACHINE.json")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="print the results in the file of --json; without it, put "
                        "the tables of all machines into docs/performance.md")  # fmt: skip
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="store the results of the parts of a run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.merge:
        _store(merged([json.loads(path.read_text()) for path in args.merge]))
    if args.table and args.json:
        stored = json.loads(args.json.read_text())
        print(table([Figure(**row) for row in stored["rows"]], stored["target"]))
    elif args.table or args.merge:
        write_pages()
    if args.table or args.merge:
        return 0
    until = time.perf_counter() + args.seconds
    sizes = (args.sizes or ("small,cache" if args.quick else "small,cache,memory")).split(",")
    kinds = list(DTYPES) if args.dtypes == "all" else args.dtypes.split(",")
    if unknown := [x for x in sizes if x not in SIZES[args.target]] + [x for x in kinds if x not in DTYPES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    machine = Machine(args.target, args.threads, args.float32_precision)
    wanted = {name: nbytes for name, nbytes in SIZES[args.target].items() if name in sizes}
    cases = [case for kind in kinds for case in grown_cases(args.ops, kind, wanted)]
    if not cases:
        parser.error(f"no op matches {args.ops!r}")
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    try:
        sweep(cases, machine, 3 if args.quick else args.rounds, until, figures, skipped)
    finally:  # an error that the GPU reports ends the run, but leaves the figures
        print(table(figures, args.target))
        for name, why in skipped.items():
            print(f"not measured: {name}: {why}")
    complete = args.ops == "*" and not args.quick and len(sizes) == 3 and not math.isfinite(args.seconds)
    complete = complete and args.float32_precision == "highest"
    said = without_files(sys.argv[1:] if argv is None else argv, ("--json",))
    results = {
        "command": " ".join(["python benchmarks/ops.py", *said]),
        "date": date.today().isoformat(), "hardware": machine.name, "target": args.target, "sizes": wanted,
        "threads": args.threads, "float32_precision": args.float32_precision,
        "versions": {p: version(p) for p in ("torch", "numpy")},
        "rows": [asdict(f) for f in sorted(figures, key=lambda f: -f.ratio)], "not_measured": skipped,
    }  # fmt: skip
    if complete and not args.json:
        _store(results)
        write_pages()
    else:
        publish(results, args.json)
    bad = [f for f in figures if f.wrong or f.too_slow(args.target)]
    return int(args.gate and bool(bad))


if __name__ == "__main__":
    sys.exit(main())
