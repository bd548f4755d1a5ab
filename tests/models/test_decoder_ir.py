"""Decoders as other tools extract them from transformers, compiled and compared with PyTorch running the same nodes.

The files hold a Qwen2 of two layers (hidden 64, 4/2 heads, prompt of 8, caches of 32): masks are inputs, caches are
inputs that come back, the rotary table is a region without a body, and types are mixed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler import load_ir
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.frontend import capture
from npu_compiler.frontend.kv_state import as_state, loop_carried
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.partitioning.plan import HOST
from npu_compiler.support.dtypes import numpy_dtype, promote
from npu_runtime import CPUBackend, DAGExecutor, Executor

from ..support.ir_files import FILES, random_weights
from ..support.sweeps import FULL, IN_FULL
from ..support.torch_oracle import run_ir
from .gate import Expected, compile_and_run, compile_whole, expect, join
from .random_models import randomise

NAMES = [f"qwen2_{step}{kind}" for step in ("prefill", "decode") for kind in ("", "_bf16", "_tf5.23")]
MIXED = "qwen2_decode_mixed"  # bfloat16 weights, float32 caches and masks: what a type-blind extractor makes
RUNS = {"decode": range(32), "prefill": range(8)}  # positions; numbers of random prompts
HEAD_DIM, THETA = 16, 1e6


@cache
def graph(name: str) -> IRGraph:
    return _with_wide_caches(load_ir(FILES / "qwen2_decode_bf16.json")) if name == MIXED else load_ir(_file(name))


@cache
def program(name: str) -> CompiledProgram:
    return compile_whole(graph(name))


def _file(name: str) -> str:
    return str(FILES / f"{name}.json")


def _with_wide_caches(ir: IRGraph) -> IRGraph:
    """The graph with float32 caches and mask, and the types that follow from them."""
    dtypes: dict[tuple[str, int], str] = {}

    def typed(t: TensorSpec) -> TensorSpec:
        return replace(t, dtype=dtypes.get(t.producer, t.dtype)) if t.producer else t

    inputs = [replace(t, dtype="float32") if t.dtype == "bfloat16" else t for t in ir.graph_inputs]
    dtypes |= {(t.name, 0): t.dtype for t in inputs}
    nodes = []
    for n in ir.nodes:
        reads = [typed(t) for t in n.inputs]
        outputs = [replace(t, dtype=_result(n, reads, t.dtype)) for t in n.outputs]
        dtypes |= {(n.name, i): t.dtype for i, t in enumerate(outputs)}
        nodes.append(OpNode(n.name, n.op_type, reads, outputs, n.attrs))
    return replace(ir, graph_inputs=inputs, nodes=nodes, graph_outputs=[typed(t) for t in ir.graph_outputs])


def _result(node: OpNode, inputs: list[TensorSpec], declared: str) -> str:
    if "dtype" in node.attrs or node.op_type == "aten.embedding.default":
        return declared
    if node.op_type == "aten.index_copy.default":
        return inputs[0].dtype
    dtype = "bfloat16"
    for t in inputs:
        dtype = promote(dtype, t.dtype)
    return dtype


@cache
def weights(name: str) -> dict[str, np.ndarray]:
    made = random_weights(graph(name), 0)
    for key in made:
        if key.endswith("inv_freq"):
            made[key] = (THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
    return made


def runs(name: str) -> range:
    return RUNS["decode" if "decode" in name else "prefill"]


def inputs(ir: IRGraph, position: int) -> list[torch.Tensor]:
    """A prompt of random tokens, or one token at ``position`` with random caches of which it sees those before it."""
    generator = torch.Generator().manual_seed(100 + position)
    made = []
    for t in ir.graph_inputs:
        dtype = getattr(torch, t.dtype)
        if t.name == "input_ids":
            made.append(torch.randint(0, 128, t.shape, generator=generator))
        elif t.name == "attention_mask":
            queries, keys = t.shape[-2:]
            last = torch.arange(queries)[:, None] + (position if queries == 1 else 0)
            hidden = torch.arange(keys) > last
            made.append(torch.zeros(t.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min))
        elif t.dtype == "int64":  # position_ids, cache_position
            made.append((torch.arange(t.numel) + (position if t.numel == 1 else 0)).reshape(t.shape))
        else:
            made.append(torch.randn(t.shape, generator=generator).to(dtype))
    return made


@cache
def expected(name: str) -> Expected:
    """The nodes run by PyTorch, one by one, in the file's own types and in float64."""
    ir, held = graph(name), weights(name)
    given = [inputs(ir, p) for p in runs(name)]
    both = [join([[t.double().numpy() for t in run_ir(ir, held, g, d)[0]] for g in given]) for d in (True, False)]
    return Expected("bfloat16" if "bf16" in name or name == MIXED else "float32", *both)


def arrays(ir: IRGraph, position: int) -> dict[str, np.ndarray]:
    return {t.name: tensor_to_numpy(v) for t, v in zip(ir.graph_inputs, inputs(ir, position), strict=True)}


@pytest.mark.parametrize("name", [*NAMES, MIXED])
def test_file_runs_as_in_pytorch(name: str) -> None:
    calls = program(name).entries["main"].calls
    print(f"{name}: {len(calls)} kernels, of these {sum(c.kind == 'attention' for c in calls)} attention")
    assert sum(c.kind == "attention" for c in calls) == 2  # one a layer
    assert not any("softmax" in s for c in calls if c.kind != "attention" for s in c.sources)
    executor = Executor(program(name), weights(name), CPUBackend())
    found = [list(executor.run(arrays(graph(name), p)).values()) for p in runs(name)]
    expected(name).check(join(found))


@pytest.mark.parametrize("name", [*NAMES, MIXED] if FULL else [NAMES[0], MIXED])
def test_with_an_op_on_the_cpu(name: str) -> None:
    plan = npu_compiler.partition(graph(name), force_cpu=["aten.silu.default"])
    forced = [n.op_type for p in plan.partitions if p.device == HOST for n in p.ir.nodes]
    assert forced.count("aten.silu.default") == 2
    executor = DAGExecutor(plan, "cpu", weights=weights(name))
    expected(name).check(join([list(executor(arrays(graph(name), p)).values()) for p in runs(name)]))


@pytest.mark.parametrize("name", [n for n in (*NAMES, MIXED) if "decode" in n and (FULL or "_tf5.23" not in n)])
def test_caches_become_state(name: str) -> None:
    """Eight steps with caches that are passed in and out, and with caches that stay: the same logits and contents."""
    ir = graph(name)
    pairs = loop_carried(ir)
    assert pairs == {f"past_kv_flat_{i}": f"index_copy{f'_{i}' if i else ''}" for i in range(4)}
    kept = npu_compiler.compile(as_state(ir))
    entry = kept.entries["main"]
    assert [o.name for o in entry.outputs] == ["linear_14"]
    caches = {b.id for b in kept.buffers if b.kind == "state"}
    assert len(caches) == 4 and {id for _, id in entry.updates} == caches  # updated where they are
    copies = [any("copy" in c.name for c in e.calls) for e in (entry, program(name).entries["main"])]
    assert copies == [False, True]
    passing = Executor(program(name), weights(name), CPUBackend())
    keeping = Executor(kept, weights(name), CPUBackend())
    start = arrays(ir, 0)
    held = {n: start[n] for n in pairs}
    for key, value in held.items():
        keeping.state.write(key, value)
    for position in range(8):
        now = {**arrays(ir, position), **held}
        out = passing.run(now)
        held = {taken: out[given] for taken, given in pairs.items()}
        alone = keeping.run({t.name: now[t.name] for t in ir.graph_inputs if t.name not in pairs})
        np.testing.assert_array_equal(alone["linear_14"], out["linear_14"])
        for key, value in keeping.state.snapshot().items():
            np.testing.assert_array_equal(value, held[key])


def test_prompt_and_steps_are_those_of_transformers() -> None:
    """The rotary table, the mask and the caches mean what the model that the files came from means by them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    held = weights("qwen2_prefill")
    held["model.lm_head.weight"] = held["model.model.embed_tokens.weight"]
    config = transformers.Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": THETA}, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    state = {k.removeprefix("model."): torch.from_numpy(v) for k, v in held.items() if "inv_freq" not in k}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    tokens = torch.randint(0, 128, (1, 14), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        reference = model(tokens).logits[0].numpy()

    ir = graph("qwen2_prefill")
    first = Executor(program("qwen2_prefill"), held, CPUBackend()).run(
        {**arrays(ir, 0), "input_ids": tokens[:, :8].numpy()}
    )
    logits, *rows = first.values()
    np.testing.assert_allclose(logits[0], reference[:8], rtol=1e-4, atol=1e-4)
    step = Executor(npu_compiler.compile(as_state(graph("qwen2_decode"))), held, CPUBackend())
    for i, value in enumerate(rows):
        cache = np.zeros((1, 2, 32, HEAD_DIM), np.float32)
        cache[:, :, :8] = value
        step.state.write(f"past_kv_flat_{i}", cache)
    ir = as_state(graph("qwen2_decode"))
    for position in range(8, 14):
        given = {**arrays(ir, position), "input_ids": tokens[:, position : position + 1].numpy()}
        np.testing.assert_allclose(step.run(given)["linear_14"][0, 0], reference[position], rtol=1e-4, atol=1e-4)


def test_float_types_of_the_mixed_graph() -> None:
    """It is what it is meant to be: caches wider than the weights, and products of both."""
    ir = graph(MIXED)
    products = [n for n in ir.nodes if n.op_type in ("aten.matmul.default", "aten.linear.default")]
    assert any({t.dtype for t in n.inputs} == {"bfloat16", "float32"} for n in products)
    assert numpy_dtype("bfloat16") == weights(MIXED)["model.lm_head.weight"].dtype


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=IN_FULL), "bfloat16"])
def test_our_own_capture_of_transformers_is_one_program(dtype: str) -> None:
    """Positions as an argument: transformers then looks for packed texts in them (``diff``) and masks accordingly."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = Logits(randomise(transformers.Qwen2ForCausalLM(config)))
    tokens = [torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    calls = [(t, torch.arange(12)[None] if i % 2 else packed) for i, t in enumerate(tokens)]
    assert "aten.diff.default" in {n.op_type for n in capture(model, calls[0]).nodes}
    expect(model, calls, dtype).check(compile_and_run(model, calls, dtype))


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits
