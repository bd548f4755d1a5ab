"""The panels of bf16c12: every weight comes back as it was, and products are those of the plain weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler.frontend.export import capture
from npu_compiler.pipeline import compile_ir
from npu_compiler.support.errors import IncompressibleError
from npu_compiler.targets.cpu.host import host_cpu
from npu_compiler.weights.formats.bf16c12.panels import Panels, tabulate
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import load_weights

from ...support.sweeps import FULL

TARGETS = ("cpu", "cpu:avx2", "cpu:portable") if "avx2" in host_cpu().features else ("cpu",)


PANELS = Panels()


def _element_by_element(packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """The bfloat16 [N, K] in panels, element by element, from the description."""
    out = np.zeros((packed.shape[0], 32, k), np.uint16)
    for panel, columns in zip(packed, out, strict=True):
        body = panel[64 : 64 + 48 * k].reshape(k // 4, 3, 64)
        for column in range(32):
            half, lane, place = column // 16, column % 16 // 4, column % 4
            for depth in range(k):
                byte = lane * 16 + half * 8 + place * 2 + depth % 2
                block, unit = divmod(depth // 2, 2)
                code = body[block, 0, byte] >> 4 * unit & 15
                columns[column, depth] = int(panel[code]) << 8 | int(body[block, 1 + unit, byte])
        count = int(panel[16:20].view("<u4")[0])
        for at, value in panel[64 + 48 * k :].view([("at", "<u4"), ("value", "<u4")])[:count]:
            columns[at % 32, at // 32] = value >> 16
    return out.reshape(-1, k)[:n].view(ml_dtypes.bfloat16)


def _comes_back(w: np.ndarray) -> None:
    packed = PANELS.pack(w)
    for back in (PANELS.unpack(packed, *w.shape), _element_by_element(packed, *w.shape)):
        assert np.array_equal(back.view(np.uint16), w.view(np.uint16))


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Normal numbers and what else checkpoints have: zeros of both signs, tiny and huge numbers, a row of zeros."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k)) * 0.02 * np.exp2(rng.integers(-3, 4, (n, 1)))
    few = rng.random((n, k))
    w[few < 0.01] = 0.0
    w[(few > 0.01) & (few < 0.0105)] = -0.0
    w[(few > 0.02) & (few < 0.021)] *= 1e-30
    w[(few > 0.03) & (few < 0.0305)] = 1e5
    w[min(2, n - 1)] = 0.0
    return w.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("n", "k"), [(1, 8), (32, 64), (70, 136)])
def test_every_bit_comes_back(n: int, k: int) -> None:
    _comes_back(weights(n, k))


def test_infinities_subnormals_and_nan_come_back() -> None:
    w = weights(32, 256)
    w.view(np.uint16)[3, [5, 60, 61, 200, 255]] = 0x7F80, 0xFF81, 0x7FC1, 0x0001, 0x8003
    _comes_back(w)


def test_the_table_holds_what_is_frequent() -> None:
    symbols = np.array([7] * 5 + [9] * 4 + [0] * 50 + [3] * 2 + [200], np.uint8)
    table, code = tabulate(symbols, 4)
    assert table.tolist() == [0, 7, 9, 3]
    assert [int(code[s]) for s in (0, 7, 9, 3, 200, 11)] == [0, 1, 2, 3, 0, 0]


def test_weights_of_all_sizes_do_not_fit() -> None:
    w = np.arange(32 * 64, dtype=np.uint16).reshape(32, 64) * 31
    with pytest.raises(IncompressibleError, match=r"\d+ of 2048 neighbouring weights have an unusual exponent"):
        PANELS.pack(w.view(ml_dtypes.bfloat16))


class Product(torch.nn.Module):
    def __init__(self, k: int, n: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n, k, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class Products(torch.nn.Module):
    """A product [M, K] @ [N, K].T for each of ``sizes`` (M, N, K)."""

    def __init__(self, *sizes: tuple[int, int, int]):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(n, k, dtype=torch.bfloat16) for _, n, k in sizes)
        self.inputs = tuple(torch.zeros(m, k, dtype=torch.bfloat16) for m, _, k in sizes)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.linear(x, w) for x, w in zip(inputs, self.weights, strict=True)]


SIZES = [(1, 70, 64), (3, 32, 5000), (4, 160, 576), (5, 70, 64), (33, 160, 576), (300, 32, 5000)]
SAMPLES = {"cpu": SIZES, "cpu:avx2": SIZES[::4], "cpu:portable": SIZES[2::4]}


@pytest.mark.parametrize("target", TARGETS)
def test_products(target: str) -> None:
    sizes = SIZES if FULL else SAMPLES[target]
    model = Products(*sizes)
    held = {f"weights.{i}": weights(n, k, seed=k) for i, (_, n, k) in enumerate(sizes)}
    for w in held.values():
        w[np.abs(w.astype(np.float32)) > 100] = 0.5
    given = [np.random.default_rng(m).standard_normal((m, k)).astype(ml_dtypes.bfloat16) for m, _, k in sizes]
    found = []
    for disable in ((), ("compress_weights",)):
        program = compile_ir(capture(model, model.inputs), target, weights="bf16c12", disable=disable)
        assert {b.format for b in program.buffers if b.kind == "weight"} == {"" if disable else "bf16c12.panels"}
        found.append([result.astype(np.float64) for result in Executor(program, held).run(given).values()])
    for size, x, w, *results in zip(sizes, given, held.values(), *found, strict=True):
        exact = x.astype(np.float64) @ w.astype(np.float64).T
        compressed, plain = (np.abs(r - exact) for r in results)
        assert compressed.max() <= 1.1 * plain.max(), size
        assert np.abs(results[0] - results[1]).max() <= plain.max(), size


def test_loading_names_the_weight_that_does_not_fit() -> None:
    program = compile_ir(capture(Product(64, 32), (torch.zeros(1, 64, dtype=torch.bfloat16),)), weights="bf16c12")
    w = (np.arange(32 * 64, dtype=np.uint16).reshape(32, 64) * 31 % 0x7F00).view(ml_dtypes.bfloat16)
    with pytest.raises(IncompressibleError, match=r"weight 'weight'.*weights=None"):
        load_weights(program, {"weight": w})
