"""From a model to its report: runs the model, and combines times, costs, places, memory and bounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram, EntryPoint, KernelCall
from npu_compiler.artifact.spec import BufferSpec
from npu_compiler.aten.ir import Location
from npu_compiler.partitioning.plan import NPU, Partition, PartitionPlan, TransferOp, name_of
from npu_compiler.support.errors import ConfigError, InputError
from npu_compiler.support.text import tensor_text
from npu_compiler.target_config import Roofline
from npu_compiler.targets import get_target
from npu_runtime.arguments import ordered
from npu_runtime.backends.base import Backend
from npu_runtime.executor import Executor
from npu_runtime.model import Model as RuntimeModel
from npu_runtime.profiler import EntryProfile

from ..random_arrays import random_array
from .bounds import bounds, operand_dtype
from .memory import arena_of, held_by
from .records import Limits, NotOnNPU, Place, Row, Section
from .report import ProfileReport
from .roofline import roofline_of

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM
    from npu_runtime.partitioned.dag_executor import DAGExecutor
    from npu_runtime.partitioned.profile import PlanProfile, StepTimes

    from ..builder.model import Model

Made = dict[str, int]  # the row that made a value last, by the value's name at the boundaries of partitions


def profile(
    model: Model | DAGExecutor | RuntimeModel | Executor | LLM,
    inputs: Any = None,
    *,
    runs: int = 20,
    warmup: int = 3,
    entry: str | None = None,
    prompt: int = 128,
    cache: int = 128,
    accuracy: bool = False,
) -> ProfileReport:
    """Measure a model kernel by kernel.

    Args:
        model: from ``npusim.build``, ``npu_runtime.load`` or ``LLM.load``, or an executor.
        inputs: arrays by name or in order; None: small random numbers. A language model takes none.
        runs: number of measured runs.
        warmup: number of runs before them.
        entry: an entry point of a program; None: all of them.
        prompt: tokens of a language model's prompt.
        cache: tokens before a language model's decode step.
        accuracy: also compare each kernel with float64 (:mod:`npusim.profiling.accuracy`). It needs the IR, which a
            model of ``npusim.build`` has, and the time of the computation in numpy.

    Raises:
        ConfigError: there is nothing to measure.
        InputError: the inputs are not those of the model, or a prompt does not fit the context.
    """
    from npu_runtime.llm.model import LLM
    from npu_runtime.partitioned.dag_executor import DAGExecutor

    counts = {"runs": runs, "warmup": warmup}
    if accuracy and not isinstance(getattr(model, "executor", model), DAGExecutor):
        raise ConfigError("the accuracy of kernels needs a model that npusim compiled itself, from its IR")
    if isinstance(model, LLM):
        if inputs is not None or entry is not None:
            raise InputError("a language model is profiled with random tokens: give prompt and cache instead of inputs")
        return _of_llm(model, prompt, cache, counts)
    if isinstance(model, Executor):
        return _of_executors([model], inputs, counts)
    if isinstance(model, RuntimeModel):
        names = [entry] if entry is not None else list(model.program.entries)
        return _of_executors([model.executor(name) for name in names], inputs, counts)
    executor = getattr(model, "executor", model)
    if not isinstance(executor, DAGExecutor):
        raise ConfigError(f"a {type(model).__name__} cannot be profiled; build or load a model first")
    report = _of_plan(executor, inputs, counts)
    return _with_errors(report, executor, inputs) if accuracy else report


# -- kinds of models ------------------------------------------------------------------------------------------------
def _of_executors(executors: Sequence[Executor], inputs: Any, counts: dict[str, int]) -> ProfileReport:
    first = executors[0]
    roofline = roofline_of(first.program, first.backend)
    measured = [e.profile(_examples(e.inputs) if inputs is None else inputs, **counts) for e in executors]
    titles = [p.entry.name if len(executors) > 1 else p.program.name for p in measured]
    sections = [_entry_section(p, roofline, title) for p, title in zip(measured, titles, strict=True)]
    return _report(first.program, first.backend, sections, [e.entry for e in executors], roofline)


def _of_llm(llm: LLM, prompt: int, cache: int, counts: dict[str, int]) -> ProfileReport:
    backend = llm.executor(1).backend
    roofline, measured = roofline_of(llm.program, backend), llm.profile(prompt, cache, **counts)
    sections = []
    for p in measured[:-1]:
        title = f"prefill of {prompt}" if p.count == 1 and p.tokens == prompt else f"{p.tokens} tokens of {prompt}"
        sections.append(_entry_section(p.times, roofline, f"{title} at position {p.start}", p.count))
    sections.append(_entry_section(measured[-1].times, roofline, f"decode after {cache} tokens"))
    report = _report(llm.program, backend, sections, [p.times.entry for p in measured], roofline)
    return _renamed(report, llm.manifest.name)


def _of_plan(executor: DAGExecutor, inputs: Any, counts: dict[str, int]) -> ProfileReport:
    plan = executor.plan
    programs = list(executor.programs.values())
    examples = _examples(plan.inputs) if inputs is None else inputs
    alone = len(plan.partitions) == 1 and bool(programs)
    if alone:
        (only,) = executor.executors.values()
        measured = only.profile(examples, **counts)
    roofline = roofline_of(programs[0], executor.backend) if programs else None
    if alone:
        sections = [_entry_section(measured, roofline, plan.ir.model_name or "model")]
    else:
        sections = [_plan_section(executor, executor.profile(examples, **counts), roofline)]
    entries = [e for p in programs for e in p.entries.values()]
    report = _report(programs[0] if programs else None, executor.backend, sections, entries, roofline, programs)
    nodes = {n.name: n for n in plan.ir.nodes}
    missing = [
        NotOnNPU(name, nodes[name].op_type, reason.detail, reason.fix, _places([nodes[name].location]))
        for name, reason in plan.reasons.items()
        if name in nodes
    ]
    return _renamed(report, plan.ir.model_name or "model", missing)


def _with_errors(report: ProfileReport, executor: DAGExecutor, inputs: Any) -> ProfileReport:
    """Return the report with the error of each kernel."""
    from .accuracy import plan_errors

    found = plan_errors(executor, None if inputs is None else ordered(executor.plan.inputs, inputs, "input"))
    (section,) = report.sections
    steps = {n: s.id for n, s in enumerate(executor.plan.steps) if isinstance(s, Partition)}
    alone = len(executor.plan.partitions) == 1
    left = {part: iter(errors) for part, errors in found.items()}
    rows = []
    for r in section.rows:
        errors = left.get(next(iter(found)) if alone else steps[r.part]) if r.device == NPU else None
        rows.append(r if errors is None else replace(r, error=next(errors)))
    return replace(report, sections=(replace(section, rows=tuple(rows)),))


def _renamed(report: ProfileReport, name: str, missing: Sequence[NotOnNPU] = ()) -> ProfileReport:
    return replace(report, model=name, not_on_npu=tuple(missing))


def _report(
    program: CompiledProgram | None,
    backend: Backend,
    sections: Sequence[Section],
    entries: Sequence[EntryPoint],
    roofline: Roofline | None,
    programs: Sequence[CompiledProgram] = (),
) -> ProfileReport:
    notes = []
    if roofline is None and entries:
        notes.append("the roofline of this device is unknown: its row has no figures" + _ADVICE.get(backend.name, ""))
    if program is not None and not program.locations:
        notes.append("the program does not say which modules its kernels come from: its IR has no locations")
    if _has_launches(backend.name):
        notes.append("timed kernels do not overlap, so the timed run takes longer than a run without timing")
    every = list(programs) or ([program] if program is not None else [])
    return ProfileReport(
        model=program.name if program is not None else "model",
        target=backend.name,
        device=program.device or program.target if program is not None else backend.name,
        machine=backend.machine,
        dtype=program.dtype if program is not None else "",
        version=npu_compiler.__version__,
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        sections=tuple(sections),
        held=held_by(every, entries),
        limits=_limits(roofline),
        notes=tuple(notes),
    )


_ADVICE = {"cpu": ", and measuring it needs a C++ compiler (npusim doctor)"}


def _limits(roofline: Roofline | None) -> Limits | None:
    if roofline is None:
        return None
    return Limits(dict(roofline.flops), roofline.bandwidths[:-1], roofline.bandwidth, roofline.source)


def _examples(specs: Sequence[Any]) -> list[np.ndarray]:
    return [random_array(s.shape, s.dtype) for s in specs]


# -- rows -----------------------------------------------------------------------------------------------------------
def _shown_run(ends: np.ndarray) -> int:
    """Return the run whose time is nearest to the median, which the timeline shows."""
    return int(np.argmin(np.abs(ends - np.median(ends))))


def _entry_section(p: EntryProfile, roofline: Roofline | None, title: str, count: int = 1) -> Section:
    marks = p.times - p.times[:, :1]
    shown = marks[_shown_run(marks[:, -1])]
    rows = _kernel_rows(p.program, p.entry, roofline, p.spans, shown, 0, 0, {})
    whole = float(np.median(p.whole))
    return Section(p.entry.name, title, p.runs, p.seconds, whole, tuple(rows), (arena_of(p.program, p.entry),), count)


def _kernel_rows(
    program: CompiledProgram, entry: EntryPoint, roofline: Roofline | None, spans: np.ndarray, shown: np.ndarray,
    first: int, part: int, made: Made,
) -> list[Row]:  # fmt: skip
    """``spans``: seconds of each kernel in each run; ``shown``: the beginning and the ends of the run that is shown.
    The outputs of the entry point are added to ``made``."""
    buffers, launches = {b.id: b for b in program.buffers}, _launches(program, entry)
    writer = {i.buffer: made[i.name] for i in entry.inputs if i.name in made}
    rows = []
    for n, (call, bound) in enumerate(zip(entry.calls, bounds(program, entry, roofline), strict=True)):
        rows.append(Row(
            index=first + n, name=call.name, device=NPU, kind=call.kind, part=part,
            seconds=float(np.median(spans[:, n])), least=float(spans[:, n].min()),
            start=float(shown[n]), end=float(shown[n + 1]),
            flops=call.flops, read=call.bytes_read, written=call.bytes_written, roof=bound.seconds, bound=bound.kind,
            dtype=operand_dtype(call, buffers), inputs=_tensors(call.inputs, buffers),
            outputs=_tensors(call.outputs, buffers), ops=call.sources, places=_call_places(program, call),
            text=call.text[:400], launch=launches[n],
            after=tuple(dict.fromkeys(writer[id] for id in call.inputs if id in writer)),
        ))  # fmt: skip
        writer.update(dict.fromkeys(call.outputs, first + n))
    made.update({o.name: writer[o.buffer] for o in entry.outputs if o.buffer in writer})
    return rows


def _tensors(ids: Sequence[int], buffers: dict[int, BufferSpec]) -> tuple[str, ...]:
    specs = [buffers[id] for id in ids]
    return tuple(f"{tensor_text(b.shape, b.dtype)}{f' {b.format}' if b.format else ''} {b.name}" for b in specs)


def _call_places(program: CompiledProgram, call: KernelCall) -> tuple[Place, ...]:
    return _places([program.locations[n] for n in call.locations])


def _places(locations: Sequence[Location | None]) -> tuple[Place, ...]:
    return tuple(Place(x.module, x.kind, x.source) for x in locations if x is not None)


def _has_launches(target: str) -> bool:
    """Whether programs for ``target`` are lists of launches of workgroups."""
    from npu_compiler.targets.simt.target import SimtTarget

    return isinstance(get_target(target), SimtTarget)


def _launches(program: CompiledProgram, entry: EntryPoint) -> list[str]:
    """Return the GPU launch of each kernel as text: function, workgroups and threads; '' on other targets."""
    if not _has_launches(program.target):
        return [""] * len(entry.calls)
    from npu_compiler.targets.simt.lang.program import unpack

    found, _ = unpack(program.binary)
    return [
        f"{x.function}: {x.workgroups} × {x.threads} threads" + (f", {x.shared >> 10} KiB shared" if x.shared else "")
        for x in found[entry.symbol]
    ]


# -- partitioned models ---------------------------------------------------------------------------------------------
def _plan_section(executor: DAGExecutor, measured: PlanProfile, roofline: Roofline | None) -> Section:
    rows: list[Row] = []
    arenas, made = [], Made()
    ends = measured.steps[-1].end if measured.steps else np.zeros(measured.runs)
    shown = _shown_run(ends)
    for number, times in enumerate(measured.steps):
        step, begin = times.step, float(times.begin[shown])
        if isinstance(step, TransferOp):
            rows.append(_transfer(step, times, len(rows), number, shown, made))
        elif step.device == NPU:
            program = executor.programs[step.id]
            entry, marks = executor.executors[step.id].entry, times.marks
            arenas.append(arena_of(program, entry, len(rows)))
            spans = np.diff(marks, axis=1)
            rows += _kernel_rows(program, entry, roofline, spans, begin + marks[shown], len(rows), number, made)
        else:
            rows += _host_rows(step, times, len(rows), number, shown, measured.plan, made)
    whole = float(np.median(measured.whole))
    title = executor.plan.ir.model_name or "model"
    return Section("plan", title, measured.runs, measured.seconds, whole, tuple(rows), tuple(arenas))


def _transfer(step: TransferOp, times: StepTimes, index: int, part: int, shown: int, made: Made) -> Row:
    spans, name = times.end - times.begin, name_of(step.value)
    after = (made[name],) if name in made else ()
    made[name] = index
    return Row(
        index=index, name=f"{name}: {step.src} → {step.dst}", after=after, device="transfer", kind="copy", part=part,
        seconds=float(np.median(spans)), least=float(spans.min()), start=float(times.begin[shown]),
        end=float(times.end[shown]), read=step.nbytes, ops=(step.value[0],),
    )  # fmt: skip


def _host_rows(
    part: Partition, times: StepTimes, first: int, number: int, shown: int, plan: PartitionPlan, made: Made
) -> list[Row]:
    spans, begin = np.diff(times.marks, axis=1), float(times.begin[shown])
    rows = []
    for n, node in enumerate(part.ir.nodes):
        reason = plan.reasons.get(node.name)
        sources = [name_of(part.ir.key(t)) for t in node.inputs]
        rows.append(Row(
            index=first + n, name=node.name, device="host", kind=node.op_type, part=number,
            seconds=float(np.median(spans[:, n])), least=float(spans[:, n].min()),
            start=begin + float(times.marks[shown, n]), end=begin + float(times.marks[shown, n + 1]),
            dtype=node.outputs[0].dtype if node.outputs else "", inputs=_texts(node.inputs),
            outputs=_texts(node.outputs), ops=(node.name,), places=_places([node.location]),
            text=f"runs in PyTorch: {reason.detail}" if reason is not None else "runs in PyTorch",
            after=tuple(dict.fromkeys(made[s] for s in sources if s in made)),
        ))  # fmt: skip
        made.update({name_of((node.name, i)): first + n for i in range(len(node.outputs))})
    return rows


def _texts(specs: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{tensor_text(t.shape, t.dtype)} {t.name}" for t in specs)
