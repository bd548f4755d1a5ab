"""Scatters that share a launch with what touches other data, on the SIMT kernels as Metal runs them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.pipeline import run_phases
from npu_compiler.schedule.kernel import FusedLoops
from npu_compiler.targets.codegen.nest import build_nest
from npu_compiler.targets.cuda.dialect import DIALECT
from npu_compiler.targets.simt.kernels.loops import emit_fused
from npu_compiler.targets.simt.lang.vectorize import point_order

from ...models.gate import Args, run
from ...support.metal_backend import EmulatedMetal


class Caches(nn.Module):
    """Rows [2, rows, width] go to places of two caches; of several for one place the last one stays."""

    def forward(
        self, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return k.index_copy(1, at, x * 2), v.index_copy(1, at, x + 1), x * x


def caches(rows: int, width: int) -> Args:
    torch.manual_seed(rows)
    at = torch.randint(0, 40, (rows,))
    assert rows < 2 or len(set(at.tolist())) < rows
    return torch.randn(2, 40, width), torch.randn(2, 40, width), at, torch.randn(2, rows, width)


@pytest.mark.parametrize(("rows", "width"), [(1, 24), (37, 24), (37, 200), (50, 13), (30, 1100)])
def test_the_last_row_for_a_place_stays(rows: int, width: int) -> None:
    """Turns of a simd, of several, and of a whole group."""
    args = caches(rows, width)
    program = npu_compiler.compile(capture(Caches(), args), "metal")
    for order in ("ascending", "shuffled"):
        found = run(program, state_dict_numpy(Caches()), [args], EmulatedMetal(order, seed=3))
        for ours, wanted in zip(found, Caches()(*args), strict=True):
            assert (ours == wanted.double().numpy()).all(), order
    scatters = {c.kind for c in program.entries["main"].calls if "scatter" in c.name}
    assert scatters == ({"fused_loops"} if width <= 200 else {"loops"})


def test_what_needs_no_other_kernel_shares_the_first_launch() -> None:
    """Two copies and the square, then two scatters."""
    calls = npu_compiler.compile(capture(Caches(), caches(37, 24)), "metal").entries["main"].calls
    assert [len(c.outputs) for c in calls] == [3, 2]


def test_later_rows_for_a_place_are_found_by_their_index() -> None:
    """One comparison each: where an index leads to is not computed."""
    schedule = run_phases(capture(Caches(), caches(37, 24)), "cuda", None, until="memory").schedule
    assert schedule is not None
    text = "".join(emit_fused(k, DIALECT).text for k in schedule.kernels if isinstance(k, FusedLoops))
    places = re.findall(r"struct \S+_places\d+ \{.*?\n  \}", text, re.DOTALL)
    assert len(places) == 2 and all("checked" not in p and "*" not in p.split("= a", 1)[1] for p in places)


class Turned(nn.Module):
    """Heads [rows, heads, 64] times a table [rows, 64], stored head by head."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) * table).contiguous()


def test_lines_that_load_the_same_follow_each_other() -> None:
    args = torch.randn(40, 6, 64), torch.randn(40, 64)
    schedule = run_phases(capture(Turned(), args), "cuda", None, until="memory").schedule
    assert schedule is not None
    nest = build_nest(schedule.kernels[0])
    assert [nest.size[d] for d in point_order(nest)] == [40, 6, 64]
    narrow = run_phases(capture(Turned(), (args[0][..., :8], args[1][:, :8])), "cuda", None, until="memory").schedule
    assert narrow is not None
    nest = build_nest(narrow.kernels[0])
    assert [nest.size[d] for d in point_order(nest)] == [6, 40, 8]  # 32 bytes are not a line


def test_places_that_the_caller_gives_are_read_before_the_wait() -> None:
    schedule = run_phases(capture(Caches(), caches(37, 24)), "cuda", None, until="memory").schedule
    assert schedule is not None
    texts = [emit_fused(k, DIALECT).text for k in schedule.kernels if isinstance(k, FusedLoops)]
    looked = r"= is_overwritten<.*\n *pdl_wait\(\);\n *if \(overwritten\) return;"
    assert sum(len(re.findall(looked, t)) for t in texts) == 2
