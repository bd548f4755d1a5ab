"""Kernels that decode weights run beside earlier products: their place, and the memory that they write."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from npu_compiler.frontend import capture
from npu_compiler.pipeline import State, run_phases
from npu_compiler.schedule.anchors import Gemm
from npu_compiler.schedule.kernel import Kernel, Unpack
from npu_compiler.targets.cuda.dialect import HOPPER
from npu_compiler.targets.simt.emit import emit


@cache
def _network(rows: int) -> Any:
    """Products of ``rows`` rows, one after the other. The weights of the last are the largest."""
    sizes = (64, 192, 64, 32, 64, 320)
    layers = (nn.Linear(k, n, dtype=torch.bfloat16) for k, n in pairwise(sizes))
    return capture(nn.Sequential(*layers), (torch.zeros(rows, 64, dtype=torch.bfloat16),))


def products(target: str, rows: int = 300, **options: Any) -> State:
    return run_phases(_network(rows), target, weights="int4_g32", **options)


@cache
def _kernels(target: str) -> list[Kernel]:
    schedule = products(target).schedule
    assert schedule is not None
    return schedule.kernels


def test_each_product_hides_one_and_the_largest_choose_first() -> None:
    kernels = _kernels("cuda:sm_90")
    unpacks = [k for k in kernels if isinstance(k, Unpack)]
    assert [(k.n, k.early) for k in unpacks] == [(192, False), (64, True), (320, True), (32, False), (64, True)]
    for before, k in pairwise(kernels):
        assert isinstance(before, Gemm) or not (isinstance(k, Unpack) and k.early)
    largest = max(unpacks, key=lambda k: k.n * k.k)  # behind the longest of the three products before its own
    assert kernels[kernels.index(largest) - 1].flops == max(k.flops for k in kernels[3:-1])


def test_other_devices_keep_the_order() -> None:
    for target in ("cuda:sm_80", "metal"):
        assert not any(k.early for k in _kernels(target) if isinstance(k, Unpack))


def test_no_kernel_that_may_still_run_uses_the_memory() -> None:
    """Those since the previous early kernel, which lets its successors start when all before it have ended."""
    kernels = _kernels("cuda:sm_90")
    since: list[Kernel] = []
    compared = 0
    for k in kernels:
        if isinstance(k, Unpack) and k.early:
            out = k.outputs[0].buffer
            for o in (o for other in since for o in other.operands if o.buffer.kind == "arena"):
                b = o.buffer
                assert b.offset + b.nbytes <= out.offset or out.offset + out.nbytes <= b.offset, f"{k.name}: {b.name}"
                compared += 1
            since = []
        since.append(k)
    assert compared > 8


def test_only_the_last_workgroup_waits() -> None:
    early = next(k for k in _kernels("cuda:sm_90") if isinstance(k, Unpack) and k.early)
    emission = emit(early, HOPPER)
    assert f"LAST = {emission.workgroups - 1}" in emission.text
    assert "pdl_launch_dependents();\n  pdl_wait" not in emission.text
