"""The verbs around one model or one program: compile, run, describe, explain, ops."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.errors import ArtifactError, InputError, NPUError
from npu_compiler.support.files import write_atomic
from npu_compiler.target_config import default_target

from .arrays import read_inputs, save_npz
from .builtin import BUILTINS, RANDOM, captured, trained
from .console import Result, Status, Table

if TYPE_CHECKING:
    from npu_compiler.partitioning.explain import Explanation


def read_model(name: str, batch: int, status: Status) -> tuple[IRGraph, Mapping[str, np.ndarray] | None, Any]:
    """(IR, weights, PyTorch module) of a built-in model, (IR, weights, None) of a .pt2 file, or (IR, None, None) of an
    IR JSON file."""
    if name in BUILTINS:
        with status(f"capturing {name}"):
            module, ir, weights = captured(name, batch, status.downloading)
        return ir, weights, module
    from npu_compiler.aten.json_reader import load_ir

    if not Path(name).exists():
        raise InputError(f"{name}: there is no such file, and no built-in model of that name: {', '.join(BUILTINS)}")
    if Path(name).suffix == ".pt2":
        with status(f"capturing {name}"):
            return (*_read_exported(name), None)
    return load_ir(name), None, None


def _read_exported(path: str) -> tuple[IRGraph, Mapping[str, np.ndarray]]:
    try:
        from npu_compiler.frontend import capture, state_dict_numpy
        from npu_compiler.frontend.exported_file import load_exported
    except ImportError:
        raise InputError(f"{path}: reading it needs PyTorch; install npusim[torch]") from None
    program = load_exported(path)
    return capture(program, name=Path(path).stem), state_dict_numpy(program)


def disabled(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(n for n in args.disable.replace(",", " ").split() if n)


# ------------------------------------------------------------------------------------------------------------ compile


def compile_model(args: argparse.Namespace, status: Status) -> Result:
    """A .npubin - and, for a built-in or language model, its weights - or what there is after a phase or rewrite."""
    from . import generate

    if "help" in (args.disable, args.until):
        return _steps(args.target or default_target())
    if generate.is_language_model(args.model):
        return generate.compile_model(args, status)
    from npu_compiler.artifact.describe import totals
    from npu_compiler.partitioning.partitioner import partition
    from npu_compiler.pipeline import PHASES, compile_ir, dump, run_phases
    from npu_compiler.support.text import si

    from .model import emit_source, save_program
    from .shapes import require_npu

    target = args.target or default_target()
    if args.dump:
        os.environ["NPU_DUMP"] = args.dump
    ir, weights, _ = read_model(args.model, args.batch, status)
    plan = partition(ir, target=target)
    require_npu(plan)
    with status(f"compiling {ir.model_name}"):
        if args.until is not None and args.until != PHASES[-1][0]:
            state = run_phases(plan.ir, target, args.dtype, disabled(args), args.until, args.weight_format)
            text = dump(state)
            return Result({"phase": args.until, "graph": text.splitlines()}, [text])
        program = compile_ir(plan.ir, target, args.dtype, disabled(args), args.weight_format)
    builtin = BUILTINS.get(args.model)
    if builtin is not None and builtin.weights is None:
        program.build["weights"] = RANDOM
    output = Path(args.output or f"{Path(args.model).stem}.npubin")
    files = [output]
    if weights is not None:
        files = list(save_program(program, weights, output))
    else:
        program.save(output)
    if builtin is not None and builtin.weights is not None:
        files += _write_labels(output, status)
    t = totals(program)
    summary = f"{t['kernels']} kernels, {si(t['flops'], 'FLOP')}, arena {si(t['arena_bytes'], 'B')}"
    written = ", ".join(f"{f} ({si(f.stat().st_size, 'B')})" for f in files)
    data = {"program": program.name, "target": target, "files": [str(f) for f in files], **t}
    lines = [f"{program.name}: {summary}", f"wrote {written}"]
    if "weights" in program.build:
        lines.append(f"the weights are {program.build['weights']}; {trained()} have trained ones")
    return Result(data, [*lines, *emit_source(program, args.emit_source)])


def _steps(target: str) -> Result:
    """What ``--until`` and ``--disable`` can name."""
    from npu_compiler.artifact.describe import table
    from npu_compiler.pipeline import PASSES, PHASES
    from npu_compiler.targets import get_target

    rows = [("phase", name, text, "") for name, _, text in PHASES]
    rows += [("rewrite", r.name, r.summary, "" if r.required else "yes") for r in get_target(target).rewrites]
    rows += [("pass", name, text, "yes") for name, text in PASSES.items()]
    lines = [f"--until takes phases and rewrites, --disable what can be left out; target {target}"]
    header = ("", "name", "what it does", "can be left out")
    data = [{"kind": kind, "name": name, "summary": text, "optional": bool(off)} for kind, name, text, off in rows]
    return Result({"target": target, "steps": data}, [*lines, *table(header, rows)])


def _write_labels(program: Path, status: Status) -> list[Path]:
    """The names of ImageNet's classes, where ``npusim run`` looks for them; nothing, and a warning, without network."""
    from .models.download import RegistryUnavailable
    from .models.weights import imagenet_labels

    path = program.with_suffix(".labels.txt")
    try:
        with status("loading the names of the classes"):
            names = imagenet_labels(progress=status.downloading)
    except RegistryUnavailable as error:
        warnings.warn(f"classes will be shown without names: {error}", stacklevel=2)
        return []
    try:
        write_atomic(path, ("\n".join(names) + "\n").encode())
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None
    return [path]


# ---------------------------------------------------------------------------------------------------------------- run


def load_program(path: str, weights: str | None, threads: int | None, status: Status, from_source: bool = False) -> Any:
    """A runnable model; the weights default to the file of the same name beside the program."""
    import npu_runtime

    program = CompiledProgram.load(path)
    beside = Path(path).with_suffix(".safetensors")
    if weights is None and program.weights and not beside.exists():
        raise InputError(f"{path} needs {len(program.weights)} weights: pass --weights, or put them into {beside}")
    source = weights or (beside if beside.exists() else None)
    with status(f"loading {path}"):
        return npu_runtime.load(program, source, threads, from_source)


def run_program(args: argparse.Namespace, status: Status) -> Result:
    """Outputs of one run: a summary, class names for a classifier, and all values with --output."""
    model = load_program(args.program, args.weights, args.threads, status, args.from_source)
    executor = model.executor()
    inputs = read_inputs(args.input, executor.inputs, model.program.name)
    outputs: dict[str, np.ndarray] = executor.run(inputs)
    header = ("output", "dtype", "shape", "min", "max", "mean")
    blocks: list[str | Table] = [Table(header, list(map(_row, outputs.items())))]
    data: dict[str, Any] = {"program": model.program.name, "outputs": {k: _facts(v) for k, v in outputs.items()}}
    scores = next(iter(outputs.values())) if len(outputs) == 1 else None
    if scores is not None and scores.ndim == 2 and scores.shape[1] == 1000:
        names = _labels(args.labels, Path(args.program))
        data["top5"] = [top_classes(row, names) for row in scores]
        blocks += [_top_table(rows) for rows in data["top5"]]
        if "weights" in model.program.build:
            blocks.append(f"the weights are {model.program.build['weights']}")
    if args.output:
        save_npz(args.output, outputs)
        blocks.append(f"wrote {args.output}")
        data["file"] = args.output
    return Result(data, blocks)


def top_classes(scores: np.ndarray, names: list[str] | None, count: int = 5) -> list[dict[str, Any]]:
    """The ``count`` most likely classes of one row of logits: index, name (or None) and softmax probability."""
    x = scores.astype(np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    best = np.argsort(-p, kind="stable")[:count]
    return [{"class": int(i), "name": names[i] if names else None, "probability": float(p[i])} for i in best]


def _top_table(rows: list[dict[str, Any]]) -> Table:
    shown = [(f"{r['probability']:.4f}", r["class"], r["name"] or "") for r in rows]
    return Table(("probability", "class", "name"), shown)


def _labels(given: str | None, program: Path) -> list[str] | None:
    path = Path(given) if given else program.with_suffix(".labels.txt")
    if not given and not path.exists():
        return None
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(names) != 1000:
        raise InputError(f"{path}: {len(names)} class names, expected 1000")
    return names


def _facts(v: np.ndarray) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": str(v.dtype), "shape": list(v.shape)}
    if v.size and v.dtype.kind != "c":
        wide = v.astype(np.float64)
        numbers = {"min": wide.min(), "max": wide.max(), "mean": wide.mean()}
        facts |= {k: float(n) if np.isfinite(n) else str(n) for k, n in numbers.items()}
    return facts


def _row(item: tuple[str, np.ndarray]) -> tuple[object, ...]:
    name, value = item
    facts = _facts(value)
    numbers = (f"{n:.5g}" if isinstance(n := facts.get(k, ""), float) else n for k in ("min", "max", "mean"))
    return (name, facts["dtype"], facts["shape"], *numbers)


# ------------------------------------------------------------------------------------------- describe, explain, ops


def describe(args: argparse.Namespace, status: Status) -> Result:
    """A program's text and data."""
    program = CompiledProgram.load(args.program)
    return Result({"program": program.to_json()}, [program.describe().rstrip()])


def explain_model(args: argparse.Namespace, status: Status) -> Result:
    """The answer to "why is this op not on the NPU?"."""
    from npu_compiler.partitioning.explain import explain
    from npu_compiler.partitioning.partitioner import partition

    from .shapes import require_npu

    target = args.target or default_target()
    placement = {"force_cpu": args.force_cpu, "minimise_transfers": not args.no_minimise_transfers}
    ir, _, _ = read_model(args.model, 1, status)
    with status(f"checking {ir.model_name}"):
        explanation = explain(ir, target, **placement)
    blocks = explanation_blocks(explanation)
    data = explanation.to_dict()
    if args.plan or args.no_fallback:
        plan = partition(ir, target=target, **placement)
        if args.no_fallback:
            require_npu(plan)
        blocks += ["", str(plan)]
        data["plan"] = plan.to_dict()
    return Result(data, blocks)


def explanation_blocks(explanation: Explanation) -> list[str | Table]:
    blocks: list[str | Table] = [explanation.summary()]
    if rows := explanation.rows():
        blocks += ["", Table(("op", "count", "reason", "fix"), rows)]
    if hints := explanation.hints():
        blocks += ["", Table(("op", "count", "advice"), hints)]
    return blocks


def operators(args: argparse.Namespace, status: Status) -> Result:
    """The operator table, whole or filtered."""
    from npu_compiler.ops.table import operators as native
    from npu_compiler.ops.table import operators_markdown

    if args.markdown and args.pattern:
        raise NPUError("--markdown writes the whole page; leave out the pattern")
    if args.markdown:
        return Result({"markdown": operators_markdown()}, [operators_markdown().rstrip()])
    rows = [r for r in native() if args.pattern in r.op_type]
    cells = [(r.op_type, r.family, " ".join(r.dtypes), r.samples, r.doc) for r in rows]
    table = Table(("op", "family", "tested dtypes", "samples", "what it computes"), cells)
    data = {"count": len(rows), "ops": [asdict(r) for r in rows]}
    return Result(data, [table, "", f"{len(rows)} native overloads"])
