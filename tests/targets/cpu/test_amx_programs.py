"""Generated programs for AMX, run with its model on any machine: conformance cases, attention, a network, a decoder.

They are under the gates of the other targets. All are in bfloat16, but for what is in limbs of bfloat16.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from npu_compiler import CompiledProgram, compile
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import compile_graph
from npu_compiler.weights.format import BlockFormat, weight_format
from npu_runtime import Executor, load_weights
from npu_runtime.llm.model import LLM

from ...conformance.cases import PROGRAM, all_cases, check, compile_cases
from ...llm import tiny
from ...llm.teacher import teacher
from ...models.gate import cast, check_sums, compile_whole, expect, run
from ...models.random_models import image_model, images
from ...support.quantised import Layer
from ...support.sweeps import FULL

OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "conv1d", "conv2d.default"),
    *("conv_transpose2d", "scaled_dot_product_attention"),
)


def test_conformance(amx: str) -> None:
    """Products, convolutions and attention."""
    names = tuple(f"aten.{op}" for op in OPS)
    cases = [c for c in all_cases() if c.op_type.startswith(names) and c.dtype == "bfloat16"]
    cases = cases if FULL else cases[::4]
    assert len({c.op_type for c in cases}) >= len(OPS)
    messages = []
    for at in range(0, len(cases), PROGRAM):
        batch = compile_cases(cases[at : at + PROGRAM])
        program = compile_graph(batch.graph, amx)
        results = Executor(program, load_weights(program, {})).run(
            {k: np.array(v, order="C") for k, v in batch.inputs.items()}
        )
        for case, names in batch.outputs.items():
            try:
                check(case, [np.asarray(results[n]) for n in names], batch.summing[case])
            except AssertionError as error:
                messages.append(str(error))
    assert not messages, f"{len(messages)} of {len(cases)} cases failed\n" + "\n".join(messages)


class Attentions(nn.Module):
    """Grouped heads of 64, causal, and heads of 80 with a mask."""

    def forward(self, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attention = functional.scaled_dot_product_attention
        mask = torch.arange(qkv[-1].shape[2])[None, :] % 7 < 5
        return attention(*qkv[:3], is_causal=True, enable_gqa=True), attention(*qkv[3:], attn_mask=mask)


def test_attention_passes_the_gate(amx: str) -> None:
    torch.manual_seed(4)
    shapes = ((1, 6, 2, 150, 64), (2, 2, 2, 33, 80))
    args = tuple(torch.randn(b, heads, s, d) for b, h, hk, s, d in shapes for heads in (h, hk, hk))
    model = Attentions()
    program = compile_whole(capture(model, tuple(a.bfloat16() for a in args)), target=amx)
    assert [c.kind for c in program.entries["main"].calls].count("attention") == 2
    expect(model, [args], "bfloat16").check(run(program, {}, [tuple(a.bfloat16() for a in args)]))


class Formats(nn.Module):
    """A product for each way to unpack weights: between products, in parts, and before the products of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lossless, self.coded = nn.Linear(600, 40), nn.Linear(608, 40)
        with torch.no_grad():
            self.lossless.weight[::9, ::70] *= 1e-20  # outliers, in all parts

    def forward(self, few: torch.Tensor, many: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(p(x[:, : p.in_features]) for p in (self.lossless, self.coded) for x in (few, many))


def test_formats(amx: str) -> None:
    torch.manual_seed(5)
    model, args = Formats().eval(), (torch.randn(128, 608), torch.randn(270, 608))
    low = copy.deepcopy(model).bfloat16()
    formats = {"coded.weight": "q8_0", "*": "bf16c12"}
    program = compile(capture(low, tuple(a.bfloat16() for a in args)), amx, weights=formats)
    assert {b.format for b in program.buffers if b.kind == "weight"} == {"", "bf16c12.panels", "q8_0.panels"}
    q8_0, w = weight_format("q8_0"), tensor_to_numpy(low.coded.weight.detach())
    assert isinstance(q8_0, BlockFormat)
    model.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    model.coded.weight.data = torch.from_numpy(q8_0.decode(q8_0.encode(w), 608)).float()
    expect(model, [args], "bfloat16").check(run(program, state_dict_numpy(low), [tuple(a.bfloat16() for a in args)]))


def test_convolution_in_phases_and_slices(amx: str) -> None:
    """Strides that differ, dilation, and more channels than L1 holds of the pixels of two tiles; then tiles of 15
    positions."""
    torch.manual_seed(5)
    first = nn.Conv2d(512, 96, 3, stride=(2, 1), padding=2, dilation=2)
    model, x = nn.Sequential(first, nn.Conv2d(96, 96, 1), nn.Conv2d(96, 32, 3, padding=1)), torch.randn(2, 512, 7, 13)
    low = copy.deepcopy(model).bfloat16()
    program = compile_whole(capture(low, (x.bfloat16(),)), target=amx)
    expect(model, [(x,)], "bfloat16").check(run(program, state_dict_numpy(low), [(x.bfloat16(),)]))


def test_convolutional_network(amx: str) -> None:
    model, x = image_model("two_stages", 64), images(8, 64)
    low = copy.deepcopy(model).bfloat16()
    runs = [(part.bfloat16(),) for part in x.split(2)]
    wanted = expect(model, [(part,) for part in x.split(2)], "bfloat16")
    results = run(compile_whole(capture(low, runs[0]), target=amx), state_dict_numpy(low), runs)
    wanted.check(results)
    wanted.check_ranking(results)


@pytest.mark.parametrize("dtype", ["float32", "float16"] if FULL else ["float32"])
def test_limbs_pass_the_gate(amx: str, dtype: str, tmp_path: Path) -> None:
    """Layers large enough to be split: 3 x 3, 1 x 1, and a product of matrices. The program is saved and loaded."""
    torch.manual_seed(8)
    layers = (
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 96, 1),
        nn.ReLU(),
        nn.Flatten(2),
        nn.Linear(768, 64),
    )
    model, args = nn.Sequential(*layers).eval(), (torch.randn(1, 32, 24, 32),)
    low = copy.deepcopy(model).to(getattr(torch, dtype))
    inputs = cast(args, getattr(torch, dtype))
    compile_whole(capture(low, inputs), target=amx).save(tmp_path / "limbs.npubin")
    program = CompiledProgram.load(tmp_path / "limbs.npubin")
    assert {b.dtype for b in program.buffers if b.kind == "weight" and len(b.shape) == 3} == {"bfloat16"}
    expect(model, [args], dtype).check(run(program, state_dict_numpy(low), [inputs]))


def test_limbs_of_many_channels_are_as_accurate_as_eager(amx: str) -> None:
    """Each step of tiles is six rounded additions to a sum; sums of many steps have parts."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(512, 32, 3, padding=1, bias=False), torch.randn(1, 512, 8, 8).relu()
    program = check_sums(conv, x, amx)
    assert {b.dtype for b in program.buffers if b.kind == "weight"} == {"bfloat16"}


@pytest.mark.parametrize("taps", [2, 3])
def test_limbs_of_few_taps_are_as_accurate_as_eager(amx: str, taps: int) -> None:
    """Libraries add up the taps of 16 channels at a time."""
    torch.manual_seed(taps)
    program = check_sums(nn.Conv1d(128, 64, taps, bias=False), torch.randn(2, 128, 100), amx)
    assert {b.dtype for b in program.buffers if b.kind == "weight"} == {"bfloat16"}


def test_decoder(amx: str, tmp_path: Path) -> None:
    """A prompt in chunks of 32, then one token at a time."""
    model = tiny.hf_model("llama", max_position_embeddings=100, hidden_size=192, head_dim=64)
    ids, prompt = tiny.text_ids(100), 70
    llm = LLM.load(tiny.save(model, tmp_path), target=amx, max_len=100, dtype="bfloat16", cache=False)
    assert {c.size for c in llm.chunks(0, prompt)} == {32}
    teacher(model, "bfloat16", [ids]).check(llm.logits(ids, prompt), slice(prompt - 1, None))


class Quantised(nn.Module):
    """Convolutions whose channels are a multiple of 4, which tiles multiply, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles, self.rows = Layer(channels=12), Layer(channels=6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tiles(x), self.rows(x[:, :6])


def test_integers(amx: str) -> None:
    """Products of uint8 and int8 are exact, and quantised convolutions have PyTorch's results."""
    rng, g = np.random.default_rng(0), Graph("products")
    inputs, want = {}, {}
    for i, (m, k, n) in enumerate(((5, 70, 33), (37, 6, 40), (80, 4096, 33))):
        a, b = rng.integers(0, 256, (m, k)).astype(np.uint8), rng.integers(-128, 128, (k, n)).astype(np.int8)
        inputs[f"a{i}"], want[f"y{i}"] = a, a.astype(np.int32) @ b.astype(np.int32)
        right = g.const(b)
        if i == 1:  # packed in each run
            inputs["b"], right = b, g.input("b", b.shape, "int8")
        g.outputs.append((f"y{i}", g.input(f"a{i}", (m, k), "uint8").matmul(right)))
    results = Executor(compile_graph(g, amx), {}).run(inputs)
    assert all((results[name] == y).all() for name, y in want.items())

    torch.manual_seed(0)
    layers, x = Quantised().eval(), torch.randn(2, 12, 11, 13)
    results = Executor(compile(capture(layers, (x,)), amx), state_dict_numpy(layers)).run([x.numpy()])
    with torch.no_grad():
        for got, y in zip(results.values(), layers(x), strict=True):
            assert np.abs(got.astype(int) - y.numpy()).max() <= 1
