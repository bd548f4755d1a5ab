"""The rewrites of every target by name: each is checked on graphs that it changes and on the operators' samples, can be
left out, and is named if it breaks a program."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig
from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.ops.affine_quantization import dequantized, quantized
from npu_compiler.pipeline import PASSES, State, run_graph, run_phases, switches
from npu_compiler.schedule import checks
from npu_compiler.schedule import interp as kernel_interp
from npu_compiler.schedule.kernel import Kernel, Loops
from npu_compiler.schedule.pack_in_products import pack_in_products
from npu_compiler.schedule.rewrite import ScheduleRewrite
from npu_compiler.schedule.schedule import Schedule
from npu_compiler.support.errors import CompileError
from npu_compiler.target_config import target_config, target_names
from npu_compiler.targets import get_target
from npu_compiler.targets.cuda import devices as cuda_devices

from ...conformance.cases import all_cases, compile_cases
from ...targets.cuda.test_dual_conv import block
from ...targets.cuda.test_fused_convs import chain, few_results_suffice, pooled
from ...targets.cuda.test_rotary_gemm import Projections, captured
from ...targets.cuda.test_split_rms_norm import layer
from ...targets.simt.test_hoist_unpack import products
from .test_horizontal_fusion import gated_mlp, independent

ROOT = Path(__file__).parents[3]
PLACES = np.arange(70) ** 2 % 9
BUILT_IN = ("cpu", "cuda", "metal")
SAMPLED = 250  # cases of a target, unless NPU_CONFORMANCE=full


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper, on any machine; few results are enough for convolutions to be fused."""
    monkeypatch.setattr(cuda_devices, "present", lambda: None)
    monkeypatch.setenv("NPU_VERIFY", "2")
    few_results_suffice(monkeypatch)


# -- graphs that rewrites change --------------------------------------------------------------------------------------
def decode_step(dtype: str, kv_cache: str | None = None) -> Callable[[str, dict[str, Any]], State]:
    """A decoder's step with a cache of 512 positions."""
    card = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "hidden_act": "silu",
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": dtype,
    }  # fmt: skip
    ir = llm_graphs(LLMConfig.from_hf(card), max_len=512, chunks=(), kv_cache=kv_cache)["decode"]
    return lambda target, options: run_phases(ir, target, **{"until": "memory", **options})


def prompt(target: str, options: dict[str, Any]) -> State:
    """Rotary embeddings and cache updates behind a product."""
    return run_phases(captured(Projections(), 24), target, **{"until": "memory", **options})


def on_graph(make: Callable[[], Graph]) -> Callable[[str, dict[str, Any]], State]:
    return lambda target, options: run_graph(make(), target, **options)


def scaled_rows() -> Graph:
    g = Graph("scaled_rows")
    y = g.input("x", (70, 256), "bfloat16").matmul(g.weight("w", (256, 72), "bfloat16"))
    factor = g.pointwise(lambda s: expr.maximum(s, 0.5) * 0.25, g.input("s", (70, 1), "float32"))
    y = g.pointwise(lambda a, s: a * s, y, factor, promote=False)
    bias, rest = g.weight("b", (72,), "float32"), g.input("r", (70, 72), "bfloat16")
    g.outputs = [("y", g.pointwise(lambda a, b, r: (a + b + r).cast("bfloat16"), y, bias, rest, promote=False))]
    return g


def long_product() -> Graph:
    g = Graph("long_product")
    y = g.input("x", (70, 2048), "float16").matmul(g.weight("w", (2048, 72), "float16"))
    g.outputs = [("y", g.pointwise(lambda a: expr.maximum(a, 0.0), y))]
    return g


def long_convolution() -> Graph:
    g = Graph("long_convolution")
    x, w = g.input("x", (1, 9, 9, 512), "float16"), g.weight("w", (72, 3, 3, 512), "float16")
    g.outputs = [("y", g.conv2d(x, w, (1, 1), (1, 1, 1, 1), (1, 1), 1).cast("float16"))]
    return g


def few_queries() -> Graph:
    g = Graph("few_queries")
    q, k, v = (g.input(name, (1, 2, n, 64), "bfloat16") for name, n in (("q", 3), ("k", 500), ("v", 500)))
    g.outputs = [("y", g.attention(q, k, v, None, 0.125, False))]
    return g


def long_sum() -> Graph:
    g = Graph("long_sum")
    g.outputs = [("y", g.input("x", (2, 40_000), "float32").sum([1]))]
    return g


def long_columns() -> Graph:
    """A vector times a matrix that is computed at run time: sums of columns, of a number of rows without a divisor."""
    g = Graph("long_columns")
    x, w = g.input("x", (1, 2053), "bfloat16"), g.input("w", (2053, 2048), "bfloat16")
    g.outputs = [("y", x.matmul(w).cast("bfloat16"))]
    return g


def long_norm() -> Graph:
    g = Graph("long_norm")
    x = g.input("x", (2, 3, 40_000), "float32")
    d = x - x.mean([2])
    variance = (d * d).mean([2])
    g.outputs = [("y", d / (variance + 1e-5)), ("variance", variance)]
    return g


def long_scan() -> Graph:
    g = Graph("long_scan")
    g.outputs = [("y", g.scan("sum", g.input("x", (2, 40_000), "float32"), 1))]
    return g


def scattered(dtype: str, mode: str = "add") -> Callable[[], Graph]:
    """A place for each row, to which rows are added, or for each element, which is stored."""

    def make() -> Graph:
        g = Graph("scattered")
        base, source = g.input("base", (9, 5), dtype), g.input("source", (70, 5), dtype)
        places = PLACES if mode == "add" else PLACES[:, None] ^ np.arange(5)
        place = expr.load(0, "int64", [expr.index(d) for d in range(places.ndim)])
        g.outputs = [("y", g.scatter(base, source, [g.const(places % 9)], (place, expr.index(1)), mode))]
        return g

    return make


def long_row(k: int) -> Callable[[], Graph]:
    def make() -> Graph:
        g = Graph("long_row")
        values, places = g.sort(g.input("x", (2, 5000, 3), "float32"), 1, True, k)
        g.outputs = [("values", values), ("places", places)]
        return g

    return make


def quantised_image() -> Graph:
    """A convolution of a quantised image, whose zero point surrounds it."""
    g = Graph("image")
    q = quantized(g.input("x", (2, 3, 11, 12), "float32"), 50.0, 117, 0, 255, "uint8").permute(0, 2, 3, 1)
    w = dequantized(
        g.weight("filters", (16, 3, 3, 3), "int8"), g.const(np.full((16, 1, 1, 1), 0.01, np.float32)), 0, None
    )
    x = dequantized(q, 0.02, 117, None)
    g.outputs = [("y", g.conv2d(x, w, (2, 2), (1, 1, 1, 1), (1, 1), 1))]
    return g


def columns_of_results(lines: int = 64) -> Graph:
    g = Graph("columns")
    x, w = g.input("x", (2, lines, 4096 // lines, 4), "float32"), g.weight("w", (32, 1, 1, 4), "float32")
    g.outputs = [("y", g.conv2d(x, w, (1, 1), (0, 0, 0, 0), (1, 1), 1).cast("float16").permute(0, 3, 1, 2))]
    return g


def product_of_integers() -> Graph:
    g = Graph("product_of_integers")
    x, y = g.input("x", (20, 24), "int8"), g.input("y", (24, 40), "int8")
    g.outputs = [("sums", x.matmul(y))]
    return g


def small_products(dtype: str, transposed: bool) -> Graph:
    """A batch of matrices, of which neither is a weight, with rows and columns that fill no panel."""
    g = Graph("small_products")
    x, y = g.input("x", (2, 3, 20, 24), dtype), g.input("y", (2, 3, *((40, 24) if transposed else (24, 40))), dtype)
    y = y.permute(0, 1, 3, 2) if transposed else y
    g.outputs = [("y", x.matmul(y).cast(dtype))]
    return g


def reversed_state() -> Graph:
    """A state whose update reads it in another order: the copy into it cannot compute its source in place."""
    g = Graph("reversed_state")
    s, x = g.state("s", (40, 3), "float32"), g.input("x", (40, 3), "float32")
    back = g.elementwise((40, 3), [s], expr.load(0, "float32", (expr.index(0), 2 - expr.index(1))))
    g.outputs, g.updates = [("y", x + 1.0)], [("s", back)]
    return g


def doubled_state() -> Graph:
    g = Graph("doubled_state")
    s = g.state("s", (40, 3), "float32")
    g.outputs, g.updates = [("y", g.input("x", (40, 3), "float32") + 1.0)], [("s", s * 2.0)]
    return g


@dataclass(frozen=True)
class Example:
    """A program that rewrite ``name`` of a target changes; ``chip``: the target, and a device unless any will do."""

    name: str
    chip: str
    compiled: Callable[[str, dict[str, Any]], State] | str

    def __str__(self) -> str:
        return f"{self.name}-{self.chip}"

    @property
    def target(self) -> str:
        return self.chip.partition(":")[0]


EXAMPLES = [
    Example("fuse_prologue", "cpu", on_graph(lambda: gated_mlp(2))),
    Example("horizontal_fusion", "cpu", on_graph(independent)),
    Example("fuse_prologue", "cuda", on_graph(lambda: gated_mlp(1, "bfloat16"))),
    Example("fuse_prologue", "metal", on_graph(lambda: gated_mlp(1, "float16"))),
    Example("horizontal_fusion", "metal", on_graph(independent)),
    Example("fold_cache_scales", "cpu", "float32 int8"),
    Example("fold_cache_scales", "cuda", "float32 int8"),
    Example("fold_position_masks", "cpu", "bfloat16"),
    Example("fold_position_masks", "cuda", "float32"),
    Example("fold_position_masks", "metal", "bfloat16"),
    Example("pack_in_products", "cpu:x86-64-v4", on_graph(lambda: small_products("float32", False))),
    Example("pack_in_products", "cpu:amx", on_graph(lambda: small_products("float32", False))),
    Example("pack_in_products", "cpu:avx2", on_graph(lambda: small_products("bfloat16", True))),
    Example("fuse_decode_attention", "cuda", "bfloat16"),
    Example("fuse_decode_attention", "metal", "float32"),
    Example("transpose_operands", "cuda", on_graph(product_of_integers)),
    Example("fuse_copies", "cuda", on_graph(quantised_image)),
    Example("transpose_results", "cuda", on_graph(columns_of_results)),
    Example("transpose_results", "cuda", on_graph(lambda: columns_of_results(1))),
    Example("transpose_results", "metal", on_graph(columns_of_results)),
    Example("dual_conv", "cuda", on_graph(block)),
    Example("dual_conv", "cuda", on_graph(lambda: block(taps=3, stride=2, inner=128))),
    Example("b2b_conv", "cuda", on_graph(chain)),
    Example("pooled_conv", "cuda", on_graph(pooled)),
    Example("legalize", "cuda", on_graph(lambda: gated_mlp(1, hidden=18))),
    Example("legalize", "metal", on_graph(independent)),
    Example("split_attention", "cuda", "float32"),
    Example("split_attention", "metal", on_graph(few_queries)),
    Example("split_k", "cuda:sm_80", on_graph(long_product)),
    Example("split_k", "cuda:sm_80", on_graph(long_convolution)),
    Example("split_k", "metal", on_graph(long_product)),
    Example("split_reduction", "cuda", on_graph(long_sum)),
    Example("split_reduction", "cuda", on_graph(long_norm)),
    Example("split_reduction", "metal", on_graph(long_sum)),
    Example("split_reduction", "cuda", on_graph(long_columns)),
    Example("split_scan", "cuda", on_graph(long_scan)),
    Example("split_scan", "metal", on_graph(long_scan)),
    Example("scatter_sums", "cuda", on_graph(scattered("float32"))),
    Example("scatter_sums", "metal", on_graph(scattered("int64"))),
    Example("scatter_latest", "cuda", on_graph(scattered("float32", "set"))),
    Example("scatter_latest", "metal", on_graph(scattered("bfloat16", "set"))),
    Example("split_sort", "cuda", on_graph(long_row(5000))),
    Example("split_sort", "metal", on_graph(long_row(300))),
    Example("fold_row_scale", "cuda", on_graph(scaled_rows)),
    Example(
        "decode_in_products", "cuda", lambda target, options: products(target, 70, **{"until": "memory", **options})
    ),
    Example("hoist_unpack", "cuda", lambda target, options: products(target, **{"until": "memory", **options})),
    Example("split_rms_norm", "cuda", on_graph(layer)),
    Example("split_rms_norm", "cuda", on_graph(lambda: layer(64, 256, 320, gate=True))),
    Example("rotary_epilogue", "cuda", prompt),
]


@pytest.fixture(scope="module")
def steps() -> dict[str, Callable[[str, dict[str, Any]], State]]:
    return {name: decode_step(*name.split()) for name in ("float32", "bfloat16", "float32 int8")}


class Watch:
    """Which rewrites changed a kernel, and how often kernels were compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.changed: list[str] = []
        self.compared = 0
        check, compare = checks.check_step, checks.Reference._compare

        def check_step(step: str, *rest: Any) -> None:
            if step.startswith("rewrite "):
                self.changed.append(step.split("'")[1])
            check(step, *rest)

        def _compare(reference: checks.Reference, results: Any) -> None:
            self.compared += reference.load_time is not None
            compare(reference, results)

        monkeypatch.setattr(checks, "check_step", check_step)
        monkeypatch.setattr(checks.Reference, "_compare", _compare)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_rewrite_changes_kernels_and_not_what_they_compute(
    example: Example, steps: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NPU_VERIFY=2 compares the kernels in numpy after the scheduler, each rewrite and the memory plan."""
    compiled = steps[example.compiled] if isinstance(example.compiled, str) else example.compiled
    watch = Watch(monkeypatch)
    compiled(example.chip, {})
    assert example.name in watch.changed
    assert watch.compared >= len(watch.changed) + 2, "the kernels were not compared"
    watch.changed.clear()
    compiled(example.chip, {"until": example.name})
    assert watch.changed[-1] == example.name
    if example.name in switches(example.target):
        watch.changed.clear()
        compiled(example.chip, {"disable": (example.name,)})
        assert example.name not in watch.changed


def test_a_copy_computes_its_source_in_place_only_point_by_point() -> None:
    for make, loops in ((reversed_state, 3), (doubled_state, 2)):
        schedule = run_graph(make(), "cuda", until="memory").schedule
        assert schedule is not None
        assert sum(len(k.members) for k in schedule.kernels) == loops


def test_matrices_that_change_before_the_product_are_packed_at_once() -> None:
    schedule = run_graph(small_products("float32", False), "cpu:avx2", until="fold_position_masks").schedule
    assert schedule is not None
    pack, product = schedule.kernels
    schedule.kernels = [pack, replace(pack, inputs=pack.outputs, outputs=pack.inputs), product]
    pack_in_products(schedule, lambda dtype: True)
    assert len(schedule.kernels) == 3
    schedule.kernels = [pack, product]
    pack_in_products(schedule, lambda dtype: True)
    assert [k.kind for k in schedule.kernels] == ["gemm"]


def test_amx_and_slow_dot_products_read_packed_matrices() -> None:
    for chip in ("cpu:amx", "cpu:cooperlake"):
        schedule = run_graph(small_products("bfloat16", False), chip, until="memory").schedule
        assert schedule is not None
        assert [k.kind for k in schedule.kernels] == ["pack", "gemm"]


def test_every_rewrite_has_an_example() -> None:
    named = {name: {r.name for r in get_target(name).rewrites} for name in BUILT_IN}
    assert set.union(*named.values()) == {e.name for e in EXAMPLES}
    assert all(e.name in named[e.target] for e in EXAMPLES)


# -- the operators' samples -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", BUILT_IN)
def test_kernels_of_the_operators_samples_compute_what_the_graph_says(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [c for c in all_cases() if c.dtype in target_config(target).dtypes]
    if os.environ.get("NPU_CONFORMANCE") != "full":
        cases = random.Random(f"{target} rewrites").sample(cases, SAMPLED)
    watch, done = Watch(monkeypatch), 0
    for case in cases:
        batch, before = compile_cases([case]), watch.compared
        assert not batch.failed
        run_graph(batch.graph, target)
        done += watch.compared > before
    assert done > 0.95 * len(cases)  # some read places that random integers do not name


# -- what is said about rewrites --------------------------------------------------------------------------------------
def wrong(schedule: Schedule) -> None:
    """Adds one to what the first kernel stores first."""
    kernel = next(k for k in schedule.kernels if isinstance(k, Loops))
    first, *rest = kernel.body.stages
    body = replace(kernel.body, stages=(replace(first, expr=first.expr + 1.0), *rest))
    schedule.rewrite({kernel: (replace(kernel, body=body),)})


def reads_beyond(schedule: Schedule) -> None:
    def shifted(k: Kernel) -> Kernel:
        return replace(k, inputs=tuple(replace(o, offset=o.offset + 1) for o in k.inputs))

    schedule.rewrite({k: (shifted(k),) for k in schedule.kernels})


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Schedule], None]], None]]:
    def add(apply: Callable[[Schedule], None]) -> None:
        table = (*get_target("cpu").rewrites, ScheduleRewrite("broken", "breaks programs", apply))
        monkeypatch.setattr(type(get_target("cpu")), "rewrites", table)

    yield add


@pytest.mark.parametrize(
    ("level", "apply", "message"),
    [
        ("2", wrong, "after rewrite 'broken': output 'y' differs from its value before this step"),
        ("1", reads_beyond, "after rewrite 'broken': kernel k0_sum: .* leaves its buffer"),
    ],
)
def test_a_rewrite_that_breaks_a_program_is_named(
    level: str, apply: Callable[[Schedule], None], message: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_VERIFY", level)
    broken(apply)
    with pytest.raises(CompileError, match=message):
        run_graph(long_sum())
    run_graph(long_sum(), disable=("broken",))


def test_dumps_show_what_a_rewrite_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DUMP", str(tmp_path))
    run_graph(long_sum(), "cuda")
    names = [p.name for p in sorted(tmp_path.iterdir())]
    (dumped,) = [n for n in names if "split_reduction" in n]
    assert re.fullmatch(r"6_\d\d_split_reduction.txt", dumped) and {"6_rewrite.txt", "5_schedule.txt"} < {*names}
    assert "k0_sum_parts" in (tmp_path / dumped).read_text()
    assert "k0_sum_parts" not in (tmp_path / "5_schedule.txt").read_text()
    assert not any("split_k" in n for n in names)


def test_what_a_target_cannot_do_without_says_so() -> None:
    assert "legalize" not in switches("cuda") and {"split_k", "layout"} < switches("cuda").keys()
    with pytest.raises(CompileError, match="cannot disable legalize: the GPU targets have no kernels for"):
        run_graph(long_sum(), "cuda", disable=("legalize",))
    run_graph(long_sum(), "cpu", disable=("split_k",))  # another target's
    with pytest.raises(CompileError, match=r"cannot disable split_q; these can be: normalise, .*split_k"):
        run_graph(long_sum(), "cuda", disable=("split_q",))


def test_every_target_says_what_its_rewrites_do() -> None:
    for name in target_names():
        table = get_target(name).rewrites
        assert len({r.name for r in table}) == len(table)
        assert all(r.summary and r.summary[0].islower() and not r.summary.endswith(".") for r in table)


def test_the_page_lists_every_pass_and_its_file() -> None:
    helpers = {"__init__", "attention_masks", "load_time", "patterns", "softmax"}  # parts of passes
    files = {f.stem for f in (ROOT / "npu_compiler" / "passes").glob("*.py")} - helpers
    for page in ("passes.md", "passes.ko.md"):
        rows = [row for row in (ROOT / "docs" / page).read_text().splitlines() if row.startswith("|")]
        names = " ".join(row.split("|")[3] for row in rows if len(row.split("|")) == 6)
        assert not [name for name in PASSES if f"`{name}`" not in names]
        assert not [file for file in files if not any(f"`passes/{file}.py`" in row for row in rows)]


# -- kernels in numpy -------------------------------------------------------------------------------------------------
def test_persistent_memory_is_zero_and_other_memory_is_not() -> None:
    schedule = Schedule("memory", [], [], [], [])
    kept, other = (schedule.memory("float32", (3,), name, persistent=name == "kept") for name in ("kept", "other"))
    for op, fill in ((kept, 0.0), (other, np.nan)):
        out = schedule.buffers[op.buffer.id]
        schedule.outputs = [("y", out)]
        np.testing.assert_array_equal(kernel_interp.run(schedule, {}, {}, {})["y"], np.full(3, fill, np.float32))
