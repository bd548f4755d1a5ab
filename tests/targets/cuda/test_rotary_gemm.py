"""Rotary embeddings and cache updates in the epilogue of the product of queries, keys and values, on Hopper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.pipeline import run_phases
from npu_compiler.schedule.anchors import GemmWithLoops
from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.simt.emit import Functions
from npu_runtime import Executor, load_weights

from ...support import cuda_gpu

REWRITE = "rotary_epilogue"
CONTEXT = 2100
FORMATS: dict[str, dict[str, Any]] = {
    "elements": {}, "bf16c12": {"weights": "bf16c12"}, "int4_g128": {"weights": "int4_g128"},
    "fp8": {"weights": "fp8_e4m3", "activations": "fp8"},
}  # fmt: skip


def rotated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The partners of a rotary embedding: ``halves`` of a head, ``pairs`` of neighbours, or without a sign."""
    if kind == "pairs":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    near, far = x.chunk(2, -1)
    return torch.cat((-far if kind == "halves" else far, near), -1)


class Projections(nn.Module):
    """Queries, keys and values of ``heads``, ``kv`` and ``kv`` heads of ``size``; keys and values go to caches.

    ``tables``: how tables follow from positions: 'halves' that are equal, 'whole', or 'inputs' of the model.
    ``rotary``: see :func:`rotated`; '' if keys and queries are not rotated. ``shared``: the product of the keys is also
    a result. ``first``: columns of the product in front of the queries.
    """

    def __init__(
        self, heads: int = 3, kv: int = 1, size: int = 128, hidden: int = 256, dtype: torch.dtype = torch.bfloat16,
        tables: str = "halves", rotary: str = "halves", shared: bool = False, bias: bool = True, first: int = 0,
        batch: int = 1,
    ):  # fmt: skip
        super().__init__()
        self.size, self.tables, self.rotary, self.shared, self.first = size, tables, rotary, shared, first
        self.qkv = nn.Linear(hidden, first + (heads + 2 * kv) * size, bias, dtype=dtype)
        self.counts = heads, kv, kv
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, kv, CONTEXT, size, dtype=dtype))

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        count = self.size // 2 if self.tables == "halves" else self.size
        angles = positions[:, None].float() * 0.9 ** torch.arange(count).float()
        return torch.cat((angles, angles), -1) if self.tables == "halves" else angles

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not self.rotary:
            return x
        return (x.float() * cos + rotated(x, self.rotary).float() * sin).to(x.dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, *tables: torch.Tensor) -> Any:
        angles = self.angles(positions)
        cos, sin = tables if tables else (angles.cos(), angles.sin())
        made = self.qkv(x)[..., self.first :].split([n * self.size for n in self.counts], -1)
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in made)
        k = self.turn(k, cos, sin)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        q = self.turn(q, cos, sin).contiguous()
        return (q, made[1].clone()) if self.shared else q


def example(model: Projections, rows: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(len(model.keys), rows, model.qkv.in_features).to(model.qkv.weight.dtype)


def captured(model: Projections, rows: int) -> IRGraph:
    x, positions = example(model, rows), torch.arange(rows)
    tables = [torch.randn(rows, model.size) for _ in range(2)] if model.tables == "inputs" else []
    return capture(model.eval(), (x, positions, *tables))


def fused(rows: int = 40, target: str = "cuda:sm_90", format: str = "elements", **options: Any) -> GemmWithLoops | None:
    """The fused kernel of a model, if there is one."""
    state = run_phases(captured(Projections(**options), rows), target, until="memory", **FORMATS[format])
    assert state.schedule is not None
    return next((k for k in state.schedule.kernels if isinstance(k, GemmWithLoops)), None)


def sizes(kernel: GemmWithLoops) -> str:
    """The constants with which the kernel's template is instantiated, and the struct of its epilogue."""
    launch = (functions := Functions(HOPPER)).launch(kernel)
    return functions.text[launch.function]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [64, 128])
def test_the_product_stores_queries_and_caches(format: str, size: int) -> None:
    kernel = fused(format=format, size=size)
    assert kernel is not None and len(kernel.consumers) == 3 and len(kernel.outputs) == 3
    assert kernel.product.outputs[0].buffer.kind == "scratch" and len(kernel.halves) == 2
    assert f"HEAD = {size}," in sizes(kernel)


def test_the_program_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """NPU_VERIFY=2 compares the kernels in numpy before and after the rewrite. Its positions are 0 and 1, so that most
    rows of the caches are overwritten."""
    monkeypatch.setenv("NPU_VERIFY", "2")
    for options in ({}, {"tables": "whole"}, {"bias": False, "dtype": torch.float16}, {"batch": 2}):
        assert fused(rows=24, **options) is not None


def test_tables_with_equal_halves_are_read_once() -> None:
    """Other tables have two vectors for each pair."""
    for tables, vectors in (("halves", 2), ("whole", 4), ("inputs", 0)):
        kernel = fused(tables=tables)
        if vectors:
            assert kernel is not None and sizes(kernel).count("Vec<float, 8> float_v") == vectors
        else:  # arrays of the caller are not aligned to vectors of 32 bytes
            assert kernel is None


def test_a_head_of_two_narrow_tiles_is_loaded_in_halves() -> None:
    """With few rows, a tile has 64 columns: 32 of each half of a head."""
    kernel = fused(rows=40, hidden=1536)
    assert kernel is not None
    launch = (functions := Functions(HOPPER)).launch(kernel)
    assert "TILE_N = 64," in functions.text[launch.function] and launch.maps[1][2].box[1] == 32


def test_partial_sums_are_those_of_the_product_alone() -> None:
    for rows in (40, 128, 512):
        model = captured(Projections(hidden=1536), rows)
        found = []
        for disable in ((), (REWRITE,)):
            state = run_phases(model, "cuda:sm_90", until="memory", disable=disable)
            assert state.schedule is not None
            functions = Functions(HOPPER)
            texts = [functions.text[e.function] for e in functions.launches(state.schedule)]
            found.append(next(t for t in texts if "tma_gemm<" in t).split("SPLITS = ")[1].split(",")[0])
        assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": "pairs"}, {"rotary": ""}, {"shared": True}, {"first": 8}, {"size": 32}, {"size": 256},
        {"dtype": torch.float32}, {"rows": 4}, {"target": "cuda:sm_80"}, {"target": "metal"}, {"target": "cpu"},
    ],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()),
)  # fmt: skip
def test_others_stay_kernels_of_their_own(options: dict[str, Any]) -> None:
    assert fused(**options) is None


@cuda_gpu.compiles()
@pytest.mark.parametrize("format", FORMATS)
def test_it_compiles_and_is_described(format: str) -> None:
    program = npu_compiler.compile(captured(Projections(), 40), "cuda:sm_90", **FORMATS[format])
    calls = program.entries["main"].calls
    (call,) = (c for c in calls if c.kind == "gemm_with_loops")
    assert call.text.startswith("in0: ") and call.text.count("out0 = ") == 3
    without = npu_compiler.compile(captured(Projections(), 40), "cuda:sm_90", disable=(REWRITE,), **FORMATS[format])
    assert len(without.entries["main"].calls) > len(calls)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
needs_a_gpu, or_is_skipped = cuda_gpu.marks()


def results(model: Projections, rows: int, positions: torch.Tensor, **options: Any) -> dict[str, np.ndarray]:
    """Queries and caches of a program on the GPU."""
    program, backend = npu_compiler.compile(captured(model, rows), "cuda:sm_90", **options), cuda_gpu.backend()
    kinds = [c.kind for c in program.entries["main"].calls]
    assert ("gemm_with_loops" in kinds) == ("disable" not in options)
    executor = Executor(program, load_weights(program, state_dict_numpy(model), backend), backend)
    made = {name: np.asarray(y) for name, y in executor.run([example(model, rows), positions]).items()}
    return made | executor.state.snapshot()


def check(model: Projections, rows: int, positions: torch.Tensor, format: str = "elements") -> None:
    """Check that the results are the same with and without the rewrite, but for a few that are rounded to a neighbour:
    the compiler contracts the multiply-adds of both in its own way."""
    got = results(model, rows, positions, **FORMATS[format])
    want = results(model, rows, positions, disable=(REWRITE,), **FORMATS[format])
    for name, value in want.items():
        apart = np.abs(got[name].astype(np.float32) - value.astype(np.float32))
        largest = np.abs(value.astype(np.float32)).max()
        assert largest > 0 and apart.max() <= 2**-8 * largest, name
        assert np.count_nonzero(apart) <= 3 + 1e-4 * apart.size, name


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize("rows", [128, 512, 2048])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("heads", [12, 1])
def test_results_of_a_prompt(rows: int, format: str, heads: int) -> None:
    """The shapes of Qwen2.5-1.5B, and of a narrow product."""
    torch.manual_seed(0)
    check(Projections(heads, kv=2, hidden=1536), rows, torch.arange(rows) + 7, format)


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize("rows", [17, 300])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("options", [{}, {"tables": "whole"}, {"bias": False, "dtype": torch.float16}, {"batch": 3}])
def test_results_of_other_shapes(rows: int, size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check(Projections(size=size, **options), rows, torch.arange(rows))


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize("rows", [40, 512])
def test_the_last_row_of_a_position_stays(rows: int) -> None:
    """Positions that repeat, and positions in any order."""
    torch.manual_seed(0)
    check(Projections(), rows, torch.arange(rows) ** 2 % 37)
    check(Projections(), rows, torch.randperm(rows))
