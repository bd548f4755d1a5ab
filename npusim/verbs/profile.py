"""``npusim profile``: where the time goes, kernel by kernel, as a table and as files to look at."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.mixed.program import load_program
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target

from ..console import Result, Table
from ..placement import plan_model, refuse_graph_options
from ..profiling import compare as comparison
from ..profiling.report import HEADER, ProfileReport, read_report
from ..random_arrays import random_array, random_weights
from ..sources import (
    activations,
    is_language_model,
    load_language_model,
    read_model,
    refuse_compiling,
    refuse_language_options,
)

if TYPE_CHECKING:
    from npu_compiler.aten.ir import IRGraph

_SHOWN = 20  # rows of a section on a terminal
REGRESSION = 4  # exit status


def run(args: argparse.Namespace) -> Result:
    """Measure a model, show the kernels that lose the most time, and write the requested files. With --compare, the
    exit status is 4 if a section became slower than the threshold allows."""
    from ..profiling.collect import profile

    old = read_report(args.compare) if args.compare else None
    model = _model(args)
    with step(f"measuring {args.model}"):
        counts = {"runs": args.runs, "warmup": args.warmup}
        prompt = {"prompt": args.prompt_len, "cache": args.cache_len}
        report = profile(model, **counts, **prompt, accuracy=args.accuracy)
    changes = comparison.compare(old, report) if old is not None else []
    report = comparison.annotated(report, changes)
    blocks, data = _blocks(report), report.to_json()
    data["files"] = [str(report.save(path)) for path in args.output]
    data["files"] += [str(report.save(path, "trace")) for path in args.trace]
    data["files"] += [str(report.save(path, "model-explorer")) for path in args.model_explorer]
    blocks += [f"wrote {', '.join(data['files'])}"] if data["files"] else []
    if old is None:
        return Result(data, blocks)
    data["compared"] = [
        {"section": c.title, "old": c.old, "new": c.new, "verdict": c.verdict(args.threshold)} for c in changes
    ]
    code = REGRESSION if comparison.slower(changes, args.threshold) else 0
    return Result(data, [*blocks, *_compared(changes, args.threshold)], code)


def _model(args: argparse.Namespace) -> Any:
    """Return the model that the arguments name, as ``profile`` takes it."""
    import npu_compiler
    import npu_runtime
    from npu_runtime.model import weights_beside
    from npu_runtime.partitioned.dag_executor import DAGExecutor

    if is_language_model(args.model):
        refuse_graph_options(args)
        if args.max_len is None and not args.model.endswith(".npubin"):
            args.max_len = max(args.prompt_len, args.cache_len + 1)
        return load_language_model(args)
    refuse_language_options(args)
    target = args.target or default_target()
    if Path(args.model).suffix == ".npubin":
        refuse_compiling(args)
        program = load_program(args.model)
        beside = weights_beside(args.model)
        source = args.weights or (beside if beside.exists() else random_weights(program))
        with step(f"loading {args.model}"):
            return npu_runtime.load(program, source, args.threads)
    ir, weights, _ = read_model(args.model, args.batch)
    options = {} if args.threads is None else {"threads": args.threads}
    backend = npu_runtime.get_backend(target, **options)
    compile_fn = partial(
        npu_compiler.compile, target=target, dtype=args.dtype, disable=args.disable, weights=args.weight_format,
        activations=activations(args),
    )  # fmt: skip
    executor = DAGExecutor(plan_model(ir, target, args), backend, compile_fn)
    executor.load_weights(args.weights or (_random(ir) if weights is None else weights))
    return executor


def _random(ir: IRGraph) -> dict[str, Any]:
    return {w.name: random_array(w.shape, w.dtype) for w in ir.weights if w.name not in ir.constants}


def _blocks(report: ProfileReport) -> list[str | Table]:
    blocks: list[str | Table] = [f"{report.model} on {report.machine} ({report.device}), {report.dtype}"]
    for section in report.sections:
        cells = report.cells(section)
        blocks += ["", report.summary(section), Table(HEADER, cells[:_SHOWN])]
        blocks += [f"… {len(cells) - _SHOWN} more"] if len(cells) > _SHOWN else []
    if report.not_on_npu:
        rows = [(n.node, n.op, n.reason) for n in report.not_on_npu]
        blocks += ["", Table(("not on the NPU", "op", "reason"), rows)]
    return [*blocks, *(f"note: {note}" for note in report.notes)]


def _compared(changes: Sequence[comparison.SectionChange], threshold: float) -> list[str | Table]:
    blocks: list[str | Table] = ["", Table(comparison.TOTALS, [c.cells(threshold) for c in changes])]
    for c in changes:
        blocks += [
            "",
            f"{c.title}: the greatest changes",
            Table(comparison.HEADER, [x.cells() for x in c.changes[:10]]),
        ]
    return blocks
