"""The rows4 layout of bf16c12: every weight comes back as it was, and the SIMT kernels multiply by nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.frontend.export import capture
from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig, parameter_shapes
from npu_compiler.pipeline import compile_entries, compile_ir
from npu_compiler.support.dtypes import numpy_dtype
from npu_compiler.support.errors import IncompressibleError
from npu_compiler.weights.formats.bf16c12.rows4 import FourRows, Rows4
from npu_runtime import Executor, load_weights
from npu_runtime.backends.base import Backend

from ...porting.backend import HostBackend
from ...support import cuda_gpu
from ...support.host_dialect import DIALECTS, host_in
from ...support.host_dialect import needs_compiler as host
from ...support.metal_backend import EmulatedMetal
from .test_bf16c12 import Product, weights


@pytest.fixture
def dialect(request: pytest.FixtureRequest) -> Iterator[str]:
    """The host target in a dialect."""
    with host_in(request.param):
        yield request.param


# -- the form -------------------------------------------------------------------------------------------------------
def _come_back(w: np.ndarray) -> None:
    packed = Rows4().pack(w)
    assert packed.shape == Rows4().packed_shape(*w.shape)
    np.testing.assert_array_equal(Rows4().unpack(packed, *w.shape).view(np.uint16), w.view(np.uint16))


@pytest.mark.parametrize(("n", "k"), [(1, 64), (64, 64), (70, 192), (4, 16320), (1030, 1536)])
def test_every_bit_comes_back(n: int, k: int) -> None:
    w = weights(n, k)
    w.view(np.uint16)[0, [5, 20, 21, 30, 63]] = 0x7F80, 0xFF81, 0x7FC1, 0x0001, 0x8003
    _come_back(w)


def _all_patterns() -> np.ndarray:
    """All bfloat16 in rows of 64: in fours of one exponent without its last bit, the lowest and highest as outliers."""
    n = np.arange(1 << 16)
    bits = (n & 0xFF | (n >> 8 & 1) << 15 | n >> 9 << 8).astype(np.uint16)
    rows = np.full((65536 - 1024 + 1024 * 16) // 64 * 64, 0x3F80, np.uint16).reshape(-1, 64)
    rows[:1008] = bits[512:-512].reshape(-1, 64)
    rows[1008::4, ::4] = np.concatenate([bits[:512], bits[-512:]]).reshape(-1, 16)
    return rows.view(ml_dtypes.bfloat16)


def test_every_pattern_comes_back() -> None:
    patterns = _all_patterns()
    assert np.unique(patterns.view(np.uint16)).size == 1 << 16
    _come_back(patterns)


def test_as_many_outliers_as_there_is_room_for() -> None:
    places = FourRows(1536).max_outliers
    w = np.full((8, 1536), 0.5, ml_dtypes.bfloat16)
    w[5, : places - 9], w[6, :9] = 2.0**40, -1e-20
    _come_back(w)
    w[7, 5] = 1e20
    with pytest.raises(IncompressibleError, match=rf"have room for {places}"):
        Rows4().pack(w)


def test_outliers_and_padding_cost_at_most_3_percent() -> None:
    """Of twelve bits for each weight, from 576 columns on; codes and low bytes lie at multiples of cache lines."""
    for k in range(576, 16384, 64):
        four = FourRows(k)
        assert four.nbytes <= 1.03 * (4 * k * 12 // 8) and four.planes % 128 == 0 == four.extras % 32
        assert four.max_outliers >= 4 * k // 128


# -- the kernels ----------------------------------------------------------------------------------------------------
def _product(n: int, k: int) -> IRGraph:
    return capture(Product(k, n), (torch.zeros(1, k, dtype=torch.bfloat16),))


def _compressed(program: CompiledProgram) -> bool:
    return "bf16c12.rows4" in {b.format for b in program.buffers}


@host
@pytest.mark.parametrize("dialect", DIALECTS, indirect=True)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (70, 192), (900, 64), (100, 1536), (10, 8960)])
def test_products(dialect: str, n: int, k: int) -> None:
    _check_product("host", HostBackend(), n, k)


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
@pytest.mark.parametrize(("n", "k"), [(1, 64), (70, 192), (1536, 8960), (17920, 1536), (3000, 16320)])
def test_products_on_a_gpu(n: int, k: int) -> None:
    _check_product("cuda", cuda_gpu.backend(), n, k)


def _check_product(target: str, backend: Backend, n: int, k: int) -> None:
    w = weights(n, k, seed=k)
    w[np.abs(w.astype(np.float32)) > 100] = 0.5
    x = np.random.default_rng(n).standard_normal((1, k)).astype(ml_dtypes.bfloat16)
    results = []
    for weights_in in ("bf16c12", None):
        program = compile_ir(_product(n, k), target, weights=weights_in)
        assert _compressed(program) == (weights_in is not None)
        (result,) = Executor(program, load_weights(program, {"weight": w}, backend), backend).run([x]).values()
        results.append(result.astype(np.float64))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    compressed, plain = (np.abs(r - exact) for r in results)
    assert compressed.max() <= 1.1 * plain.max()
    assert np.abs(results[0] - results[1]).max() <= plain.max()


class NormedProduct(Product):
    """The epsilon is that of bfloat16, 2^-7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.rms_norm(x, x.shape[-1:]))


@host
@pytest.mark.parametrize("dialect", ["fragments"], indirect=True)
def test_groups_of_threads_share_a_norm(dialect: str) -> None:
    """The last workgroup has fewer units than groups, which all pass its barriers."""
    n = 70
    x = np.random.default_rng(n).standard_normal((1, 64)).astype(ml_dtypes.bfloat16)
    w, backend = weights(n, 64), HostBackend()
    w[np.abs(w.astype(np.float32)) > 100] = 0.5
    program = compile_ir(
        capture(NormedProduct(64, n), (torch.from_numpy(x.astype(np.float32)).bfloat16(),)), "host", weights="bf16c12"
    )
    assert re.search("GROUPS = [2-9]", "".join(program.sources.values()))
    (result,) = Executor(program, load_weights(program, {"weight": w}, backend), backend).run([x]).values()
    y = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean() + 2.0**-7)
    exact = y.astype(ml_dtypes.bfloat16).astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(result - exact).max() <= 0.01 * np.abs(exact).max()


@host
@pytest.mark.parametrize("dialect", ["fragments", "lanes"], indirect=True)
def test_the_kernels_know_every_pattern(dialect: str) -> None:
    """A product with a unit vector is a column of the weights; rows with infinities and NaN are left out."""
    w = _all_patterns()
    w = w[np.isfinite(w.astype(np.float32)).all(-1)]
    program = compile_ir(_product(*w.shape), "host", weights="bf16c12")
    backend = HostBackend()
    run = Executor(program, load_weights(program, {"weight": w}, backend), backend)
    for column in (*range(8), 13, 38, 63):
        (result,) = run.run([np.eye(64, dtype=ml_dtypes.bfloat16)[column : column + 1]]).values()
        np.testing.assert_array_equal(result[0].astype(np.float32), w[:, column].astype(np.float32))


def test_a_product_of_several_rows_reads_plain_weights() -> None:
    ir = capture(Product(64, 32), (torch.zeros(2, 64, dtype=torch.bfloat16),))
    assert not _compressed(compile_ir(ir, "metal", weights="bf16c12"))


# -- a language model -----------------------------------------------------------------------------------------------
Result = tuple[np.ndarray, int]
CARD = {
    "model_type": "qwen2", "vocab_size": 130, "hidden_size": 64, "intermediate_size": 192, "hidden_act": "silu",
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def _logits(target: str, backend: Backend, format: str | None, numbers: dict[str, np.ndarray]) -> np.ndarray:
    graphs = llm_graphs(LLMConfig.from_hf(CARD), max_len=64, chunks=())
    program = compile_entries(graphs, target, weights=format)
    assert _compressed(program) == (format is not None)
    executor = Executor(program, load_weights(program, numbers, backend), backend, "decode")
    steps = []
    for position, token in enumerate((7, 100, 3, 129)):
        feeds = {"token_ids": np.array([[token]]), "positions": np.array([position]), "last": np.array([0])}
        steps += [np.asarray(v, np.float64) for v in executor.run(feeds).values()]
    return np.stack(steps)


def _prefill(target: str, backend: Backend, format: str | None, numbers: dict[str, np.ndarray], fast: bool) -> Result:
    """Return the logits of a prompt, and the bytes of the matrices in which they are computed."""
    graphs = llm_graphs(LLMConfig.from_hf(CARD), max_len=64, chunks=(24,))
    program = compile_entries(graphs, target, weights=format, speed_over_memory=fast)
    executor = Executor(program, load_weights(program, numbers, backend), backend, "prefill_24")
    tokens, positions = np.arange(24)[None] * 5, np.arange(24)
    (logits,) = executor.run({"token_ids": tokens, "positions": positions, "last": np.array([23])}).values()
    held = [b for b in program.buffers if b.kind == "weight" and len(b.shape) > 1 and "embed" not in b.name]
    return np.asarray(logits, np.float64), sum(math.prod(b.shape) * numpy_dtype(b.dtype).itemsize for b in held)


def _same_prefill(target: str, backend: Backend) -> None:
    """Weights that the decode step reads compressed are decoded for prompts, or stored twice on request."""
    numbers = _numbers()
    one, plain = (_prefill(target, backend, format, numbers, False) for format in ("bf16c12", None))
    both = _prefill(target, backend, "bf16c12", numbers, True)
    np.testing.assert_array_equal(one[0], both[0])
    assert np.abs(one[0] - plain[0]).max() <= 0.01 * np.abs(plain[0]).max()
    assert one[1] < plain[1] and both[1] > 1.5 * one[1]


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_a_model_on_a_gpu() -> None:
    _same_logits("cuda", cuda_gpu.backend())
    _same_prefill("cuda", cuda_gpu.backend())


@host
@pytest.mark.parametrize("dialect", ["lanes"], indirect=True)
def test_prompts_on_the_host(dialect: str) -> None:
    _same_prefill("host", HostBackend())


@host
@pytest.mark.parametrize("dialect", ["fragments", "lanes"], indirect=True)
def test_a_model_on_the_host(dialect: str) -> None:
    _same_logits("host", HostBackend())


def test_a_model_in_the_emulator() -> None:
    _same_logits("metal", EmulatedMetal())


def _numbers() -> dict[str, np.ndarray]:
    shapes = parameter_shapes(LLMConfig.from_hf(CARD))
    numbers = {
        key: weights(*s, seed=i) if len(s) == 2 else weights(1, *s)[0] for i, (key, s) in enumerate(shapes.items())
    }
    for key, w in numbers.items():
        w[np.abs(w.astype(np.float32)) > 100] = 0.5
        if "norm" in key:
            w[:] = 1 + w.astype(np.float32)
    return numbers


def _same_logits(target: str, backend: Backend) -> None:
    """With norms ahead of products, paired products, biases and residuals."""
    numbers = _numbers()
    compressed, plain = (_logits(target, backend, format, numbers) for format in ("bf16c12", None))
    assert np.abs(compressed - plain).max() <= 0.01 * np.abs(plain).max()


def test_machine_code_for_cuda() -> None:
    if missing := cuda_gpu.compiler_missing():
        pytest.skip(missing)
    program = compile_entries(llm_graphs(LLMConfig.from_hf(CARD), max_len=64, chunks=()), "cuda", weights="bf16c12")
    assert _compressed(program) and program.binary
