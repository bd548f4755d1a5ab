"""Weights of convolutions as sums of bfloat16 numbers, and the convolutions that are computed with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import run_graph
from npu_compiler.schedule.anchors import Conv2d
from npu_compiler.targets.cpu.devices import DEVICES
from npu_compiler.targets.cpu.limbs import limbs_are_faster
from npu_compiler.weights import packing

ROWS = {d.name: d for d in DEVICES}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_limbs_sum_to_the_weights(dtype: str) -> None:
    layout, (g, k, t, c), panel = packing.LIMBS_OF[dtype], (2, 37, 3, 41), 32
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((g, k, t, c)) * 2.0 ** rng.integers(-12, 12, (g, k, t, c))).astype(dtype)
    w[0, 0, 0, :4] = np.finfo(dtype).max, -np.finfo(dtype).max, np.finfo(dtype).smallest_normal, -0.0
    w[1, 36, 2, 40], w[1, 33, 0, 0] = np.inf, np.nan
    packed = packing.pack(w, panel, layout)
    assert (packed.shape, packed.dtype) == (packing.packed_spec(layout, w.shape, dtype, panel)[0], ml_dtypes.bfloat16)
    joined = packing.join(packed, packing.LIMBS[layout], t, c)
    np.testing.assert_array_equal(joined[:, :k], w.astype(np.float32))
    assert not joined[:, k:].any()
    np.testing.assert_array_equal(packed[:, :, -32].astype(int), [[0, 0], [0, 1]])


def test_a_dtype_has_one_layout_of_limbs() -> None:
    with pytest.raises(ValueError, match="bfloat16 cannot be packed as 'bf16x2'"):
        packing.packed_spec("bf16x2", (1, 32, 1, 32), "bfloat16", 32)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "c", "k", "filter", "stride", "groups", "wanted"),
    [
        ("amx", "float32", 14, 1024, 256, 1, 1, 1, True),
        ("amx", "float16", 14, 256, 256, 3, 1, 1, True),
        ("amx", "float32", 28, 128, 128, 3, 2, 1, True),
        ("amx", "float32", 7, 512, 2048, 1, 1, 1, False),  # the weights come from memory
        ("amx", "float16", 7, 512, 2048, 1, 1, 1, True),
        ("amx", "float32", 14, 512, 512, 3, 2, 1, False),  # rows of 7 positions fill half of a tile
        ("amx", "float32", 64, 3, 64, 7, 2, 1, False),  # 3 of 32 channels
        ("amx", "float32", 4, 256, 256, 1, 1, 1, False),  # one tile of rows
        ("amx", "float32", 14, 256, 256, 1, 1, 2, False),
        ("amx", "bfloat16", 14, 256, 256, 1, 1, 1, False),
        ("avx512", "float16", 14, 1024, 256, 1, 1, 1, False),
    ],
)
def test_limbs_are_chosen_by_the_rates_of_the_device(
    device: str, dtype: str, size: int, c: int, k: int, filter: int, stride: int, groups: int, wanted: bool
) -> None:
    graph, pad = Graph("conv"), filter // 2
    x = graph.input("x", (1, size, size, c), dtype)
    w = graph.input("w", (k, filter, filter, c // groups), dtype)
    y = graph.conv2d(x, w, (stride, stride), (pad,) * 4, (1, 1), groups)
    assert limbs_are_faster(y.node, ROWS[device]) is wanted


@pytest.mark.parametrize(("switches", "limbs"), [((), 2), (("limbs",), 1)])
def test_the_choice_can_be_switched_off(switches: tuple[str, ...], limbs: int) -> None:
    g = Graph("conv")
    x, w = g.input("x", (1, 28, 28, 128), "float16"), g.weight("w", (128, 1, 1, 128), "float16")
    g.outputs = [("y", g.conv2d(x, w, (1, 1), (0, 0, 0, 0), (1, 1), 1).cast("float16"))]
    schedule = run_graph(g, "cpu:amx", disable=switches).schedule
    assert schedule is not None
    assert [k.limbs for k in schedule.kernels if isinstance(k, Conv2d)] == [limbs]
