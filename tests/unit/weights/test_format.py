"""What every weight format promises: exact packing and sizes, a bounded error, products of the decoded weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler import capture
from npu_compiler.frontend.tensors import state_dict_numpy, tensor_to_numpy
from npu_compiler.pipeline import compile_ir, run_phases
from npu_compiler.support.errors import ArtifactError, CompileError, ConfigError, WeightError
from npu_compiler.weights import format as registry
from npu_compiler.weights.blocks import CodeBlocks
from npu_compiler.weights.bytes import ByteFormat
from npu_compiler.weights.format import BlockFormat, Order, WeightFormat, known_formats, layout_for, weight_format
from npu_compiler.weights.packing import pack, packed_spec, unpack_matrix
from npu_runtime import load_weights
from npu_runtime.llm.loader import _CompiledFile, _weight_key, companions, compiler_identity

from ...models.gate import cast, expect, run
from ...porting.rows8 import FORMAT as ROWS8
from ...porting.rows8 import Panels, Rows8
from ...support.sweeps import FULL

FORMATS = {name: f for name in known_formats() if (f := weight_format(name)) is not None} | {"rows8": ROWS8}
LAYOUTS = {layout.name: (format, layout) for format in FORMATS.values() for layout in format.layouts}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "rows8", ROWS8)


def matrix(n: int, k: int, dtype: str) -> np.ndarray:
    """[n, k] numbers of different sizes in every row, zeros among them."""
    rng = np.random.default_rng(n * k)
    w = rng.standard_normal((n, k)) * 0.02 * np.exp2(rng.integers(-3, 4, (n, 1)))
    w[rng.random((n, k)) < 0.01] = 0.0
    w[min(2, n - 1)] = 0.0
    return tensor_to_numpy(torch.from_numpy(w).to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (33, 128), (70, 576)])
def test_layouts_pack_without_loss_into_what_they_say(name: str, n: int, k: int) -> None:
    format, layout = LAYOUTS[name]
    k = k if format.stores(n, k, format.dtypes[0]) else -(-k // 256) * 256  # whole blocks
    for dtype in format.dtypes:
        w = matrix(n, k, dtype)
        stored = format.encode(w) if isinstance(format, BlockFormat) else w
        spec = packed_spec(name, (1, n, 1, stored.shape[1]), str(stored.dtype), layout.panel)
        packed = pack(stored[None, :, None], layout.panel, name)
        assert (packed.shape, str(packed.dtype)) == spec and packed.shape[-1] % layout.alignment == 0
        layout.check(packed)
        back = layout.unpack(packed, *stored.shape)
        np.testing.assert_array_equal(back.view(np.uint8), np.ascontiguousarray(stored).view(np.uint8))
        elements = unpack_matrix(packed, name, n, k)
        assert elements.shape == w.shape and (not format.lossless or elements.tobytes() == w.tobytes())


@pytest.mark.parametrize("format", [f for f in FORMATS.values() if isinstance(f, BlockFormat)], ids=lambda f: f.name)
def test_errors_of_block_formats_are_bounded(format: BlockFormat) -> None:
    for dtype in format.dtypes:
        w = matrix(40, 256, dtype)
        blocks = format.encode(w)
        assert blocks.dtype == np.uint8 and blocks.shape == (40, format.row_bytes(256))
        back = format.decode(blocks, 256)
        assert back.dtype == np.float32
        exact = w.astype(np.float64).reshape(40, -1, format.block or 256)
        bound = format.error * np.abs(exact).max(-1, keepdims=True) + format.floor
        assert (np.abs(back.reshape(exact.shape) - exact) <= bound).all()


def decoded(model: nn.Module, format: WeightFormat, dtype: torch.dtype, panel: int) -> nn.Module:
    """``model`` with the weights of its linear layers as the format has them."""
    out = copy.deepcopy(model).to(dtype)
    for layer in out.modules():
        if isinstance(layer, nn.Linear) and isinstance(format, BlockFormat):
            w = tensor_to_numpy(layer.weight.detach())
            if layout_for(format, panel, *w.shape, str(w.dtype)) is not None:
                layer.weight.data = torch.from_numpy(format.decode(format.encode(w), w.shape[1])).to(dtype)
    return out


class Gated(nn.Module):
    """Products with an epilogue, in pairs, and of an odd length, which formats may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(128, 192, bias=False), nn.Linear(128, 192, bias=False)
        self.down, self.head = nn.Linear(192, 65), nn.Linear(65, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)).tanh())


# Formats of small codes share a reader, and so do formats of bytes; test_blocks.py has programs with all of them.
SHARED = (CodeBlocks, ByteFormat)
PROGRAMS = [f for f in FORMATS.values() if f.layout(32) and (f.name in ("q4_0", "q8_0") or not isinstance(f, SHARED))]


RUNS = [(f.name, d, rows) for f in PROGRAMS for d in f.dtypes for rows in (1, 3, 40)]
# Prompts have one dtype each by default.
FEW_RUNS = [(name, d, rows) for name, d, rows in RUNS if rows == 1 or (rows, d) == (40, FORMATS[name].dtypes[-1])]


@pytest.mark.parametrize(("name", "dtype", "rows"), RUNS if FULL else FEW_RUNS)
def test_programs_compute_with_the_decoded_weights(name: str, dtype: str, rows: int) -> None:
    format, low = FORMATS[name], getattr(torch, dtype)
    torch.manual_seed(0)
    model = Gated().eval()
    runs = [(torch.randn(rows, 128),) for _ in range(8 if rows < 40 else 1)]
    ours = copy.deepcopy(model).to(low)
    program = npu_compiler.compile(capture(ours, cast(runs[0], low)), weights=name)
    assert f"{name}.panels" in {b.format for b in program.buffers} and f"{name}.panels" in program.describe()
    results = run(program, state_dict_numpy(ours), [cast(args, low) for args in runs])
    expect(decoded(model, format, low, 32), runs, dtype).check(results)


# -- choosing one -----------------------------------------------------------------------------------------------------
def _linear(k: int = 64, n: int = 33) -> npu_compiler.IRGraph:
    return capture(nn.Linear(k, n, bias=False), (torch.zeros(2, k),))


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    for name in ("bf16", "", "../bf16c12", 3):
        with pytest.raises(ConfigError, match=r"unknown weight format .*; known: bf16c12, .*rows8, none"):
            npu_compiler.compile(_linear(), weights=name)


def test_a_target_without_a_reader_lists_what_it_reads() -> None:
    with pytest.raises(ConfigError, match=r"metal target has no reader for weights in rows8; it takes bf16c12, .*none"):
        compile_ir(_linear(), "metal", weights="rows8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "rows9.panels"}, "layout 'rows9.panels' of weight format 'other': name it 'other.…'"),
        ({"name": "other.panels", "order": "panels"}, "its order is 'panels'; it can be Order.PANELS, Order.ROWS"),
    ],
)
def test_a_layout_without_a_name_or_an_order_is_refused(wrong: dict[str, str], message: str) -> None:
    layout = type("Wrong", (Panels,), wrong)()
    other = type("Other", (Rows8,), {"name": "other", "layouts": (layout,)})()
    with pytest.raises(ConfigError, match=re.escape(message)):
        registry.register_format(other)


def test_a_layout_that_a_target_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not replaced by plain weights in silence."""

    class Rows(Panels):
        name, order = "rows8.rows", Order.ROWS

    monkeypatch.setattr(Rows8, "layouts", (Rows(),))
    with pytest.raises(CompileError, match=r"no reader for weights in rows8\.rows"):
        compile_ir(_linear(), "metal", weights="rows8")


def test_what_cannot_be_stored_stays_as_it_is_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of odd length has no form in rows8."""
    program = compile_ir(_linear(65), weights="rows8")
    assert [b.format for b in program.buffers if b.kind == "weight"] == [""]
    monkeypatch.setattr(Rows8, "required", True)
    with pytest.raises(CompileError, match=r"33 columns and 65 rows.* cannot be stored as rows8; .*weights=None"):
        compile_ir(_linear(65), weights="rows8")


def test_values_without_an_encoding_name_their_weight() -> None:
    program = compile_ir(_linear(), weights="rows8")
    w = np.ones((33, 64), np.float32)
    w[5, 7] = np.inf
    with pytest.raises(WeightError, match=r"weight 'weight': a row holds an infinity.*weights=None"):
        load_weights(program, {"weight": w})


def test_programs_need_their_format(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = f"{tmp_path}/model.npubin"
    compile_ir(_linear(), weights="rows8").save(path)
    assert npu_compiler.CompiledProgram.load(path).describe()
    monkeypatch.delitem(registry._registered, "rows8")
    with pytest.raises(ArtifactError, match=r"unknown (weight layout|block format) 'rows8"):
        npu_compiler.CompiledProgram.load(path)


def test_caches_tell_versions_of_a_registered_format_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key holds the names and the files of all registered formats; without them, those of the package alone."""

    def keys() -> tuple[str, str]:
        return compiler_identity("cpu"), _weight_key(_CompiledFile(saved), "recipes")

    saved = tmp_path / "model.npubin"
    for file in (saved, *companions(saved)):
        file.touch()
    reader = tmp_path / "rows8.h"
    monkeypatch.setattr(Panels, "reader", reader)
    reader.write_text("struct rows8 {};")
    first = keys()
    assert keys() == first and all("rows8" in key for key in first)
    reader.write_text("struct rows8 { int changed; };")
    second = keys()
    monkeypatch.delitem(registry._registered, "rows8")
    assert all(len(set(found)) == 3 for found in zip(first, second, keys(), strict=True))
    assert not any("rows8" in key for key in keys())


def test_the_graph_says_which_numbers_it_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VERIFY", "2")
    state = run_phases(_linear(), "cpu", until="memory", weights="rows8")
    assert [n.op for n in state.graph.nodes if n.op.endswith("quantize")] == ["quantize", "dequantize"]
    assert [v.op for _, v in state.recipes] == ["pack"]
    plain = run_phases(_linear(), "cpu", disable=("compress_weights",), until="memory", weights="rows8")
    assert not any(n.op.endswith("quantize") for n in plain.graph.nodes)


@pytest.mark.parametrize("name", ["bf16c12", "none", "Rows 8", "../rows8"])
def test_names_that_cannot_be_registered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows8, "name", name)
    with pytest.raises(ConfigError, match="cannot name a weight format"):
        registry.register_format(Rows8())
