"""The decoder-LLM frontend: definitions against transformers, graphs against the definitions, files and configs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from npu_compiler.aten.json_writer import ir_to_dict
from npu_compiler.frontend.llm import LLMConfig, graphs, llm_graphs, parameter_shapes
from npu_compiler.frontend.llm.modules import Decoder
from npu_compiler.frontend.tensors import state_dict_numpy, tensor_to_numpy

from ..support.sweeps import IN_FULL
from ..support.torch_oracle import run_ir
from . import tiny

# Cases whose graphs differ by more than constants.
STRUCTURES = (
    "llama", "llama-bias", "qwen2-yarn", "qwen2-window", "qwen3", "gemma3_text", "gemma3-softcap", "phi3-partial",
    "granite", "smollm3", "olmo2", "cohere2", "gpt_neox", "gpt2",
)  # fmt: skip


def feed(model: Any, ids: list[int], chunks: tuple[int, ...], max_len: int) -> list[torch.Tensor]:
    """Logits after each chunk and then each single token. The last chunk's free places hold padding."""
    logits, at = [], 0
    for size in (*chunks, *[1] * (len(ids) - sum(chunks))):
        positions = torch.arange(at, min(at + size + (3 if size > 1 else 0), max_len))
        tokens = torch.full((1, len(positions)), 5)
        tokens[0, :size] = torch.tensor(ids[at : at + size])
        with torch.no_grad():
            logits.append(model(tokens, positions, torch.tensor([size - 1])))
        at += size
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, torch.float64) for n in tiny.CASES), *((n, torch.float32) for n in STRUCTURES)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_logits_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Teacher-forced, with the cache filled by chunks of 1, 7 and 33 tokens, padded, and by single tokens."""
    check_logits(name, dtype, 46, (1, 7, 33), 48)


def test_short_longrope() -> None:
    """transformers chooses the factors by the text's length, we by the cache's: 16 is the original length."""
    check_logits("phi3-long", torch.float32, 16, (1, 7), 16)


def check_logits(name: str, dtype: torch.dtype, length: int, chunks: tuple[int, ...], max_len: int) -> None:
    ours, theirs = tiny.decoder(name, max_len, dtype)
    ids = tiny.text_ids(length)
    logits = torch.cat(feed(ours, ids, chunks, max_len))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float()
    ends = [*accumulate(chunks), *range(sum(chunks) + 1, length + 1)]
    assert logits.dtype == torch.float32
    assert expected.std() > 0.3
    tolerance = 2e-5 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(logits, expected[[n - 1 for n in ends]], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", tiny.CASES)
def test_parameter_shapes_are_the_modules(name: str) -> None:
    ours, _ = tiny.decoder(name, 4)
    shapes = {k: tuple(v.shape) for k, v in ours.named_parameters()}
    assert parameter_shapes(ours.config) == shapes


@pytest.mark.parametrize("name", STRUCTURES)
def test_graphs_run_as_the_module(name: str) -> None:
    ours, _ = tiny.decoder(name, 24)
    graphs = llm_graphs(ours.config, max_len=24, chunks=(7, 100))
    assert list(graphs) == ["prefill_7", "decode"]
    weights = state_dict_numpy(ours)
    state = {k: v.copy() for k, v in weights.items() if "_cache." in k}
    for graph in graphs.values():
        assert {w.name for w in graph.weights} == set(weights)
        assert {u.key for u in graph.state} == set(state)
        assert not any("_to_copy" in n.op_type or "functional" in n.op_type for n in graph.nodes)

    def run(tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        graph = graphs["decode" if tokens.shape[1] == 1 else "prefill_7"]
        (logits,), new = run_ir(graph, {**weights, **state}, [tokens, positions, last])
        state.update({k: tensor_to_numpy(v) for k, v in new.items()})
        return logits

    ids = tiny.text_ids(14)
    for mine, graphs_ in zip(feed(ours, ids, (4, 4), 24), feed(run, ids, (4, 4), 24), strict=True):
        torch.testing.assert_close(graphs_, mine, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "kv_cache"),
    [
        ("smollm3", None), ("gemma3_text", "fp8"),
        *(pytest.param(name, "int8", marks=IN_FULL) for name in STRUCTURES),
    ],
)  # fmt: skip
def test_graphs_of_repeated_layers_are_those_of_all_layers(
    name: str, kv_cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of two kinds in turns: with rotation and without, or with two windows. Some have their own order of
    columns."""
    layers: dict[str, Any] = {"num_hidden_layers": 4, "no_rope_layer_interval": 2}
    if "layer_types" in tiny.CASES[name][1]:
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = LLMConfig.from_hf(tiny.hf_model(name, **layers).config.to_dict())
    ordered = [f"model.layers.{i}.self_attn.{p}" for i in (0, 2) for p in ("q_proj", "k_proj")]
    config = replace(config, column_orders=tuple(zip(ordered, [ordered[0]] * 2 + [ordered[2]] * 2, strict=True)))
    marked, _ = graphs._capture(graphs._Request(Decoder, config, 8, (("decode", graphs._example(1)),), kv_cache))
    assert sum("npusim_layers.repeat" in n.op_type for n in marked["decode"].nodes) == 2
    short = llm_graphs(config, max_len=8, chunks=(), kv_cache=kv_cache)
    graphs._capture.cache_clear()
    monkeypatch.setattr(graphs, "traced_once", lambda *_: nullcontext())
    whole = llm_graphs(config, max_len=8, chunks=(), kv_cache=kv_cache)
    graphs._capture.cache_clear()
    assert {name: ir_to_dict(graph) for name, graph in short.items()} == {n: ir_to_dict(g) for n, g in whole.items()}


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3_text"])
def test_of_a_prompt_one_row_leaves_the_last_layers_keys_and_values(name: str) -> None:
    ours, _ = tiny.decoder(name, 24)
    graphs = llm_graphs(ours.config, max_len=24, chunks=(7,))
    rows = {
        entry: [math.prod(n.inputs[0].shape[:-1]) for n in graph.nodes if n.op_type == "aten.linear.default"]
        for entry, graph in graphs.items()
    }
    one = 6  # queries, output, the MLP's three and the head
    assert rows["prefill_7"].count(1) == one and rows["prefill_7"].count(7) == 7 * ours.config.num_layers + 1 - one
    assert set(rows["decode"]) == {1} and len(rows["decode"]) == len(rows["prefill_7"])


def test_graphs_in_half_precision_have_float32_angles() -> None:
    config = LLMConfig.from_hf(tiny.hf_model("gemma3_text").config.to_dict())
    graph = llm_graphs(config, max_len=8, chunks=(), dtype="bfloat16")["decode"]
    assert {w.dtype for w in graph.weights} == {"bfloat16"}
    assert {v.dtype.name for v in graph.constants.values()} == {"float32"}
    assert len(graph.constants) == 2  # a theta for each kind of layer
    angles = [n.outputs[0] for n in graph.nodes if n.op_type in ("aten.cos.default", "aten.sin.default")]
    assert [t.dtype for t in angles] == ["float32"] * 4
    assert [t.dtype for t in graph.graph_outputs] == ["float32"]
    ours = Decoder(config, 8, torch.bfloat16)
    assert {b.dtype for k, b in ours.named_buffers() if "frequencies" in k} == {torch.float32}
