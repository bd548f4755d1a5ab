"""Attention on all targets: values of one number, and NaN among the keys, of one part of them or of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture
from npu_compiler.frontend.tensors import tensor_to_numpy
from npu_compiler.target_config import target_config
from npu_compiler.targets import register_target
from npu_runtime import CPUBackend, Executor
from npu_runtime.backends.base import Backend

from ..porting.backend import HostBackend
from ..porting.target import TARGET
from ..support import cuda_gpu
from ..support.metal_backend import EmulatedMetal

# queries, keys, numbers of a key and of a value: the keys are in parts or not
CASES = [(1, 64, 8, 1), (1, 100, 8, 3), (3, 5, 4, 4), (2, 64, 16, 1), (20, 150, 8, 6)]
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": CPUBackend,
    "host": HostBackend,
    "metal": lambda: EmulatedMetal("shuffled", seed=2),
    "cuda": cuda_gpu.backend,
}


class Attentions(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        triples = zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True)
        return [torch.softmax(q @ k.mT, -1) @ v for q, k, v in triples]


def inputs(nan_from: Callable[[int], int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values of each case; the keys from a number on have a NaN."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for queries, keys, size, width in CASES:
        q, k, v = (
            torch.randn(1, 1, *s, generator=generator).to(dtype) for s in ((queries, size), (keys, size), (keys, width))
        )
        k[:, :, nan_from(keys) :, 0] = torch.nan
        found += [q, k, v]
    return found


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.float64),
        ("cpu", torch.bfloat16),
        ("host", torch.float32),
        ("metal", torch.float32),
        pytest.param("cuda", torch.float32, marks=cuda_gpu.marks()),
        pytest.param("cuda", torch.float64, marks=cuda_gpu.marks()),
    ],
)
def test_narrow_values_and_nan(target: str, dtype: torch.dtype) -> None:
    register_target(TARGET)
    model = Attentions()
    graph = capture(model, tuple(inputs(lambda n: n, dtype)))
    run = Executor(npu_compiler.compile(graph, target=target), None, BACKENDS[target]())
    for nan_from in (lambda n: n, lambda n: n - 1, lambda n: n // 2, lambda n: 0):
        arguments = inputs(nan_from, dtype)
        found = run.run([tensor_to_numpy(x) for x in arguments]).values()
        bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        for case, ours, exact in zip(CASES, found, model(*(x.double() for x in arguments)), strict=True):
            result = torch.from_numpy(ours.astype("float64")).to(dtype)
            torch.testing.assert_close(
                result, exact.to(dtype), equal_nan=True, msg=lambda m, c=case: f"{c}: {m}", **bounds
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longer", [False, True])
def test_long_heads_are_products_on_the_cpu(longer: bool, dtype: torch.dtype) -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    size = target_config("cpu").max_head_dim + 2 * longer
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, size, generator=generator).to(dtype) for n in (20, 40, 40))
    program = npu_compiler.compile(capture(Attention(), (q, k, v)))
    assert ("attention" in {call.kind for call in program.entry().calls}) != longer
    (found,) = Executor(program, None, CPUBackend()).run([tensor_to_numpy(x) for x in (q, k, v)]).values()
    want = Attention()(q.double(), k.double(), v.double())
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(torch.from_numpy(found.astype("float64")), want, rtol=bound, atol=bound)
