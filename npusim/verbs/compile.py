"""``npusim compile``: a model to a .npubin file, with its weights if they are known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.partitioning.plan import NPU, PartitionPlan
from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target

from ..builtin import BUILTINS, RANDOM, trained
from ..classes import write_labels
from ..console import Result, Table
from ..placement import plan_model, refuse_graph_options
from ..program_files import emit_source, save_program
from ..sources import activations, is_language_model, read_model, refuse_language_options
from ..weight_errors import error_blocks, weight_errors

if TYPE_CHECKING:
    from npu_compiler.pipeline import Options


def run(args: argparse.Namespace) -> Result:
    """Write a .npubin and, if the weights are known, a safetensors file; with --until, show the graph after a phase."""
    if args.disable == ("help",) or args.until == "help":
        return _steps(args.target or default_target())
    if args.weight_errors and args.until:
        raise InputError("--weight-errors needs the whole program; leave out --until")
    if is_language_model(args.model):
        return _language_model(args)
    refuse_language_options(args)
    from npu_compiler.mixed.compile import compile_plan
    from npu_compiler.pipeline import PHASES
    from npu_compiler.support.text import si

    target = args.target or default_target()
    ir, weights, _ = read_model(args.model, args.batch)
    if args.weight_errors and weights is None:
        raise InputError(f"--weight-errors compares with the weights, which {args.model} does not have")
    plan = plan_model(ir, target, args)
    if args.until is not None and args.until != PHASES[-1][0]:
        return _until(args, plan, target)
    program = compile_plan(plan, target, args.dtype, **_options(args))
    builtin = BUILTINS.get(args.model)
    if builtin is not None and builtin.weights is None:
        program.build["weights"] = RANDOM
    emitted = emit_source(program, args.emit_source)
    output = Path(args.output or f"{Path(args.model).stem}.npubin")
    files = [output]
    if weights is not None:
        files = list(save_program(program, weights, output))
    else:
        program.save(output)
    if builtin is not None and builtin.weights is not None:
        files += write_labels(output)
    t = program.totals
    summary = f"{t['kernels']} kernels, {si(t['flops'], 'FLOP')}, arena {si(t['arena_bytes'], 'B')}"
    written = ", ".join(f"{f} ({si(f.stat().st_size, 'B')})" for f in files)
    data = {"program": program.name, "target": target, "files": [str(f) for f in files], **t}
    lines = [f"{program.name}: {summary}", f"wrote {written}"]
    if isinstance(program, MixedProgram) and program.host_ops:
        data["host_ops"] = program.host_ops
        lines[:1] = [
            program.plan.summary(),
            f"  on the NPU: {summary}",
            f"  on the host: {_shortened(program.host_ops)}",
        ]
        lines.append("running it needs PyTorch, for the ops on the host; npusim describe says why they are there")
    if "weights" in program.build:
        lines.append(f"the weights are {program.build['weights']}; {trained()} have trained ones")
    errors = _weight_errors(args, program, weights, data)
    return Result(data, [*lines, *emitted, *errors])


def _weight_errors(
    args: argparse.Namespace, program: CompiledProgram | MixedProgram, weights: Any, data: dict[str, Any]
) -> list[str | Table]:
    """With --weight-errors, compare the stored matrices with ``weights``: add the errors to ``data``, and return the
    blocks that show them."""
    if not args.weight_errors:
        return []
    errors = weight_errors(program, weights)
    data["weight_errors"] = [e.to_json() for e in errors]
    return error_blocks(errors)


def _options(args: argparse.Namespace) -> Options:
    return {
        "disable": args.disable,
        "weights": args.weight_format,
        "float32_precision": args.float32_precision,
        "speed_over_memory": args.speed_over_memory,
        "activations": activations(args),
        "dump": Path(args.dump).expanduser() if args.dump else None,
    }


def _shortened(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _until(args: argparse.Namespace, plan: PartitionPlan, target: str) -> Result:
    """The graph after the phase or rewrite ``args.until``; of a mixed model, that of every NPU partition."""
    from npu_compiler.pipeline import dump, run_phases

    def text(ir: IRGraph, entry: str) -> str:
        return dump(run_phases(ir, target, args.dtype, args.until, entry, **_options(args)))

    if plan.on_npu:
        shown = text(plan.ir, "main")
        return Result({"phase": args.until, "graph": shown.splitlines()}, [shown])
    graphs = {p.id: text(p.ir, f"p{p.id}") for p in plan.partitions if p.device == NPU}
    blocks: list[str | Table] = [plan.describe(), *(f"\npartition {id}\n{shown}" for id, shown in graphs.items())]
    data = {
        "phase": args.until,
        "plan": plan.to_dict(),
        "graphs": {str(id): g.splitlines() for id, g in graphs.items()},
    }
    return Result(data, blocks)


def _steps(target: str) -> Result:
    """List the names that ``--until`` and ``--disable`` accept."""
    from npu_compiler.artifact.describe import table
    from npu_compiler.pipeline import PASSES, PHASES
    from npu_compiler.targets import get_target

    rows = [("phase", name, text, "") for name, _, text in PHASES]
    rows += [("rewrite", r.name, r.summary, "" if r.required else "yes") for r in get_target(target).rewrites]
    rows += [("pass", name, text, "yes") for name, text in PASSES.items()]
    lines = [f"--until takes phases and rewrites, --disable what can be skipped; target {target}"]
    header = ("", "name", "what it does", "can be skipped")
    data = [{"kind": kind, "name": name, "summary": text, "optional": bool(off)} for kind, name, text, off in rows]
    return Result({"target": target, "steps": data}, [*lines, *table(header, rows)])


def _language_model(args: argparse.Namespace) -> Result:
    """Write the program of a language model, its weights and its manifest."""
    from npu_compiler.artifact.describe import totals
    from npu_compiler.support.text import si
    from npu_runtime.llm.loader import Loader, save_manifest

    refuse_graph_options(args)
    if args.float32_precision != "highest":
        raise InputError("--float32-precision is not an option of language models")
    if args.until or args.dump:
        raise InputError("--until and --dump show one graph; a language model is compiled from several")
    target = args.target or default_target()
    loader = Loader(
        target, args.dtype, args.max_len, weights=args.weight_format or "auto",
        speed_over_memory=args.speed_over_memory, kv_cache=args.kv_cache, activations=args.activations,
    )  # fmt: skip
    program, weights, manifest = loader.compile(args.model)
    emitted = emit_source(program, args.emit_source)
    output = Path(args.output or f"{Path(args.model).name.removesuffix('.gguf')}.npubin")
    with step("writing weights"):
        files = [*save_program(program, weights, output)]
    files.append(save_manifest(manifest, files[0]))
    t = totals(program)
    written = ", ".join(f"{f} ({si(f.stat().st_size, 'B')})" for f in files)
    kernels = ", ".join(f"{name} {len(entry.calls)}" for name, entry in program.entries.items())
    data = {
        "program": manifest.name,
        "target": target,
        "max_len": manifest.max_len,
        "files": [str(f) for f in files],
        **t,
    }
    lines = [f"{manifest.name}: context {manifest.max_len}; kernels: {kernels}", f"wrote {written}"]
    errors = _weight_errors(args, program, weights, data)
    return Result(data, [*lines, *emitted, *errors])
