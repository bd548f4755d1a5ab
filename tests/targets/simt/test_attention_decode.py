"""A decode step's attention in one kernel: against the CPU target, on the host's spelling of the SIMT kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
from npu_compiler.pipeline import compile_entries
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.targets import register_target
from npu_runtime import CPUBackend
from npu_runtime.backends.base import Backend

from ...porting.backend import HostBackend
from ...porting.target import TARGET
from ...support import cuda_gpu
from ...support.decode_runs import run_decode
from ...support.metal_backend import EmulatedMetal
from ...support.sweeps import FULL, IN_FULL

MAX_LEN = 8192  # 32 groups share the keys: more than one adds up alone
POSITIONS = (0, 15, 255, 256, 300, 4095, 5000, 8191)
EDGES = (0, 256, 8191)  # for all configurations but one


def _config(dtype: str, model_type: str, heads: int, size: int) -> LLMConfig:
    settings = {
        "model_type": model_type, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "hidden_act": "silu",
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": size,
        "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }  # fmt: skip
    return LLMConfig.from_hf(settings)


CONFIGS = [
    ("bfloat16", "qwen2", 6, 128),
    ("float16", "llama", 8, 64),
    ("bfloat16", "qwen3", 2, 64),
    ("float32", "llama", 2, 64),
]


def _check(dtype: str, model_type: str, heads: int, size: int, target: str, backend: Backend) -> None:
    """Decoding agrees with the CPU target, in one kernel if the matrix unit multiplies the type."""
    config = _config(dtype, model_type, heads, size)
    graphs = llm_graphs(config, max_len=MAX_LEN, chunks=())
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    weights = {k: (0.2 * rng.standard_normal(s)).astype(kind) for k, s in parameter_shapes(config).items()}
    program = compile_entries(graphs, target)
    cache = {b.name: b.shape for b in program.buffers if b.kind == "state"}
    state = {k: rng.standard_normal(s).astype(kind) for k, s in cache.items()}
    kinds = [c.kind for c in program.entries["decode"].calls]
    fused = dtype != "float32"
    assert ("decode_attention" in kinds, "attention" in kinds) == (fused, not fused)
    positions = POSITIONS if FULL or model_type == "qwen2" else EDGES
    got = run_decode(program, backend, weights, state, positions)
    expected = run_decode(compile_entries(graphs, "cpu"), CPUBackend(), weights, state, positions)
    for x, y in zip(got, expected, strict=True):
        scale = np.abs(y).max()
        assert np.abs(x - y).max() <= (2e-5 if dtype == "float32" else 0.02) * scale


@pytest.mark.parametrize(("dtype", "model_type", "heads", "size"), CONFIGS)
def test_one_kernel_attends(dtype: str, model_type: str, heads: int, size: int) -> None:
    register_target(TARGET)
    _check(dtype, model_type, heads, size, "host", HostBackend())


@pytest.mark.parametrize(("dtype", "model_type", "heads", "size"), CONFIGS[:3])
@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_one_kernel_attends_on_the_gpu(dtype: str, model_type: str, heads: int, size: int) -> None:
    _check(dtype, model_type, heads, size, "cuda", cuda_gpu.backend())


@pytest.mark.parametrize("kv_cache", [pytest.param("int8", marks=IN_FULL), "fp8"])
def test_caches_of_8_bits_are_read_as_they_are(kv_cache: str) -> None:
    """The kernel reads the numbers and their scales: no kernel decodes the cache."""
    config = _config("bfloat16", "llama", 2, 64)
    graphs = llm_graphs(config, max_len=512, chunks=(), kv_cache=kv_cache)
    rng = np.random.default_rng(0)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    weights = {k: (0.2 * rng.standard_normal(s)).astype(bf16) for k, s in parameter_shapes(config).items()}
    metal = compile_entries(graphs, "metal")
    state = {}
    for b in (b for b in metal.buffers if b.kind == "state"):
        numbers = rng.uniform(0.001, 0.02, b.shape) if b.dtype == "float32" else rng.uniform(-127, 128, b.shape)
        state[b.name] = numbers.astype(numpy_dtype(b.dtype))
    entry, positions = metal.entries["decode"], (0, 300, 511)
    assert [c.kind for c in entry.calls].count("attention") == 1 and entry.arena_bytes < 512 * 64 * 2
    got = run_decode(metal, EmulatedMetal(), weights, state, positions)
    expected = run_decode(compile_entries(graphs, "cpu"), CPUBackend(), weights, state, positions)
    for x, y in zip(got, expected, strict=True):
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()
