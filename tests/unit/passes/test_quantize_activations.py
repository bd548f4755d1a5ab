"""Rows of activations in 8-bit floats: the numbers, where they are used, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler.frontend import capture, state_dict_numpy
from npu_compiler.graph import interp
from npu_compiler.graph.graph import Graph
from npu_compiler.passes.quantize_activations import quantize_activations
from npu_compiler.phases import State, run_fold
from npu_compiler.support.dtypes import FLOAT8
from npu_compiler.support.errors import ConfigError
from npu_compiler.target_config import CompileChoices, TargetConfig, target_config
from npu_compiler.weights.format import WeightFormats, block_format

from ...models.gate import Args, cast, expect, run
from ...support.metal_backend import EmulatedMetal

FORMATS = {"first": "fp8_e4m3", "gate": "fp8_e4m3", "up": "fp8_e4m3", "last": "fp8_e4m3_b128"}


class Rows(nn.Linear):
    """A layer whose activations are quantised if ``quantised`` is set, like the programs."""

    quantised = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.quantised:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        top = wide.abs().amax(-1, keepdim=True)
        q = (wide * torch.div(448, top)).to(torch.float8_e4m3fn).to(wide.dtype)
        y = q @ self.weight.to(wide.dtype).T * (top / 448)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Network(nn.Module):
    """Products of a value that a norm computes, and of one that a kernel stores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.first, self.last = Rows(128, 36), Rows(128, 40, bias=False)
        self.gate, self.up = Rows(128, 64, bias=False), Rows(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        return self.first(x), nn.functional.silu(self.gate(y)) * self.up(y), self.last(x)


def compiled(target: str, rows: int, dtype: torch.dtype) -> tuple[Network, Any, list[Args]]:
    torch.manual_seed(rows)
    model, args = Network().eval().to(dtype), [(torch.randn(rows, 128) * torch.logspace(-3, 2, rows)[:, None],)]
    formats = {f"{name}.weight": format for name, format in FORMATS.items()}
    ir = capture(model, cast(args[0], dtype))
    return model, npu_compiler.compile(ir, target, weights=formats, activations="fp8"), args


@pytest.mark.parametrize(("target", "dtype"), [("cpu", "bfloat16"), ("metal", "float32")])
def test_products_of_quantised_rows(target: str, dtype: str) -> None:
    """As good as PyTorch with the same quantised numbers; an RMS of errors of 2 % of the result would not be."""
    low = getattr(torch, dtype)
    model, program, runs = compiled(target, 5, low)
    backend = EmulatedMetal() if target == "metal" else None
    results = run(program, state_dict_numpy(model), [cast(args, low) for args in runs], *([backend] if backend else []))
    for name, format_name in FORMATS.items():
        layer, format = model.get_submodule(name), block_format(format_name)
        assert isinstance(layer, Rows)
        w = layer.weight.detach().float().numpy()
        layer.weight.data, layer.quantised = torch.from_numpy(format.decode(format.encode(w), 128)).to(low), True
    expect(model, runs, dtype).check(results)


def product(rows: int, dtype: str = "bfloat16") -> Graph:
    g = Graph("product")
    blocks = g.add("quantize", [g.weight("w", (12, 64), dtype)], [((12, 68), "uint8")], format="fp8_e4m3").out
    w = g.add("dequantize", [blocks], [((12, 64), dtype)], format="fp8_e4m3", k=64, dtype=dtype).out
    g.outputs = [("y", g.input("x", (rows, 64), dtype).matmul(w.permute(1, 0)))]
    return g


@pytest.mark.parametrize(("rows", "left"), [(1, "bfloat16"), (2, "bfloat16"), (16, "bfloat16"), (17, FLOAT8)])
def test_the_target_decides_what_products_multiply(rows: int, left: str) -> None:
    """A product of one row stays as it is; targets without float8 products multiply the numbers in the dtype of x."""
    for matrix_dtypes, expected in ((("bfloat16",), "bfloat16"), (("bfloat16", FLOAT8), left)):
        g = product(rows)
        quantize_activations(g, TargetConfig("any", matrix_dtypes=matrix_dtypes))
        g.clean()
        (made,) = [n for n in g.nodes if n.op == "matmul"]
        assert made.inputs[0].dtype == expected
        assert (made.inputs[0].op == "input") == (rows == 1)


@pytest.mark.parametrize("disable", [(), ("quantize_activations",)])
def test_the_pass_can_be_left_out(disable: tuple[str, ...]) -> None:
    choices, weights = CompileChoices(activations="fp8"), WeightFormats.of("fp8_e4m3")
    s = State(None, target_config("cpu"), None, disable, product(4), choices=choices, weights=weights)
    run_fold(s)
    assert (FLOAT8 in {n.out.dtype for n in s.graph.nodes}) == (not disable)


def test_rows_of_extreme_numbers() -> None:
    """Zero rows stay zero, tiny rows keep what a scale of 2^-100 leaves, and NaN and infinities make their row NaN."""
    x = np.ones((6, 64), np.float32)
    x[0], x[1], x[2, 3], x[3, 5], x[4] = 0, 2.0**-110, np.inf, np.nan, 3e38
    w = {"w": np.eye(12, 64, dtype=np.float32)}
    exact = interp.run(product(6, "float32"), {"x": x}, w)["y"]
    g = product(6, "float32")
    quantize_activations(g, TargetConfig("any"))
    g.clean()
    with np.errstate(invalid="ignore"):
        y = interp.run(g, {"x": x}, w)["y"]
    assert np.isnan(y[2:4]).all() and np.isfinite(np.delete(y, (2, 3), 0)).all()
    np.testing.assert_allclose(y[[0, 4, 5]], exact[[0, 4, 5]], rtol=1e-6)
    np.testing.assert_allclose(y[1], exact[1], atol=2.0**-110)


@pytest.mark.parametrize(
    ("weights", "activations", "message"),
    [
        (None, "fp8", "activations='fp8' needs weights in an fp8 format: weights= one of fp8_e4m3, fp8_e4m3_b128"),
        ("q8_0", "fp8", "needs weights in an fp8 format"),
        ("fp8_e4m3", "int8", "activations='int8': they can be quantised to fp8, or None"),
    ],
)
def test_refused(weights: str | None, activations: str, message: str) -> None:
    ir = capture(nn.Linear(64, 12), (torch.zeros(3, 64),))
    with pytest.raises(ConfigError, match=message):
        npu_compiler.compile(ir, "cpu", weights=weights, activations=activations)
