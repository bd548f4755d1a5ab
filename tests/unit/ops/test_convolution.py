"""How convolutions become primitives."""

from __future__ import annotations

import pytest
import torch

from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.ops import lower_call


@pytest.mark.parametrize(("channels", "groups", "convolutions"), [(4, 1, 1), (40, 1, 3), (4, 2, 3), (4, 4, 0)])
def test_few_channels_have_the_taps_of_the_depth_among_them(channels: int, groups: int, convolutions: int) -> None:
    """With many channels, or in groups, a convolution for each tap adds to the sum. A depthwise one is one node."""
    torch.manual_seed(0)
    x = torch.randn(2, channels, 8, 5, 6, dtype=torch.float64)
    w = torch.randn(8, channels // groups, 3, 3, 2, dtype=torch.float64)
    b = torch.randn(8, dtype=torch.float64)
    graph = Graph("conv3d")
    given = [graph.input(name, tuple(t.shape), "float64") for name, t in (("x", x), ("w", w), ("b", b))]
    attrs = {"stride": [2, 1, 2], "padding": [1, 0, 1], "dilation": [2, 1, 1], "groups": groups}
    (y,) = lower_call(graph, "aten.conv3d.default", given, attrs)
    graph.outputs = [("y", y)]
    assert [n.op for n in graph.nodes].count("conv2d") == convolutions
    (got,) = interp.run(graph, {"x": x.numpy(), "w": w.numpy(), "b": b.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(got), torch.conv3d(x, w, b, **attrs))
