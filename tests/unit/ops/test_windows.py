"""Taps of windows that only read padding are left out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call
from npu_compiler.ops.common import inner_taps


def positions(size: int, out: int, taps: int, stride: int, before: int, dilation: int) -> list[list[int]]:
    """Return the elements that each window reads."""
    reads = ([o * stride + r * dilation - before for r in range(taps)] for o in range(out))
    return [[p for p in row if 0 <= p < size] for row in reads]


def test_inner_taps_read_what_all_taps_read() -> None:
    left_out = 0
    for size, taps, stride, dilation in itertools.product((1, 2, 5, 8), (1, 2, 3, 6), (1, 2, 3), (1, 2, 5)):
        for before, after in itertools.product(range(9), repeat=2):
            out = (size + before + after - dilation * (taps - 1) - 1) // stride + 1
            if out < 1:
                continue
            inner, padding = inner_taps(size, out, taps, stride, (before, after), dilation)
            assert min(padding) >= 0
            assert (size + sum(padding) - dilation * (len(inner) - 1) - 1) // stride + 1 == out
            every = positions(size, out, taps, stride, before, dilation)
            assert positions(size, out, len(inner), stride, padding[0], dilation) == every
            left_out += taps - len(inner)
    assert left_out > 0


def lowered(op: str, given: dict[str, torch.Tensor], attrs: dict[str, Any]) -> tuple[Graph, list[torch.Tensor]]:
    """Return the graph of a call and its results."""
    graph = Graph("windows")
    values = [graph.input(name, tuple(t.shape), "float64") for name, t in given.items()]
    ys = lower_call(graph, op, values, attrs)
    graph.outputs = [(f"y{i}", y) for i, y in enumerate(ys) if y is not None]
    found = interp.run(graph, {name: t.numpy() for name, t in given.items()})
    return graph, [torch.from_numpy(y) for y in found.values()]


@pytest.mark.parametrize(("dilation", "taps"), [(4, 9), (9, 3), (12, 1)])
def test_dilated_filters_larger_than_an_image(dilation: int, taps: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 12, 9, dtype=torch.float64), torch.randn(6, 4, 3, 3, dtype=torch.float64)
    attrs: dict[str, Any] = {"padding": [dilation, dilation], "dilation": [dilation, dilation]}
    graph, (y,) = lowered("aten.conv2d.default", {"x": x, "w": w}, attrs)
    (conv,) = (n for n in graph.nodes if n.op == "conv2d")
    assert math.prod(conv.inputs[1].shape[1:3]) == taps
    torch.testing.assert_close(y, torch.conv2d(x, w, **attrs))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pad", [0, 30])
def test_pools_whose_windows_are_larger_than_an_image(pad: int, ceil_mode: bool) -> None:
    x = torch.randn(1, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if pad == 0 and not ceil_mode:
        x = torch.nn.functional.pad(x, (31, 31, 31, 31))  # PyTorch refuses it otherwise
    attrs: dict[str, Any] = {"kernel_size": [61, 61], "stride": [61, 61], "padding": [pad, pad], "ceil_mode": ceil_mode}
    graph, (y,) = lowered("aten.avg_pool2d.default", {"x": x}, attrs)
    torch.testing.assert_close(y, torch.nn.functional.avg_pool2d(x, **attrs))
    windows, (largest, at) = lowered("aten.max_pool2d_with_indices.default", {"x": x}, attrs)
    want = torch.nn.functional.max_pool2d(x, **attrs, return_indices=True)
    torch.testing.assert_close((largest, at), want)
    for g in (graph, windows):
        for node in g.nodes:
            if node.op == "reduce":
                assert math.prod(node.attrs["domain"]) <= x.numel() * y.shape[2] * y.shape[3]
