"""A decode step's attention in one launch, where the last workgroup combines the parts: against the CPU target."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
from npu_compiler.graph.graph import Graph
from npu_compiler.pipeline import compile_entries
from npu_compiler.targets.metal import devices
from npu_compiler.targets.simt.kernels.attention_decode import PAD
from npu_compiler.targets.simt.lang.program import unpack
from npu_runtime import CPUBackend

from ...support.decode_runs import run_decode
from ...support.metal_backend import EmulatedMetal
from ...support.sweeps import FULL

KEYS = 512  # of the caches: up to four workgroups share them
POSITIONS = (0, 127, 128, 300, 511)  # the first workgroup has 128 keys
EDGES = (127, 511)


@cache
def _graphs(dtype: str, heads: int, kv_heads: int, size: int) -> tuple[LLMConfig, dict[str, Graph]]:
    settings = {
        "model_type": "qwen3" if size == 80 else "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "hidden_act": "silu", "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": size, "max_position_embeddings": KEYS, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True, "torch_dtype": dtype,
    }  # fmt: skip
    config = LLMConfig.from_hf(settings)
    return config, llm_graphs(config, max_len=KEYS, chunks=())


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size"),
    [("float32", 6, 2, 64), ("bfloat16", 8, 1, 128), ("float16", 2, 1, 80)],
)
def test_the_last_workgroup_combines_the_parts(dtype: str, heads: int, kv_heads: int, size: int) -> None:
    """In every order of the workgroups, with the same bits; new rows are stored in the caches."""
    config, graphs = _graphs(dtype, heads, kv_heads, size)
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    weights = {k: (0.2 * rng.standard_normal(s)).astype(kind) for k, s in parameter_shapes(config).items()}
    metal = compile_entries(graphs, "metal:apple7")
    state = {b.name: rng.standard_normal(b.shape).astype(kind) for b in metal.buffers if b.kind == "state"}
    kinds = [c.kind for c in metal.entries["decode"].calls]
    assert kinds.count("decode_attention") == 1 and not {"attention", "combine_attention"} & set(kinds)
    positions = POSITIONS if FULL or dtype == "float32" else EDGES
    expected = run_decode(compile_entries(graphs, "cpu"), CPUBackend(), weights, state, positions)
    orders = [
        run_decode(metal, EmulatedMetal(order), weights, state, positions) for order in ("shuffled", "descending")
    ]
    for x, again, y in zip(*orders, expected, strict=True):
        np.testing.assert_array_equal(x, again)
        assert np.abs(x - y).max() <= (2e-5 if dtype == "float32" else 0.02) * np.abs(y).max()


def test_bytes_of_the_parts_and_of_one_row_of_each_cache_are_counted() -> None:
    _, graphs = _graphs("float32", 6, 2, 64)
    calls = compile_entries(graphs, "metal:apple7").entries["decode"].calls
    [call] = [c for c in calls if c.kind == "decode_attention"]
    parts, caches, row = 4 * 4 * 6 * (64 + PAD), 2 * 4 * 2 * KEYS * 64, 4 * 2 * 64  # of four workgroups for each head
    assert call.bytes_written == parts + 2 * row + 4 * 6 * 64
    assert parts + caches < call.bytes_read < parts + caches + 8 * 1024


def test_programs_ask_for_the_language_that_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS 14, which has no Metal 3.2, a plain name compiles the kernels that are launched one after the other."""
    (_, graphs), at_hand = _graphs("float32", 6, 2, 64), devices.device_at_hand.__wrapped__
    assert unpack(compile_entries(graphs, "metal").binary)[1]["language"] == "metal3.2"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="Apple M2 Pro"))
    for macos, language in (("14.7.1", "metal3.1"), ("15.0", "metal3.2")):
        monkeypatch.setattr(platform, "mac_ver", lambda version=macos: (version, ("", "", ""), "arm64"))
        device = at_hand()
        assert device.name == "apple8"
        monkeypatch.setattr(devices, "device_at_hand", lambda found=device: found)
        assert unpack(compile_entries(graphs, "metal").binary)[1]["language"] == language
