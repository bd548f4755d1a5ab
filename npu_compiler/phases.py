"""The phases from core graph to kernels, which :mod:`npu_compiler.pipeline` runs in order.

The constraint checker schedules single nodes through the same functions, so its answers agree with a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .artifact.program import CompiledProgram
from .aten.ir import IRGraph
from .graph.graph import Graph, Value
from .passes import (
    attention,
    batch_dims,
    combine_parallel_matmul,
    concat_to_select,
    decompose,
    dual_gemm,
    fold,
    fold_iota,
    fold_requantisation,
    fuse,
    integer_products,
    layout,
    normalise,
    padding,
    quantised_maxima,
    quantize,
    quantize_activations,
    short_convolutions,
)
from .passes.absorb_views import absorb_views
from .schedule.horizontal_fusion import common_rewrites
from .schedule.kernel import Kernel
from .schedule.rewrite import ScheduleRewrite
from .schedule.schedule import Schedule
from .schedule.scheduler import Scheduler
from .support.errors import Reason
from .target_config import CompileChoices, TargetConfig
from .targets import get_target
from .weights.format import BlockFormat, WeightFormats

# Passes that can be left out (--disable, NPU_DISABLE), besides the rewrites of the target, in the order in which they
# first run.
PASSES: dict[str, str] = {
    "normalise": "remove no-ops, compose chains of views, share common subexpressions",
    "fold_constants": "evaluate nodes that depend only on constants",
    "fold_iota": "replace constant tables that are affine in their index by index arithmetic",
    "restore_batch_dims": "multiply in the batch dims that views merge around a product, and by one copy of a matrix",
    "fuse_attention": "replace decomposed attention by one node",
    "quantised_maxima": "take maxima of 8-bit integers instead of dequantised values",
    "integer_products": "multiply 8-bit operands as integers instead of dequantising them",
    "combine_parallel_matmul": "combine matmuls with the same left operand into one",
    "layout": "sink permutes until they cancel (channels-last layout)",
    "fold_padding": "fold zero padding into the convolution that reads it",
    "fold_requantisation": "fold the scale of a quantised result into those of its product",
    "fold_batch_norm": "fold batch norm and per-channel scales into weights",
    "compress_weights": "store weights in the weight format that the caller chose",
    "quantize_activations": "round rows of activations to 8 bits if the caller chose that",
    "short_convolutions": "compute convolutions of few terms in channels-first order if both sides have it",
    "concat_to_select": "replace concatenations that loop nests read by selections, which copy nothing",
    "fuse_epilogue": "fuse pointwise nodes into the epilogue of the product that they follow",
    "fuse_pointwise": "inline pointwise producers into their readers",
    "dual_gemm": "compute both matmuls of a gated MLP in one kernel",
    "fuse_loops": "merge loop nests over one domain into one kernel",
    "winograd": "compute 3x3 convolutions with Winograd's algorithm where that is faster",
    "limbs": "split the weights of float16 and float32 convolutions into bfloat16 limbs where that is faster",
}

CHOSEN = frozenset(("compress_weights", "quantize_activations"))  # the passes that only do what the caller asks for


def switches(target: str) -> dict[str, str]:
    """Return what a compilation for a target can leave out, in order: name -> what it does."""
    rewrites = get_target(target).rewrites
    return PASSES | {r.name: r.summary for r in rewrites if not r.required}


def fusions(config: TargetConfig) -> frozenset[str]:
    """Return the passes that are left out when nodes are compiled one by one, as the constraint checker does."""
    return frozenset(PASSES) - CHOSEN | {r.name for r in common_rewrites(config)}


@dataclass
class State:
    """The state of a compilation, which the phases change; ``ir`` is None for a program that starts as a core graph."""

    ir: IRGraph | None
    config: TargetConfig
    dtype: str | None
    disable: Collection[str]
    graph: Graph = field(default_factory=Graph)
    groups: list[fuse.Group] = field(default_factory=list)
    schedule: Schedule | None = None
    recipes: list[tuple[str, Value]] = field(default_factory=list)  # load-time values, by weight buffer
    program: CompiledProgram | None = None
    entry: str = "main"
    choices: CompileChoices = field(default_factory=CompileChoices)
    weights: WeightFormats = field(default_factory=WeightFormats)
    one_row: frozenset[str] = frozenset()  # keys of weights that products of one row read, in any entry point
    after_rewrite: Callable[[int, ScheduleRewrite, bool], bool] | None = None  # see run_rewrites
    dump: Path | None = None  # where each phase and rewrite writes its result

    def run_pass(self, name: str, f: Callable[[Graph], Any]) -> None:
        """Run a pass unless it is disabled."""
        if name not in self.disable:
            f(self.graph)

    def refused_kernels(self) -> list[tuple[Kernel, Reason]]:
        """Return the scheduled kernels that the target's code generator does not support, each with the reason."""
        target = get_target(self.config)
        kernels = self.schedule.kernels if self.schedule is not None else []
        return [(k, reason) for k in kernels if (reason := target.supports(k)) is not None]


def run_normalise(s: State) -> None:
    """Remove no-ops and common subexpressions, fold constants, and replace decomposed attention by one node."""
    s.run_pass("normalise", normalise.normalise)
    s.run_pass("fold_constants", normalise.fold_constants)
    s.run_pass("fold_iota", fold_iota.fold_iota)
    s.run_pass("fold_constants", normalise.fold_constants)
    s.run_pass("restore_batch_dims", batch_dims.restore_batch_dims)
    s.run_pass("fuse_attention", attention.fuse_attention)
    s.run_pass("quantised_maxima", quantised_maxima.quantised_maxima)
    s.run_pass("integer_products", lambda graph: integer_products.integer_products(graph, s.config))
    s.run_pass(
        "combine_parallel_matmul", lambda graph: combine_parallel_matmul.combine_parallel_matmul(graph, s.weights)
    )


def run_layout(s: State) -> None:
    """Choose channels-last layout by sinking permutes until they cancel; fold zero padding into convolutions."""
    s.run_pass("layout", layout.sink_permutes)
    s.run_pass("fold_padding", padding.fold_padding)


def run_fold(s: State) -> None:
    """Fold batch norm and per-channel scales into weights, as load-time recipes; round weights to block formats, and
    activations in front of them."""
    s.run_pass("fold_requantisation", fold_requantisation.fold_requantisation)
    s.run_pass("fold_batch_norm", fold.fold_batch_norm)
    if any(isinstance(format, BlockFormat) for format in s.weights):
        s.run_pass("compress_weights", lambda graph: quantize.quantize_weights(graph, s.weights, s.config.panel))
    if s.choices.activations is not None:
        s.run_pass("quantize_activations", lambda graph: quantize_activations.quantize_activations(graph, s.config))


def run_fuse(s: State) -> None:
    """Absorb views, inline pointwise chains, and group nodes into kernels."""
    s.run_pass("short_convolutions", lambda graph: short_convolutions.short_convolutions(graph, s.config.vector_lanes))
    decompose.decompose(s.graph, s.config)
    s.run_pass("concat_to_select", concat_to_select.concat_to_select)
    absorb_views(s.graph)
    claimed: fuse.Claims = {}
    s.run_pass("fuse_epilogue", lambda graph: fuse.claim_epilogues(graph, claimed))
    s.run_pass("fuse_pointwise", lambda graph: fuse.inline_pointwise(graph, claimed))
    normalise.normalise(s.graph)
    s.run_pass("fuse_epilogue", lambda graph: fuse.claim_epilogues(graph, claimed))  # of the nodes that are left
    s.run_pass("fuse_pointwise", lambda graph: fuse.claim_sources(graph, claimed))
    if s.config.dual_gemm:
        s.run_pass("dual_gemm", lambda graph: dual_gemm.dual_gemm(graph, claimed, s.config.pair_width))
    s.groups = fuse.form_groups(s.graph, claimed)
    s.run_pass("fuse_loops", lambda graph: fuse.merge_loops(graph, s.groups))
    s.groups = fuse.launch_order(s.graph, s.groups)


def run_schedule(s: State) -> None:
    """Make kernels over strided windows of buffers."""
    winograd = get_target(s.config).winograd if "winograd" not in s.disable else lambda node: None
    lossless = s.weights.default if "compress_weights" not in s.disable else None
    in_limbs = get_target(s.config).in_limbs if "limbs" not in s.disable else lambda node: False
    scheduler = Scheduler(s.graph, s.groups, s.config, s.choices, winograd, lossless, s.one_row, in_limbs)
    s.schedule = scheduler.run()
    s.recipes = scheduler.recipes


def run_rewrites(s: State) -> bool:
    """Apply the target's rewrites in order, except those that are disabled.

    ``s.after_rewrite`` is called after each one with its number, the rewrite, and whether it changed a kernel. If the
    call returns True, the function stops and returns True.
    """
    assert s.schedule is not None
    for number, rewrite in enumerate(get_target(s.config).rewrites):
        before = s.schedule.kernels
        if rewrite.name not in s.disable:
            rewrite.apply(s.schedule)
        changed = before != s.schedule.kernels
        if s.after_rewrite is not None and s.after_rewrite(number, rewrite, changed):
            return True
    return False
