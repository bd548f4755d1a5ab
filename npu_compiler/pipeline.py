"""The compiler: ``PHASES`` in order. ``--until`` and ``NPU_DUMP`` know each of their names, and those of the target's
rewrites, which are the steps of phase ``rewrite``.

Passes and rewrites can be left out one by one: ``compile(disable=("fold_batch_norm",))`` or ``NPU_DISABLE=…``;
:func:`switches` lists them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from .artifact.program import CompiledProgram
from .aten.ir import IRGraph, Location
from .aten.json_reader import graph_weights_used
from .graph.graph import Graph
from .graph.text import graph_text
from .link import link
from .partitioning.constraint_checker import lower_checked
from .passes.quantize import one_row_weights
from .phases import (
    PASSES,
    State,
    fusions,
    run_fold,
    run_fuse,
    run_layout,
    run_normalise,
    run_rewrites,
    run_schedule,
    switches,
)
from .schedule import checks
from .schedule.kernel import Loops, Operand
from .schedule.memory_planner import plan_memory
from .schedule.rewrite import ScheduleRewrite
from .support import env, log, progress
from .support.dtypes import DTYPES, storage_dtype
from .support.errors import CompileError, ConfigError
from .target_config import CompileChoices, TargetConfig, devices, target_config, target_names
from .targets import get_target
from .weights.format import WeightFormats, Weights, known_formats, weight_format

__all__ = [
    "PASSES", "PHASES", "Options", "State", "check_weight_names", "compile_entries", "compile_graph", "compile_graphs",
    "compile_ir", "dump", "run_graph", "run_phases", "switches",
]  # fmt: skip


_log = logging.getLogger(__name__)


def _lower(s: State) -> None:
    assert s.ir is not None
    s.graph = lower_checked(s.ir, s.config, s.dtype)


def _rewrite(s: State) -> None:
    """Rewrite kernels. If a fusion made a kernel that the target does not support, schedule the graph again without
    fusions, as the constraint checker did; weights stay in the format that the caller chose."""
    if run_rewrites(s):
        return
    if s.refused_kernels() and s.ir is not None:
        disable = fusions(s.config) | set(s.disable)
        plain = State(s.ir, s.config, s.dtype, disable, choices=s.choices, weights=s.weights, one_row=s.one_row)
        for f in (_lower, run_normalise, run_layout, run_fold, run_fuse, run_schedule, run_rewrites):
            f(plain)
        s.graph, s.groups, s.schedule, s.recipes = plain.graph, plain.groups, plain.schedule, plain.recipes
    if refused := s.refused_kernels():
        ops = {n.name: n.op_type for n in s.ir.nodes} if s.ir is not None else {}
        lines = "\n".join(f"  kernel {k.name} (from {', '.join(k.sources)}): {reason}" for k, reason in refused)
        reasons = [(name, ops.get(name, ""), reason) for k, reason in refused for name in k.sources]
        raise CompileError(f"the {s.config.name} target does not support {len(refused)} kernel(s):\n{lines}", reasons)


def _memory(s: State) -> None:
    assert s.schedule is not None
    plan_memory(s.schedule, s.config.buffer_align, residuals=s.config.residuals_in_place)


def _codegen(s: State) -> None:
    s.program = _link({"main": s})


PHASES: tuple[tuple[str, Callable[[State], None], str], ...] = (
    ("lower", _lower, "lower ATen ops to primitives, by the op registry"),
    ("normalise", run_normalise, "remove no-ops and common subexpressions, fold constants, find attention"),
    ("layout", run_layout, "choose channels-last layout, fold padding into convolutions"),
    ("fold", run_fold, "fold batch norm and per-channel scales into weights, as load-time recipes"),
    ("fuse", run_fuse, "group nodes into kernels: epilogues, pointwise chains, loop nests"),
    ("schedule", run_schedule, "make kernels over strided buffers"),
    ("rewrite", _rewrite, "rewrite kernels for the target"),
    ("memory", _memory, "give every intermediate an offset in one arena"),
    ("codegen", _codegen, "generate and compile the sources"),
)


_SCHEDULE = [name for name, _, _ in PHASES].index("schedule")


class Options(TypedDict, total=False):
    """What a caller chooses about a compilation, besides the model, the target and the dtype.

    ``disable``, ``weights``, ``float32_precision``, ``speed_over_memory`` and ``activations`` are those of
    :func:`npu_compiler.compile`. ``dump``: the directory where every phase writes its graph, and code generation the
    sources (default ``NPU_DUMP``).
    """

    disable: Collection[str]
    weights: Weights
    float32_precision: str
    speed_over_memory: bool
    activations: str | None
    dump: Path | None


def run_phases(
    ir: IRGraph,
    target: str,
    dtype: Any = None,
    until: str | None = None,
    entry: str = "main",
    **options: Unpack[Options],
) -> State:
    """Run the compiler up to and including ``until``, a phase or a rewrite of the target (default: all). ``entry``: the
    name of the entry point, which dumped files start with unless it is 'main'."""
    phases = [name for name, _, _ in PHASES]
    rewrites = [r.name for r in get_target(target).rewrites]
    if until is not None and until not in (*phases, *rewrites):
        known = f"phases are: {', '.join(phases)}; rewrites of {target}: {', '.join(rewrites)}"
        raise CompileError(f"unknown phase {until!r}; {known}")
    return _run(_state(ir, target, dtype, entry, **options), 0, until)


def _state(
    ir: IRGraph,
    target: str,
    dtype: Any,
    entry: str,
    *,
    disable: Collection[str] = (),
    weights: Weights = None,
    float32_precision: str = "highest",
    speed_over_memory: bool = False,
    activations: str | None = None,
    dump: Path | None = None,
) -> State:
    """Return the state before the first phase. Raises ``ConfigError`` for options that do not fit the target."""
    config, choices = target_config(target), CompileChoices(float32_precision, activations, speed_over_memory)
    choices.check(config)
    kind = None if dtype is None else storage_dtype(dtype)
    off, formats = _switches(disable, target), _formats(weights, config, activations)
    dump = dump or env.dump_dir()
    return State(ir, config, kind, off, entry=entry, choices=choices, weights=formats, dump=dump)


def _formats(weights: Weights, config: TargetConfig, activations: str | None) -> WeightFormats:
    """Return the weight formats of these names. Raises ``ConfigError`` if the target has no reader for one,
    or if activations are quantised and no matrices could have that type."""
    formats = WeightFormats.of(weights)
    if activations is not None and not any(format.activations == activations for format in formats):
        known = ", ".join(n for n in known_formats() if (f := weight_format(n)) and f.activations == activations)
        raise ConfigError(
            f"activations={activations!r} needs weights in an {activations} format: weights= one of {known}"
        )
    for format in formats:
        if format.layout(config.panel) is None:
            readable = [n for n in known_formats() if (f := weight_format(n)) and f.layout(config.panel) is not None]
            known = ", ".join([*readable, "none"])
            raise ConfigError(f"the {config.name} target has no reader for weights in {format.name}; it takes {known}")
    return formats


def check_weight_names(irs: Sequence[IRGraph], weights: Weights) -> None:
    """Raise ``ConfigError`` if a weight with a format of its own is not one that a graph of this model reads."""
    if isinstance(weights, Mapping):
        read = {key for ir in irs for key in ir.weights_of_model or graph_weights_used(ir)}
        declared = {w.name for ir in irs for w in ir.weights}
        WeightFormats.of(weights).check_names(irs[0].model_name, read, declared)


def _switches(disable: Collection[str], target: str) -> frozenset[str]:
    """Return what the caller or ``NPU_DISABLE`` disables. Names of another target's rewrites have no effect."""
    off = frozenset((disable,) if isinstance(disable, str) else disable) | env.disabled()
    if not off:
        return off
    if required := next((r for r in get_target(target).rewrites if r.name in off and r.required), None):
        raise CompileError(f"cannot disable {required.name}: {required.required}")
    specs = [spec for name in target_names() for spec in ([d.spec for d in devices(name)] or [name])]
    unknown = sorted(off - set(PASSES) - {r.name for spec in specs for r in get_target(spec).rewrites})
    if unknown:
        raise CompileError(f"cannot disable {', '.join(unknown)}; these can be: {', '.join(switches(target))}")
    return off


def _run(state: State, first: int, until: str | None) -> State:
    verify = env.verify()
    reference = checks.Reference() if verify > 1 else None
    if reference is not None and first > 0:
        reference.check(state.graph)
    names = [name for name, _, _ in PHASES]

    def check(step: str) -> None:
        if verify and state.program is None:
            s = state
            checks.check_step(step, s.graph, s.groups, s.schedule, s.recipes, s.config.buffer_align, reference)

    def after_rewrite(number: int, rewrite: ScheduleRewrite, changed: bool) -> bool:
        if changed:
            _trace(state, f"{names.index('rewrite')}_{number:02}", rewrite.name)
            check(f"rewrite {rewrite.name!r}")
        return rewrite.name == until

    state.after_rewrite = after_rewrite
    compiled = f"{_name(state)} ({state.entry})" if state.entry != "main" else _name(state)
    with log.debugging(), progress.step(f"compiling {compiled}", len(PHASES) - first) as step:
        for number, (name, f, _) in list(enumerate(PHASES))[first:]:
            step.update(f"compiling {compiled}: {name}")
            start = time.perf_counter()
            f(state)
            _trace(state, str(number), name, time.perf_counter() - start)
            check(f"phase {name!r}")
            step.advance()
            if name == until or (name == "rewrite" and until is not None and until not in names):
                break
    return state


def _name(state: State) -> str:
    """Return the name of the model."""
    return state.ir.model_name if state.ir is not None else state.graph.name


def _trace(state: State, number: str, name: str, seconds: float | None = None) -> None:
    """Log (``NPU_DEBUG``) and write (``state.dump``) the program after a phase or a rewrite."""
    if seconds is not None:
        _log.info("%-10s %8.1f ms  %d nodes", name, seconds * 1e3, len(state.graph.nodes))
    elif state.schedule is not None:
        _log.info("  %s leaves %d kernels", name, len(state.schedule.kernels))
    if name == "memory" and _log.isEnabledFor(log.KERNELS):
        _log.log(log.KERNELS, "%s", _kernels(state))
    elif _log.isEnabledFor(log.GRAPHS):
        _log.log(log.GRAPHS, "%s", dump(state))
    if state.dump is not None:
        stem = "_".join(re.sub(r"\W", "_", part) for part in (state.entry, number, name) if part != "main")
        _write_dump(state.dump / f"{stem}.txt", dump(state) + "\n")


def _trace_sources(program: CompiledProgram, folder: Path | None) -> None:
    """Print the sources, or write them into ``folder``. Those of a partition of a mixed model get a folder with the
    entry point's name."""
    part = next(iter(program.entries)) if len(program.entries) == 1 and "main" not in program.entries else ""
    for file, text in program.sources.items():
        _log.log(log.SOURCES, "// %s\n%s", file, text)
        if folder is not None:
            _write_dump(folder / part / file, text)


def _write_dump(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"NPU_DUMP (--dump): {error.filename or path} cannot be written: {error.strerror or error}"
        ) from None


def dump(state: State) -> str:
    """Return the program at this point as text: the graph, then the kernels if there are any."""
    text = graph_text(state.graph)
    return f"{text}\n\n{_kernels(state)}" if state.schedule is not None else text


def _kernels(state: State) -> str:
    assert state.schedule is not None

    def show(op: Operand) -> str:
        b = op.buffer
        at = (
            f"{b.kind} {b.name}"
            if b.kind != "arena"
            else f"arena+{b.offset + op.offset * DTYPES[b.dtype].size} {b.name}"
        )
        order = "" if op.contiguous else f" strides {list(op.strides)}"
        return f"{at}: {b.dtype}{list(op.shape)}{order}"

    lines = [f"{len(state.schedule.kernels)} kernels, arena of {state.schedule.arena_bytes} bytes"]
    for k in state.schedule.kernels:
        body = k.body if isinstance(k, Loops) else None
        loops = f" over {list(body.domain)}" + (f", reduced {list(body.axes)}" if body.axes else "") if body else ""
        parameters = "".join(f" {key}={value}" for key, value in k.parameters().items())
        lines.append(f"{k.name}: {k.kind}{loops}{parameters}" + (f"  # {', '.join(k.sources)}" if k.sources else ""))
        lines += [f"    in{i}  = {show(op)}" for i, op in enumerate(k.inputs)]
        lines += [f"    out{i} = {show(op)}" for i, op in enumerate(k.outputs)]
        lines += [f"    {stage}" for stage in k.text().split("; ") if stage]
    return "\n".join(lines)


def compile_ir(ir: IRGraph, target: str = "cpu", dtype: Any = None, **options: Unpack[Options]) -> CompiledProgram:
    """Run all phases and return the artifact. The errors are those of :func:`npu_compiler.compile`."""
    return compile_entries({"main": ir}, target, dtype, **options)


def compile_entries(
    irs: Mapping[str, IRGraph], target: str = "cpu", dtype: Any = None, **options: Unpack[Options]
) -> CompiledProgram:
    """Compile several graphs of one model (a prefill and a decode step, say) into entry points of one program, which
    share weights and state. The errors are those of :func:`npu_compiler.compile`; loading weights whose values do not
    fit their format raises ``IncompressibleError``."""
    states = {n: _state(ir, target, dtype, n, **options) for n, ir in irs.items()}
    check_weight_names(list(irs.values()), options.get("weights"))
    default = next(iter(states.values())).weights.default
    first = 0
    if len(states) > 1 and default is not None and default.lossless:
        for s in states.values():
            _run(s, 0, "fuse")
        one_row = frozenset().union(*(one_row_weights(s.graph) for s in states.values()))
        states, first = {n: replace(s, one_row=one_row) for n, s in states.items()}, _SCHEDULE
    return _link({n: _run(s, first, "memory") for n, s in states.items()})


def compile_unshared(ir: IRGraph, target: str = "cpu", dtype: Any = None, **options: Unpack[Options]) -> State:
    """Compile like :func:`compile_ir`, but let no two buffers share memory: after a run, the arena holds the results of
    every kernel, so that each can be checked. The state has the ``program`` and its ``schedule``."""
    state = run_phases(ir, target, dtype, "rewrite", **options)
    assert state.schedule is not None
    plan_memory(state.schedule, state.config.buffer_align, share=False)
    state.program = _link({"main": state})
    return state


def compile_graph(graph: Graph, target: str = "cpu") -> CompiledProgram:
    """Compile a core graph, which is changed, from phase ``normalise`` on."""
    return compile_graphs({"main": graph}, target)


def compile_graphs(
    graphs: Mapping[str, Graph],
    target: str = "cpu",
    disable: Collection[str] = (),
    float32_precision: str = "highest",
) -> CompiledProgram:
    """Compile core graphs, which are changed, into entry points of one program. See :func:`compile_graph`."""
    return _link({n: run_graph(g, target, disable, "memory", n, float32_precision) for n, g in graphs.items()})


def run_graph(
    graph: Graph,
    target: str = "cpu",
    disable: Collection[str] = (),
    until: str = "memory",
    entry: str = "main",
    float32_precision: str = "highest",
) -> State:
    """Run the phases on a core graph, which is changed, from ``normalise`` up to and including ``until``."""
    config, choices = target_config(target), CompileChoices(float32_precision)
    choices.check(config)
    off, dump = _switches(disable, target), env.dump_dir()
    return _run(State(None, config, None, off, graph, entry=entry, choices=choices, dump=dump), 1, until)


def _link(states: Mapping[str, State]) -> CompiledProgram:
    first = next(iter(states.values()))
    name = _name(first)
    dtype = first.dtype or (main_dtype(first.ir) if first.ir is not None else "float32")
    entries = {}
    for entry, s in states.items():
        assert s.schedule is not None
        entries[entry] = (s.schedule, s.recipes)
    device = first.config.device
    spec = device.spec if device is not None else ""
    with log.debugging(), progress.step(f"generating code for {name}"):
        locations = {n: _locations(s) for n, s in states.items()}
        irs = [s.ir for s in states.values() if s.ir is not None]
        initial = {u.key: ir.constants[u.key] for ir in irs for u in ir.state if u.key in ir.constants}
        program = link(name, dtype, entries, get_target(first.config), spec, locations, initial)
        _trace_sources(program, first.dump)
    return program


def _locations(state: State) -> dict[str, Location]:
    """Where the IR nodes of an entry point come from, as far as its IR tells."""
    nodes = state.ir.nodes if state.ir is not None else []
    return {n.name: n.location for n in nodes if n.location is not None}


def main_dtype(ir: IRGraph) -> str:
    """Return the dtype of most weights, or of most inputs if there are none: what the program computes in."""
    totals: dict[str, int] = {}
    for t in (*ir.weights, *ir.graph_inputs):
        totals[t.dtype] = totals.get(t.dtype, 0) + t.numel
    return max(totals, key=lambda d: totals[d]) if totals else "float32"
