"""Formats of small codes: their numbers are those of the package ``gguf``, and programs compute with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler import capture
from npu_compiler.artifact.describe import bytes_by_format
from npu_compiler.frontend.tensors import state_dict_numpy, tensor_to_numpy
from npu_compiler.passes.quantize import chosen_format
from npu_compiler.pipeline import run_phases
from npu_compiler.support.errors import ConfigError, IncompressibleError
from npu_compiler.targets.cpu.host import host_cpu
from npu_compiler.weights.format import BlockFormat, Layout, WeightFormats, known_formats, weight_format
from npu_runtime.backends.cpu import CPUBackend
from npu_runtime.executor import Executor

from ...models.gate import cast, expect, run
from ...support.sweeps import FULL, IN_FULL

BLOCKS = {n: f for n in known_formats() if isinstance(f := weight_format(n), BlockFormat)}
GGUF = {n: f for n, f in BLOCKS.items() if f.gguf_type is not None}
TARGETS = ("cpu", "cpu:avx2", "cpu:portable") if "avx2" in host_cpu().features else ("cpu",)
INTEGERS = ("cpu:cooperlake",) if "avx512bf16" in host_cpu().features else ()  # multiplies codes as integers
BYTES = [n for n in BLOCKS if n.startswith(("int8", "fp8"))]
FP8 = [n for n in BLOCKS if n.startswith("fp8")]
WIDE = ["mxfp4", *BYTES]  # with a scale for every float32


@pytest.mark.parametrize("name", GGUF)
def test_every_bit_is_that_of_the_package_gguf(name: str) -> None:
    """Random bytes: scales that are subnormal, infinite and NaN among them."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    format, kind = GGUF[name], gguf.GGMLQuantizationType(GGUF[name].gguf_type)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    assert kind.name.lower() == name and format.row_bytes(3 * elements) == 3 * size
    blocks = np.random.default_rng(0).integers(0, 256, (200, 3 * size), dtype=np.uint8)
    blocks[:40] &= 0b10000011  # small exponents
    with np.errstate(all="ignore"):
        theirs, ours = gguf.quants.dequantize(blocks, kind), format.decode(blocks, 3 * elements)
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~number)
    np.testing.assert_array_equal(ours.view(np.uint32)[number], theirs.view(np.uint32)[number])
    for layout in format.layouts:
        np.testing.assert_array_equal(layout.unpack(layout.pack(blocks[:197]), 197, 3 * size), blocks[:197])


@pytest.mark.parametrize("name", BYTES)
def test_bytes_times_scales(name: str) -> None:
    """Against PyTorch's arithmetic. A row is blocks: the scale, perhaps a zero point, then the numbers."""
    format, rng = BLOCKS[name], np.random.default_rng(2)
    block, zeros = format.block or 384, name.endswith("_zp")
    scales = torch.from_numpy(rng.standard_normal((256, 384 // block, 1)).astype(np.float32))
    scales[0], scales[1] = torch.inf, 2.0**-149
    codes, zero = (torch.from_numpy(rng.integers(0, 256, (256, 384 // block, n), dtype=np.uint8)) for n in (block, 1))
    rows = torch.cat([scales.view(torch.uint8), *([zero] if zeros else []), codes], -1).reshape(256, -1).numpy()
    if name in FP8:
        expected = codes.view(torch.float8_e4m3fn).float() * scales
    else:
        expected = (codes.view(torch.int8).float() - zero.view(torch.int8).float() * zeros) * scales
    np.testing.assert_array_equal(format.decode(rows, 384), expected.reshape(256, 384).numpy())
    if name in FP8:
        with pytest.raises(IncompressibleError, match="a block holds NaN"):
            format.layouts[0].pack(rows)
        rows = torch.cat([scales.view(torch.uint8), codes.clamp(max=126)], -1).reshape(256, -1).numpy()
    layout = format.layouts[0]
    np.testing.assert_array_equal(layout.unpack(layout.pack(rows), *rows.shape), rows)


def test_blocks_of_128_rows_share_a_scale() -> None:
    w = np.random.default_rng(3).standard_normal((200, 256)).astype(np.float32)
    scales = BLOCKS["fp8_e4m3_b128"].encode(w).reshape(200, 2, 132)[..., :4].copy().view(np.float32)[..., 0]
    for rows in (slice(0, 128), slice(128, 200)):
        for column in (0, 1):
            largest = np.abs(w[rows, 128 * column : 128 * column + 128]).max()
            assert (scales[rows, column] == largest / np.float32(448)).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_without_a_form_are_refused(name: str) -> None:
    w = np.ones((2, BLOCKS[name].block or 64), np.float32)
    for value in (np.nan, np.inf, *(() if name in WIDE else (-3e38,))):
        w[1, 7] = value
        with pytest.raises(
            IncompressibleError, match=r"a block holds (NaN or an infinity|a number that needs a scale)"
        ):
            BLOCKS[name].encode(w)


class Layers(nn.Module):
    """A layer for each format, one in none of them, and a pair that one epilogue combines."""

    def __init__(self, formats: list[str]) -> None:
        super().__init__()
        self.formats = formats
        self.plain, self.gate, self.up = nn.Linear(256, 64), nn.Linear(256, 64), nn.Linear(256, 64)
        for name in formats:
            self.add_module(name, nn.Linear(256, 70, bias=name.endswith("0")))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = nn.functional.silu(self.gate(x)) * self.up(x)
        return (self.plain(x), whole, *(self.get_submodule(name)(x).tanh() for name in self.formats))


CASES = [
    (target, rows, dtype) for target in TARGETS + INTEGERS for rows in (1, 33) for dtype in ("bfloat16", "float32")
]
SAMPLE = [("cpu", 1, "bfloat16"), ("cpu", 33, "float32")]
SAMPLE += [("cpu:avx2", 1, "float32"), ("cpu:avx2", 1, "bfloat16"), ("cpu:avx2", 33, "bfloat16")]
SAMPLE += [(target, 1, "bfloat16") for target in INTEGERS]


@pytest.mark.parametrize(
    ("target", "rows", "dtype"), [pytest.param(*c, marks=() if c in SAMPLE else IN_FULL) for c in CASES]
)
def test_each_weight_of_a_program_may_have_its_own_format(target: str, rows: int, dtype: str) -> None:
    """A sample has a part of the formats, without groups of 64, in each of its programs; kernels share their code."""
    sample = [n for n in BLOCKS if "_g64" not in n]
    names = list(BLOCKS) if FULL else sample[SAMPLE.index((target, rows, dtype)) :: len(SAMPLE)]
    if (target, rows) == ("cpu", 1) and "q6_k" not in names:
        names.append("q6_k")  # its codes are joined in a way of their own
    formats = {f"{n}.weight": n for n in names} | {f"{n}.weight": names[1] for n in ("gate", "up")}
    low = getattr(torch, dtype)
    torch.manual_seed(0)
    model = Layers(names).eval().to(low)
    runs = [(torch.randn(rows, 256),) for _ in range(16 if rows == 1 else 1)]
    program = npu_compiler.compile(capture(model, cast(runs[0], low)), target, weights=formats)
    stored = {b.name: b.format for b in program.buffers if b.kind == "weight" and len(b.shape) == 2}
    pair = "up.weight" if "up.weight" in stored else "gate.weight"  # one buffer has both
    assert stored == {key: f"{n}.panels" for key, n in formats.items() if key not in ("gate.weight", "up.weight")} | {
        pair: f"{names[1]}.panels"
    }
    results = run(program, state_dict_numpy(model), [cast(args, low) for args in runs])
    for key, n in formats.items():
        weight = model.get_parameter(key)
        w = tensor_to_numpy(weight.detach())
        weight.data = torch.from_numpy(BLOCKS[n].decode(BLOCKS[n].encode(w), 256)).to(low)
    expect(model, runs, dtype).check(results)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).reshape(1, -1, 2, 32).transpose(1, 2) for p in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_only_products_of_one_format_are_combined() -> None:
    ir = capture(Attention(), (torch.randn(1, 8, 64),))
    for formats, products in (({}, 1), ({"q.weight": "q4_0", "k.weight": "q4_0", "v.weight": "q5_1"}, 2)):
        state = run_phases(ir, "cpu", until="memory", weights=formats)
        assert [n.op for n in state.graph.nodes].count("matmul") == products
    held = {v.node.inputs[0].op for _, v in state.recipes}
    assert [chosen_format(n.inputs[1], WeightFormats()) for n in state.graph.nodes if n.op == "matmul"] == [None] * 2
    assert held == {"reshape"} and len(state.recipes) == 2


def test_formats_of_single_weights_are_block_formats() -> None:
    ir = capture(nn.Linear(64, 32), (torch.zeros(1, 64),))
    program = npu_compiler.compile(ir, weights={"weight": "q5_0", "*": "bf16c12"})
    assert "q5_0.panels" in {b.format for b in program.buffers}
    assert bytes_by_format(program) == {"q5_0": 32 * 64 * 22 // 32, "float32": 32 * 4}
    assert program.describe().endswith("weights by format: q5_0 1.41 kB, float32 128 B\n")
    with pytest.raises(ConfigError, match=r"weight 'weight': a single weight takes a block format, not 'bf16c12'"):
        npu_compiler.compile(ir, weights={"weight": "bf16c12"})
    with pytest.raises(ConfigError, match=r"unknown weight format 'q4'; known: bf16c12, .*q4_0, .*none"):
        npu_compiler.compile(ir, weights={"*": "q4"})


class Decoder(nn.Module):
    """A table whose rows are looked up, and an output projection, which may be the same weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2048, 256), nn.Linear(256, 2048, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        return x, self.head(x)


LOOKED_UP = [n for n, f in BLOCKS.items() if f.layouts[0].looks_up(32, 256)]
TABLES = [("fp8_e4m3", True), ("q3_k", False)]


@pytest.mark.parametrize(
    ("name", "tied"),
    [*TABLES, *(pytest.param(n, t, marks=IN_FULL) for n in LOOKED_UP for t in (True, False))],
)
def test_rows_of_tables_are_looked_up_in_their_blocks(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VERIFY", "2")
    torch.manual_seed(0)
    model, ids = Decoder(tied).eval(), torch.tensor([0, 5, 2047, 33, 5])
    ir = capture(model, (ids,))
    program = npu_compiler.compile(ir, weights={"embed.weight": name, "head.weight": name})
    assert {b.format for b in program.buffers if b.kind == "weight"} == {f"{name}.panels"}
    assert sum(b.kind == "weight" for b in program.buffers) == 2 - tied
    w, format = model.embed.weight.detach().numpy(), BLOCKS[name]
    rows, _ = Executor(program, state_dict_numpy(model), CPUBackend()).run([ids.numpy()]).values()
    np.testing.assert_array_equal(rows, format.decode(format.encode(w), 256)[ids.numpy()])


LAYOUTS = [(n, layout) for n, f in BLOCKS.items() for layout in f.layouts if layout.looks_up(32, 256)]


@pytest.mark.parametrize(("name", "layout"), [pytest.param(*x, id=x[1].name) for x in LAYOUTS])
def test_elements_of_layouts_by_arithmetic(name: str, layout: Layout) -> None:
    """With infinite and NaN scales."""
    format = BLOCKS[name]
    blocks = np.random.default_rng(1).integers(0, 256, (64, format.row_bytes(512) or 0), dtype=np.uint8)
    if name in FP8:
        blocks[blocks & 127 == 127] = 0
    packed = layout.pack(blocks)
    row, column = np.indices((64, 512))

    def read(at: np.ndarray) -> np.ndarray:
        return packed[row // layout.panel, at].astype(np.int64)

    with np.errstate(all="ignore"):
        found = layout.element(read, lambda x: x.astype(np.float32), row, column, packed.shape[1])
        np.testing.assert_array_equal(found, format.decode(blocks, 512))


def test_tables_that_more_than_lookups_read_stay_elements() -> None:
    class Sum(Decoder):
        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.embed(ids), self.embed.weight.sum(0, keepdim=True) * ids[0]

    ir = capture(Sum(True).eval(), (torch.tensor([1, 2]),))
    program = npu_compiler.compile(ir, weights={"embed.weight": "q4_0"})
    assert {b.format for b in program.buffers} == {""}
    formats = {
        b.format for b in npu_compiler.compile(capture(Decoder(False), (torch.tensor([1]),)), weights="q4_0").buffers
    }
    assert formats == {"", "q4_0.panels"}  # the default is for products
