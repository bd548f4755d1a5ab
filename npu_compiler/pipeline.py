"""The compiler, top to bottom. ``PHASES`` is the order of everything; each name works in ``--until`` and ``NPU_DUMP``.

Passes and fusions can be left out one by one: ``compile(disable=("fold_batch_norm",))`` or ``NPU_DISABLE=…``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import env
from .compiled_program import CompiledProgram
from .dtypes import parse
from .errors import CompileError
from .graph import Graph, Value
from .ir import IRGraph
from .kernel import Schedule
from .link import link
from .lower import lower_ir
from .memory_planner import plan_memory
from .passes import attention, decompose, fold, fuse, layout, merge, normalise, padding, positions, select
from .schedule import Scheduler
from .target_config import TargetConfig, target_config
from .targets import get_target


@dataclass
class State:
    """What flows through the phases; ``ir`` is None for a program that starts as a core graph."""

    ir: IRGraph | None
    config: TargetConfig
    dtype: str | None
    disable: Collection[str]
    graph: Graph = field(default_factory=Graph)
    groups: list[fuse.Group] = field(default_factory=list)
    schedule: Schedule | None = None
    recipes: list[tuple[str, Value]] = field(default_factory=list)  # load-time values, by weight buffer
    program: CompiledProgram | None = None

    def run_pass(self, name: str, f: Callable[[Graph], Any]) -> None:
        if name not in self.disable:
            f(self.graph)


def _lower(s: State) -> None:
    assert s.ir is not None
    s.graph = lower_ir(s.ir, s.dtype)


def _normalise(s: State) -> None:
    s.run_pass("normalise", normalise.normalise)
    s.run_pass("fold_constants", normalise.fold_constants)
    s.run_pass("fold_positions", positions.fold_positions)
    s.run_pass("fold_constants", normalise.fold_constants)
    s.run_pass("fuse_attention", attention.fuse_attention)
    s.run_pass("merge_matmuls", merge.merge_matmuls)


def _layout(s: State) -> None:
    s.run_pass("layout", layout.sink_permutes)
    s.run_pass("fold_padding", padding.fold_padding)


def _fold(s: State) -> None:
    s.run_pass("fold_batch_norm", fold.fold_batch_norm)


def _fuse(s: State) -> None:
    decompose.decompose(s.graph, s.config)
    s.run_pass("select_concats", select.select_concats)
    fuse.absorb_views(s.graph)
    claimed = fuse.claim_epilogues(s.graph) if "fuse_epilogue" not in s.disable else {}
    if "fuse_pointwise" not in s.disable:
        fuse.inline_pointwise(s.graph, {n for chain in claimed.values() for n in chain})
    normalise.normalise(s.graph)
    claimed = fuse.claim_epilogues(s.graph) if "fuse_epilogue" not in s.disable else {}
    if "fuse_pointwise" not in s.disable:
        claimed |= {n: c for n, c in fuse.claim_sources(s.graph).items() if not any(c[0] in chain for chain in claimed.values())}
    s.groups = fuse.merge_loops(s.graph, claimed, enabled="fuse_loops" not in s.disable)


def _schedule(s: State) -> None:
    winograd = get_target(s.config.name).winograd if "winograd" not in s.disable else lambda node: None
    scheduler = Scheduler(s.graph, s.groups, s.config, winograd)
    s.schedule = scheduler.run()
    s.recipes = scheduler.recipes


def _memory(s: State) -> None:
    assert s.schedule is not None
    plan_memory(s.schedule, s.config.buffer_align)


def _codegen(s: State) -> None:
    s.program = _link({"main": s})


PHASES: tuple[tuple[str, Callable[[State], None], str], ...] = (
    ("lower", _lower, "ATen IR to primitives, by the op registry"),
    ("normalise", _normalise, "no-ops, common subexpressions, constants; attention from its decomposed spelling"),
    ("layout", _layout, "channels-last: permutes sink and cancel; zero padding joins its convolution"),
    ("fold", _fold, "batch norm and per-channel scales into weights, as load-time recipes"),
    ("fuse", _fuse, "epilogues, pointwise chains, row kernels"),
    ("schedule", _schedule, "kernels over strided buffers"),
    ("memory", _memory, "fixed offsets in one arena"),
    ("codegen", _codegen, "sources and the compiled object"),
)

SWITCHES = ("normalise", "fold_constants", "fold_positions", "fuse_attention", "merge_matmuls", "select_concats", "layout", "fold_padding", "fold_batch_norm", "fuse_epilogue", "fuse_pointwise", "fuse_loops", "winograd")


def run_phases(ir: IRGraph, target: str, dtype: str | None, disable: Collection[str] = (), until: str | None = None) -> State:
    """Run the compiler up to and including phase ``until`` (default: all)."""
    disable = frozenset(disable) | env.disabled()
    unknown = sorted(set(disable) - set(SWITCHES))
    if unknown:
        raise CompileError(f"cannot disable {', '.join(unknown)}; these can be: {', '.join(SWITCHES)}")
    names = [name for name, _, _ in PHASES]
    if until is not None and until not in names:
        raise CompileError(f"unknown phase {until!r}; phases are: {', '.join(names)}")
    state = State(ir, target_config(target), parse(dtype) if dtype else None, disable)
    return _run(state, 0, until)


def _run(state: State, first: int, until: str | None) -> State:
    for number, (name, f, _) in list(enumerate(PHASES))[first:]:
        start = time.perf_counter()
        f(state)
        _trace(state, number, name, time.perf_counter() - start)
        if name == until:
            break
    return state


def _trace(state: State, number: int, name: str, seconds: float) -> None:
    if env.debug() >= 1:
        print(f"npu: {name:10s} {seconds * 1e3:8.1f} ms  {len(state.graph.nodes)} nodes", file=sys.stderr)
    folder = env.dump_dir()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}_{name}.txt").write_text(dump(state) + "\n")
        if state.program is not None:
            for file, text in state.program.sources.items():
                (folder / file).write_text(text)


def dump(state: State) -> str:
    """The program as it stands: the graph, and below it the kernels once they exist."""
    text = state.graph.dump()
    if state.schedule is not None:
        lines = [f"{k.name}: {k.kind} {k.attrs or ''} {k.text()}" for k in state.schedule.kernels]
        text += "\n\n" + "\n".join(lines)
    return text


def compile_ir(ir: IRGraph, target: str = "cpu", dtype: str | None = None, disable: Collection[str] = ()) -> CompiledProgram:
    """All phases, and the artifact they leave."""
    return compile_entries({"main": ir}, target, dtype, disable)


def compile_entries(
    irs: Mapping[str, IRGraph], target: str = "cpu", dtype: str | None = None, disable: Collection[str] = ()
) -> CompiledProgram:
    """Compile several graphs of one model (a prefill and a decode step, say) into entry points of one program, which
    share weights and state."""
    states = {name: run_phases(ir, target, dtype, disable, until="memory") for name, ir in irs.items()}
    return _link(states)


def compile_graph(graph: Graph, target: str = "cpu", disable: Collection[str] = ()) -> CompiledProgram:
    """Compile a core graph (which is consumed) from phase ``normalise`` on."""
    state = _run(State(None, target_config(target), None, frozenset(disable) | env.disabled(), graph), 1, "memory")
    return _link({"main": state})


def _link(states: Mapping[str, State]) -> CompiledProgram:
    first = next(iter(states.values()))
    name = first.ir.model_name if first.ir is not None else first.graph.name
    dtype = first.dtype or (_main_dtype(first.ir) if first.ir is not None else "float32")
    entries = {}
    for entry, s in states.items():
        assert s.schedule is not None
        entries[entry] = (s.schedule, s.recipes)
    return link(name, dtype, entries, get_target(first.config.name))


def _main_dtype(ir: IRGraph) -> str:
    """The dtype that holds most of the weights (or inputs): what the program computes in."""
    totals: dict[str, int] = {}
    for t in (*ir.weights, *ir.graph_inputs):
        totals[t.dtype] = totals.get(t.dtype, 0) + t.numel
    return max(totals, key=lambda d: totals[d]) if totals else "float32"
