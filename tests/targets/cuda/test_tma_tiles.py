"""Tiles by Hopper's copy engine: what they take, how they are chosen, and sizes around their edges on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_compiler.graph import expr
from npu_compiler.schedule.anchors import Conv2d, Gemm
from npu_compiler.schedule.buffers import contiguous_strides
from npu_compiler.schedule.kernel import Buffer, Kernel, Operand
from npu_compiler.targets.cuda.dialect import DIALECT, HOPPER
from npu_compiler.targets.cuda.tile_selection import choose, device_of
from npu_compiler.targets.cuda.tma_conv import supports_tma_conv
from npu_compiler.targets.cuda.tma_epilogue import residual_of, row_pitch, supports_tma_store
from npu_compiler.targets.cuda.tma_gemm import MAX_PRIMED, supports_tma, tile_k
from npu_compiler.targets.simt.emit import Functions
from npu_compiler.targets.simt.kernels.gemm import product_of
from npu_compiler.targets.simt.lang.program import ARENA, Launch, TileMap, pack, unpack
from npu_runtime.backends.cuda import entry as cuda_entry

from ...models.gate import Args, compile_and_run, expect
from ...support import cuda_gpu
from ..simt.test_tile_edges import attention, conv, linear, product


def _operand(number: int, kind: str, *shape: int, dtype: str = "float16") -> Operand:
    return Operand(Buffer(number, kind, dtype, shape, ""), shape, contiguous_strides(shape))


def _gemm(m: int, n: int, k: int, dtype: str = "float16") -> Gemm:
    sides = _operand(0, "arena", 1, m, k, dtype=dtype), _operand(1, "weight", 1, n, k, dtype=dtype)
    return Gemm(
        label="gemm", inputs=sides, outputs=(_operand(2, "arena", m, n, dtype=dtype),), epilogue=expr.acc().cast(dtype),
        batch=1, m=m, n=n, k=k, lda=k, batch_stride=0, shared=True,
    )  # fmt: skip


def _conv(image: int, channels: int, out: int, batch: int = 1, taps: int = 3, stride: int = 1) -> Conv2d:
    pad = taps // 2
    size = (image + 2 * pad - taps) // stride + 1
    sides = _operand(0, "arena", batch, image, image, channels), _operand(1, "weight", 1, out, taps * taps, channels)
    return Conv2d(
        label="conv2d", inputs=sides, outputs=(_operand(2, "arena", batch, size, size, out),),
        epilogue=expr.acc().cast("float16"), stride=(stride, stride), padding=(pad, pad, pad, pad), dilation=(1, 1),
        groups=1, kernel_size=(taps, taps), channels=(channels, out),
    )  # fmt: skip


KERNELS = {
    "a few rows": _gemm(17, 64, 64), "many": _gemm(2048, 8960, 1536), "one column of tiles": _gemm(100_000, 64, 576),
    "long sums": _gemm(128, 1536, 8960), "odd": _gemm(129, 136, 72), "image": _conv(56, 128, 128, 256),
    "narrow and long": _gemm(50_176, 16, 32), "narrow image": _conv(112, 32, 32, 4, 1),
    "small image": _conv(7, 512, 512), "half a stage": _conv(9, 32, 40), "moves by two": _conv(56, 128, 128, 8, 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_fits_the_chip(name: str) -> None:
    kernel = KERNELS[name]
    assert supports_tma(kernel) and HOPPER.special_for(kernel) is not None and DIALECT.special_for(kernel) is None
    step = tile_k(kernel)
    plan = choose(kernel, step, supports_tma_store(kernel), HOPPER)
    functions = Functions(HOPPER)
    launch = functions.launch(kernel)
    available = device_of(HOPPER).shared_per_sm - 1024 * plan.blocks_per_sm
    assert (launch.shared or 48 << 10) * plan.blocks_per_sm <= available
    assert plan.stages >= 3 and plan.n // 2 * launch.threads * plan.blocks_per_sm <= HOPPER.device.registers
    assert launch.workgroups % plan.splits == 0 and [m[0] for m in launch.maps][:2] == [-1, 1]
    left, right, *results = (m[2] for m in launch.maps)
    assert len(results) == plan.tma_store == ("RESULT_STAGES = 0" not in functions.text[launch.function])
    assert all(r.box == (64, 64, 1) and r.sizes[:2] == (right.sizes[1], product_of(kernel).m) for r in results)
    assert left.box[:2] == (step, plan.m) and right.box[:2] == (step, plan.n) and left.swizzle == 2 * step
    assert all(s % 16 == 0 for s in (*left.strides, *right.strides))
    assert ("__cluster_dims__" in functions.text[launch.function]) == (plan.splits > 1)


@pytest.mark.parametrize("name", ["many", "long sums", "odd", "image"])
def test_few_weights_are_loaded_before_the_kernel_in_front_ends(name: str) -> None:
    """They delay the left operand, if the kernel starts when that one ends."""
    text = (functions := Functions(HOPPER)).text[functions.launch(KERNELS[name]).function]
    primed, columns, step = (
        int(text.partition(f" {size} = ")[2].split(",")[0]) for size in ("PRIMED", "TILE_N", "TILE_K")
    )
    assert primed == 1 or 1 < primed * columns * step * 2 <= MAX_PRIMED


def test_columns_that_are_neighbours_come_in_tiles_of_64() -> None:
    kernel = _gemm(1536, 2560, 2048)
    rows, w = kernel.inputs
    turned = replace(kernel, inputs=(rows, replace(w, strides=(2560 * 2048, 1, 2560))))
    assert supports_tma(turned) and choose(turned, 64, True, HOPPER) == choose(kernel, 64, True, HOPPER)
    functions = Functions(HOPPER)
    launch = functions.launch(turned)
    right = launch.maps[1][2]
    assert (right.sizes, right.strides, right.box) == ((2560, 2048, 1), (5120, 2560 * 4096), (64, 64, 1))
    assert right.swizzle == 128 and "N_MAJOR = true" in functions.text[launch.function]
    apart = replace(turned, inputs=(rows, replace(w, strides=(2564 * 2048, 1, 2564))))
    few = replace(_gemm(1536, 32, 2048), inputs=(rows, _operand(1, "arena", 1, 2048, 32)))
    few = replace(few, inputs=(rows, replace(few.inputs[1], shape=(1, 32, 2048), strides=(65536, 1, 32))))
    assert not supports_tma(apart) and not supports_tma(few)


def test_rows_that_overlap_are_left_to_threads() -> None:
    kernel = _conv(16, 32, 64, taps=1)
    rows = kernel.inputs[0]
    overlapping = Operand(rows.buffer, rows.shape, (rows.strides[0], rows.strides[1], 8, 1))
    assert supports_tma(kernel) and not supports_tma(replace(kernel, inputs=(overlapping, *kernel.inputs[1:])))


def _rows(image: int, batch: int, out: int = 64, taps: int = 7) -> Conv2d:
    """A convolution of an image whose pixels are padded to four channels, moved by two."""
    size, kernel = image // 2, _conv(image // 2, 32, out, batch, 1)
    high, wide = (size - 1) * 2 + taps, (size - 1) * 2 + 8
    whole = _operand(0, "arena", batch, high, wide, 4)
    rows = Operand(whole.buffer, (batch, high, size, 32), (high * wide * 4, wide * 4, 8, 1))
    sides = rows, _operand(1, "weight", 1, out, taps, 32)
    return replace(kernel, inputs=sides, kernel_size=(taps, 1), stride=(2, 1))


LINES = {
    "stem": (_rows(224, 256), 132), "stem of one": (_rows(224, 1), 98), "small": (_rows(36, 99, 32, 3), 264),
    "3x3": (_conv(56, 64, 64, 256), 132), "few filters": (_conv(56, 64, 40, 99), 132),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_lines_of_pixels_fit_the_chip(name: str) -> None:
    kernel, groups = LINES[name]
    assert supports_tma_conv(kernel, HOPPER) and DIALECT.special_for(kernel) is None
    functions = Functions(HOPPER)
    launch = functions.launch(kernel)
    assert '#include "tma_conv.h"' in functions.text[launch.function] and launch.workgroups == groups
    resident = -(-groups // HOPPER.device.compute_units)
    assert (launch.shared or 48 << 10) * resident <= device_of(HOPPER).shared_per_sm - 1024 * resident
    assert all(max(m[2].box) <= 256 and all(s % 16 == 0 for s in m[2].strides) for m in launch.maps)


@pytest.mark.parametrize(
    "kernel",
    [_conv(56, 64, 64), _conv(9, 64, 64, 512), _conv(56, 64, 256, 256), _conv(56, 64, 64, 256, 3, 2), _rows(36, 1)],
    ids=["few lines", "short lines", "large filters", "moves by two", "small image"],
)
def test_other_lines_are_left_to_the_other_kernels(kernel: Kernel) -> None:
    assert not supports_tma_conv(kernel, HOPPER)


@pytest.mark.parametrize(
    "kernel",
    [_gemm(16, 64, 64), _gemm(64, 64, 60), _gemm(64, 64, 16, "float32"), _gemm(64, 8, 64), _conv(9, 24, 64)],
    ids=["one row of fragments", "rows not at 16 bytes", "few floats", "few columns", "channels"],
)
def test_others_are_left_to_the_common_kernels(kernel: Kernel) -> None:
    assert not supports_tma(kernel) and HOPPER.special_for(kernel) is None


def _added(kernel: Kernel, operand: Operand, *index: expr.Expr) -> Kernel:
    """``kernel`` with an element of ``operand`` added to every result."""
    out = kernel.outputs[0]
    x = expr.load(len(kernel.inputs), operand.dtype, index or expr.identity_index(out.shape)).cast("float32")
    return replace(kernel, inputs=(*kernel.inputs, operand), epilogue=(expr.acc() + x).cast(out.dtype))


def test_results_leave_as_tiles_if_rows_are_evenly_spaced() -> None:
    kernel = _gemm(300, 256, 64)
    (out,) = kernel.outputs
    assert supports_tma_store(kernel) and residual_of(kernel) == -1
    wide = replace(out, strides=(264, 1), buffer=replace(out.buffer, shape=(300, 264)))
    assert row_pitch(wide) == 264 and supports_tma_store(replace(kernel, outputs=(wide,)))
    for strides, offset in (((257, 1), 0), ((1, 300), 0), ((264, 1), 4)):
        assert not supports_tma_store(replace(kernel, outputs=(replace(wide, strides=strides, offset=offset),)))
    assert not supports_tma_store(replace(kernel, outputs=(_operand(2, "arena", 300, 256, dtype="float32"),)))
    assert row_pitch(replace(out, shape=(3, 100, 256), strides=(25600, 256, 1))) == 256
    assert row_pitch(replace(out, shape=(3, 100, 256), strides=(25608, 256, 1))) == 0


def test_the_fastest_tiles_that_were_measured_are_chosen() -> None:
    # microseconds on an H200 of the tile that is expected, and of the one that seems cheaper if stores are hidden
    whole, added = _gemm(2048, 2048, 1536), _added(_gemm(512, 1536, 1536), _operand(3, "arena", 512, 1536))
    assert isinstance(added, Gemm)
    plan = choose(whole, 64, True, HOPPER)
    assert (plan.m, plan.n, plan.tma_store) == (128, 128, True)  # 22.5; 128 x 256, one for each block: 24.0
    plan = choose(added, 64, True, HOPPER)
    assert (plan.m, plan.n, plan.tma_store) == (64, 96, False)  # 7.0; 64 x 128, stored by TMA: 9.8
    plan = choose(_added(_gemm(50_176, 1024, 256), _operand(3, "arena", 50_176, 1024)), 64, True, HOPPER)
    assert (plan.m, plan.n, plan.tma_store) == (128, 256, True)  # 74.9; 64 x 128: 89


def test_a_tile_is_stored_while_the_next_one_is_multiplied() -> None:
    """Threads need registers for the sums of both, which they take from those of a whole warpgroup of loads."""
    gate = replace(_gemm(512, 8960, 1536), dual=True)
    up = _operand(1, "weight", 1, 2 * 8960, 1536)
    gate = replace(gate, inputs=(gate.inputs[0], up), epilogue=(expr.acc() * expr.acc(number=1)).cast("float16"))
    plan = choose(gate, 64, False, HOPPER)
    assert (plan.m, plan.n, plan.overlap) == (128, 192, True)
    launch = (functions := Functions(HOPPER)).launch(gate)
    assert launch.threads == 384 and "OVERLAP = true" in functions.text[launch.function]
    assert plan.n + 40 <= HOPPER.device.registers // 256
    one_each, stored_by_tma = _gemm(512, 256, 1536), _gemm(2048, 2048, 1536)
    few_stages, added = replace(gate, k=256), _added(gate, _operand(3, "arena", 512, 8960))
    for other in (one_each, stored_by_tma, few_stages, added):
        assert isinstance(other, Gemm) and not choose(other, 64, supports_tma_store(other), HOPPER).overlap


def test_residuals_come_as_tiles_and_vectors_as_they_are() -> None:
    kernel = _gemm(300, 256, 64)
    last = expr.index(1)
    assert residual_of(_added(kernel, _operand(3, "arena", 300, 256))) == 2
    assert residual_of(_added(kernel, _operand(3, "weight", 256), last)) == -1
    for other, index in (
        (_operand(3, "arena", 300, 256, dtype="float32"), ()),
        (_operand(3, "arena", 300), (expr.index(0),)),
        (_operand(3, "weight", 300, 256), (expr.const(299, "int64") - expr.index(0), last)),
    ):
        assert residual_of(_added(kernel, other, *index)) is None
    two = _added(_added(kernel, _operand(3, "arena", 300, 256)), _operand(4, "arena", 300, 256))
    both = expr.load(2, "float16", expr.identity_index((300, 256))).cast("float32") + two.epilogue.cast("float32")
    assert residual_of(replace(two, epilogue=both.cast("float16"))) is None


def test_a_window_of_pixels_is_as_wide_as_the_output() -> None:
    launch = Functions(HOPPER).launch(_conv(57, 64, 64, 2, 3, 2))
    pixels = launch.maps[0][2]
    assert pixels.sizes == (64, 57, 57, 2) and pixels.steps == (2, 2)
    low, high = pixels.corners[0], pixels.corners[2]
    assert len(range(low, 57 + high, 2)) == 29


def test_tile_maps_are_kept_in_the_program() -> None:
    launch = Functions(HOPPER).launch(_conv(9, 64, 64))
    entries, code = unpack(pack({"main": [launch]}, {"arch": "sm_90a"}))
    assert entries == {"main": [launch]} and code == {"arch": "sm_90a"}
    assert isinstance(entries["main"][0].maps[0][2], TileMap)


def test_tile_maps_are_made_once_for_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = TileMap((8, 8, 1), (16, 128), (8, 8, 1), 128)
    driver, entry = MagicMock(), object.__new__(cuda_entry.CUDAEntry)
    driver.tile_map.side_effect = lambda name, address, map: (address, map)
    monkeypatch.setattr(cuda_entry, "driver", lambda: driver)
    entry._launches = [Launch("f", 1, 32, 0, ((ARENA, 0),), False, ((ARENA, 64, tiles), (3, 0, tiles)))]
    entry._maps, entry._backend, entry._code, entry._entry = {}, MagicMock(), MagicMock(), MagicMock()
    for arena, made in ((1024, 2), (1024, 2), (2048, 4)):
        entry._launch(0, {ARENA: arena, 3: 4096}, overlap=True)
        assert driver.launch.call_args.args[-1] == [(arena + 64, tiles), (4096, tiles)]
        assert driver.tile_map.call_count == made


def image(size: int, batch: int = 2, **options: Any) -> tuple[nn.Module, Args]:
    return nn.Sequential(nn.Conv2d(3, 40, **options), nn.ReLU()), (torch.randn(batch, 3, size, size),)


def lines(batch: int, size: tuple[int, int], out: int, **options: Any) -> tuple[nn.Module, Args]:
    return nn.Sequential(nn.Conv2d(64, out, **options), nn.ReLU()), (torch.randn(batch, 64, *size),)


def gated(m: int, n: int, k: int) -> tuple[nn.Module, Args]:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(self.gate(x)) * self.up(x)

    return Gate(), (torch.randn(m, k),)


def residual(size: int, channels: int, batch: int = 2, taps: int = 1) -> tuple[nn.Module, Args]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, taps, padding=taps // 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.conv(F.relu(x)) + x)

    return Block(), (torch.randn(batch, channels, size, size),)


class Shortcut(nn.Module):
    """The first block of a ResNet's stage; ``taps`` of the convolution that ends it."""

    def __init__(self, channels: int, inner: int, out: int, stride: int = 1, taps: int = 1) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1, stride)
        self.expand = nn.Conv2d(inner, out, taps, padding=taps // 2, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.expand(F.relu(self.reduce(x)))) + self.shortcut(x))


def shortcut(size: int, batch: int, *channels: int, stride: int = 1, taps: int = 1) -> tuple[nn.Module, Args]:
    return Shortcut(*channels, stride=stride, taps=taps), (torch.randn(batch, channels[0], size, size),)


def pooled(batch: int, size: tuple[int, int], *layer: int) -> tuple[nn.Module, Args]:
    """A convolution of enough images for its results to be pooled in its kernel."""
    model = nn.Sequential(nn.Conv2d(*layer), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(layer[1], 40, 1))
    return model, (torch.randn(batch, layer[0], *size),)


class Bottlenecks(nn.Module):
    """The end of a bottleneck block, which adds ``added`` or a convolution of it, and the next block with one 1x1
    convolution less."""

    def __init__(self, last: int, shortcut: bool) -> None:
        super().__init__()
        self.enter, self.expand, self.reduce = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 256, 1), nn.Conv2d(256, last, 1)
        self.again = nn.Conv2d(last, 256, 1)
        self.shortcut = nn.Conv2d(64, 256, 1) if shortcut else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        added = torch.cat([x] * 4, 1) if self.shortcut is None else self.shortcut(x)
        y = F.relu(self.expand(x) + added)
        return F.relu(self.again(F.relu(self.reduce(y))) + y).mean((2, 3))


def bottlenecks(batch: int, size: int, last: int, shortcut: bool = False) -> tuple[nn.Module, Args]:
    return Bottlenecks(last, shortcut), (torch.randn(batch, 64, size, size),)


def layer(m: int, hidden: int, inner: int, gate: bool = False) -> tuple[nn.Module, Args]:
    """A residual stream, its RMS norm, and products of that."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.norm = nn.Linear(inner, hidden), nn.Parameter(torch.rand(hidden) + 0.5)
            self.up, self.gate = nn.Linear(hidden, inner), nn.Linear(hidden, inner, bias=False)

        def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            stream = stream + self.down(x)
            y = stream.float()
            y = self.norm * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            return stream, F.silu(self.gate(y)) * self.up(y) if gate else self.up(y)

    return Layer(), (torch.randn(m, inner), 3 * torch.randn(m, hidden))


CASES: dict[str, Callable[[], tuple[nn.Module, Args]]] = {
    "product-65x136x72": lambda: product(65, 136, 72),
    "product-300x264x1096": lambda: product(300, 264, 1096),
    "product-200x96x24": lambda: product(200, 96, 24),
    "product-batch": lambda: product(100, 136, 136, batch=3),
    "linear-17x40x64": lambda: linear(17, 40, 64),
    "linear-128x96x4096": lambda: linear(128, 96, 4096),
    "gated-200x264x520": lambda: gated(200, 264, 520),
    "gated-2000x1160x456": lambda: gated(2000, 1160, 456),
    "gated-900x3000x1096": lambda: gated(900, 3000, 1096),
    "linear-2040x2568x1096": lambda: linear(2040, 2568, 1096),
    "gated-2500x2500x456": lambda: gated(2500, 2500, 456),
    "layer-33x200x72": lambda: layer(33, 200, 72),
    "layer-128x512x4096": lambda: layer(128, 512, 4096),
    "layer-500x768x1000": lambda: layer(500, 768, 1000),
    "layer-2040x1536x2048": lambda: layer(2040, 1536, 2048),
    "layer-gated": lambda: layer(300, 384, 520, gate=True),
    "conv-3x3": lambda: conv(11, 64, 72, kernel_size=3, padding=1),
    "conv-stride": lambda: conv(15, 64, 40, kernel_size=3, stride=2, padding=1),
    "conv-dilated": lambda: conv(17, 32, 64, kernel_size=3, dilation=2, padding=2),
    "conv-1x1-stride": lambda: conv(14, 64, 128, kernel_size=1, stride=2),
    "conv-long-sums": lambda: conv(7, 512, 128, kernel_size=3, padding=1),
    "image-7x7": lambda: image(33, kernel_size=7, stride=2, padding=3),
    "image-3x3": lambda: image(18, kernel_size=3, stride=2, padding=1),
    "image-many": lambda: image(65, 64, kernel_size=7, stride=2, padding=3),
    "image-many-small": lambda: image(18, 99, kernel_size=3, stride=2, padding=1),
    "image-shared": lambda: image(224, 1, kernel_size=7, stride=2, padding=3),
    "residual": lambda: residual(13, 64),
    "residual-128": lambda: residual(29, 128, 5, 3),
    "tiles-700x512x200": lambda: product(700, 512, 200),
    "tiles-3000x384x136": lambda: linear(3000, 384, 136),
    "shortcut": lambda: shortcut(17, 60, 64, 64, 256),
    "shortcut-stride": lambda: shortcut(35, 55, 128, 64, 256, stride=2),
    "shortcut-3x3": lambda: shortcut(27, 50, 64, 128, 512, stride=2, taps=3),
    "lines": lambda: lines(64, (23, 15), 40, kernel_size=3, padding=1),
    "lines-dilated": lambda: lines(128, (16, 24), 64, kernel_size=3, dilation=2, padding=2),
    "lines-5x3": lambda: lines(60, (36, 32), 40, kernel_size=(5, 3), padding=(0, 1)),
    "lines-residual": lambda: residual(24, 64, 50, 3),
    "pool": lambda: (nn.Sequential(nn.Conv2d(8, 64, 1), nn.MaxPool2d(3, 2, 1)), (torch.randn(8, 8, 57, 57),)),
    "pool-image": lambda: pooled(200, (96, 64), 3, 64, 7, 2, 3),
    "pool-image-rows": lambda: pooled(16, (224, 224), 3, 64, 7, 2, 3),
    "pool-image-odd": lambda: pooled(20, (84, 256), 3, 64, 5, 2, 2),
    "pool-lines": lambda: pooled(130, (16, 32), 64, 64, 3, 1, 1),
    "bottlenecks": lambda: bottlenecks(65, 33, 64),
    "bottlenecks-128": lambda: bottlenecks(22, 56, 128),
    "bottlenecks-shortcut": lambda: bottlenecks(81, 29, 64, shortcut=True),
    "attention-300": lambda: attention(300, 300, 4, 4, 64, True),
    "attention-77x133": lambda: attention(77, 133, 4, 2, 128, False),
    "attention-2000": lambda: attention(2000, 2000, 12, 2, 128, True),
}


needs_a_gpu, or_is_skipped = cuda_gpu.marks()


@needs_a_gpu
@or_is_skipped
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_shape_on_the_gpu(name: str, dtype: str) -> None:
    """float64 is the judge."""
    torch.manual_seed(1)
    model, inputs = CASES[name]()
    expect(model, [inputs], dtype).check(compile_and_run(model, [inputs], dtype, cuda_gpu.backend()))
