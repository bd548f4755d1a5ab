"""Products with weights in block formats: the kernels compute with the numbers that the formats define."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler import capture
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.frontend.tensors import state_dict_numpy, tensor_to_numpy
from npu_compiler.weights import format as registry
from npu_compiler.weights.format import BlockFormat, known_formats, weight_format
from npu_compiler.weights.groups import Int4
from npu_runtime import Backend, Executor

from ...models.gate import Args, cast, expect
from ...models.gate import run as run_on_cpu
from ...porting.backend import HostBackend
from ...support import cuda_gpu
from ...support.host_dialect import host_in, needs_compiler
from ...support.metal_backend import EmulatedMetal
from ...support.sweeps import FULL, IN_FULL

FORMATS = {n: f for n in known_formats() if isinstance(f := weight_format(n), BlockFormat) and f.layout(0) is not None}
K = 256


class Layers(nn.Module):
    """A layer for each format, and two whose results one epilogue combines, with a norm in front of them."""

    def __init__(self, formats: list[str], rows: int = 70, k: int = K) -> None:
        super().__init__()
        self.formats = formats
        self.norm = nn.RMSNorm(k)
        self.gate, self.up = (nn.Linear(k, rows // 2 + 3, bias=False) for _ in range(2))
        for name in formats:
            self.add_module(name, nn.Linear(k, rows, bias=name.endswith("0")))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        return (nn.functional.silu(self.gate(y)) * self.up(y), *(self.get_submodule(n)(x) for n in self.formats))


def _check(
    target: str, backend: Backend, names: list[str], dtype: str, runs: list[Args], rows: int = 70
) -> CompiledProgram:
    """The results are as good as eager's with the decoded weights, ``rows`` for each format."""
    low = getattr(torch, dtype)
    torch.manual_seed(0)
    k = runs[0][0].shape[1]
    model = Layers(names, rows, k).eval().to(low)
    formats = {f"{n}.weight": n for n in names} | {f"{n}.weight": names[-1] for n in ("gate", "up")}
    program = npu_compiler.compile(capture(model, cast(runs[0], low)), target, weights=formats)
    stored = {b.format for b in program.buffers if b.format}
    assert stored == {f"{n}.rows" for n in names}
    results = run_on_cpu(program, state_dict_numpy(model), [cast(args, low) for args in runs], backend)
    for key, n in formats.items():
        weight = model.get_parameter(key)
        w = tensor_to_numpy(weight.detach())
        weight.data = torch.from_numpy(FORMATS[n].decode(FORMATS[n].encode(w), k)).to(low)
    expect(model, runs, dtype).check(results)
    return program


def _rows(rows: int, count: int, exponents: tuple[int, ...] = (0,), k: int = K) -> list[Args]:
    """Rows of numbers, in run i times 2 to the power ``exponents[i % len(exponents)]``."""
    generator = torch.Generator().manual_seed(1)
    scales = [2.0 ** exponents[i % len(exponents)] for i in range(count)]
    return [(torch.randn(rows, k, generator=generator) * scale,) for scale in scales]


def _sample(which: int) -> list[str]:
    """A fifth of the formats; the kernels share their code."""
    return list(FORMATS) if FULL else list(FORMATS)[which::5]


@needs_compiler
@pytest.mark.parametrize(("dialect", "dtype"), [("fragments", "bfloat16"), ("lanes", "float32")])
def test_products_of_one_row(dialect: str, dtype: str) -> None:
    with host_in(dialect):
        _check("host", HostBackend(), _sample(dialect == "lanes"), dtype, _rows(1, 8))


@needs_compiler
def test_products_of_persistent_workgroups() -> None:
    """Their fragments are of float16 for some formats."""
    with host_in("small"):
        names = list(FORMATS) if FULL else ["q4_k", "int4_g128", "int8_zp", "fp8_e4m3"]
        program = _check("host", HostBackend(), names, "bfloat16", _rows(1, 3, (0, 60, -60)))
    assert "gemv_persistent<" in program.sources["kernels.cpp"] and "HALVES = true" in program.sources["kernels.cpp"]


@needs_compiler
def test_quads_with_different_rows() -> None:
    """One, two, four and eight sub-blocks share a fragment; the last unit is not whole. An outlier takes most bits from
    the integers of its sub-block."""
    names = ["int4_g128", "int4_g64", "q4_k", "int4_g32_zp", "iq4_nl"]
    runs = _rows(1, 2, (0, 60), 512)
    outlier = runs[0][0].clone()
    outlier[0, 100] *= 3000.0
    with host_in("one compute unit"):
        program = _check("host", HostBackend(), names, "bfloat16", [*runs, (outlier,)], 790)
    assert program.sources["kernels.cpp"].count("RowFragments<") > len(names)


@needs_compiler
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_integers_of_elements_that_are_not_finite(value: float) -> None:
    """No sum over such an element is a number."""
    names = ["int4_g128", "q4_k", "iq4_nl"]
    model, (x,) = Layers(names, 790, 512).eval().to(torch.bfloat16), _rows(1, 1, (0,), 512)[0]
    x[0, 300] = value
    args = cast((x,), torch.bfloat16)
    with host_in("one compute unit"):
        program = npu_compiler.compile(capture(model, args), "host", weights={f"{n}.weight": n for n in names})
        results = run_on_cpu(program, state_dict_numpy(model), [args], HostBackend())
    assert program.sources["kernels.cpp"].count("RowFragments<") == len(names)
    assert all(np.isnan(r).all() for r in results[0])


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_many_rows(dtype: str) -> None:
    """A kernel decodes the blocks."""
    with host_in("fragments"):
        _check("host", HostBackend(), _sample(3 + (dtype == "float32")), dtype, _rows(33, 1))


def test_products_of_one_row_in_the_emulator() -> None:
    _check("metal", EmulatedMetal(), _sample(2), "bfloat16", _rows(1, 1))


@needs_compiler
def test_a_format_from_outside_brings_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tmp_path / "own4.h"
    type_of = "typedef BlockFormat<LinearCodes<4, -8>, HalfScale, 64, 64> own4;"
    reader.write_text(f'#pragma once\n#include "blocks.h"\n\n{type_of}\n')
    own = Int4(64, "own4")
    own.layouts[1].reader = reader
    monkeypatch.setattr(registry, "_registered", {**registry._registered, "own4": own})
    monkeypatch.setitem(FORMATS, "own4", own)
    with host_in("fragments"):
        _check("host", HostBackend(), ["own4"], "bfloat16", _rows(1, 8))


class Tied(nn.Module):
    """A table whose rows are looked up, and that a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, K)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embed(ids), nn.functional.linear(x, self.embed.weight)


LOOKED_UP = [n for n, f in FORMATS.items() if f.layouts[1].looks_up(64, K)]


@pytest.mark.parametrize("name", ["q4_k", *(pytest.param(n, marks=IN_FULL) for n in LOOKED_UP if n != "q4_k")])
def test_rows_of_tables_are_looked_up_in_their_blocks(name: str) -> None:
    torch.manual_seed(0)
    model, backend = Tied().eval(), EmulatedMetal()
    args = (torch.tensor([0, 5, 63, 33, 5]), torch.randn(1, K))
    program = npu_compiler.compile(capture(model, args), "metal", weights={"embed.weight": name})
    assert [b.format for b in program.buffers if b.kind == "weight"] == [f"{name}.rows"]
    rows, _ = Executor(program, state_dict_numpy(model), backend).run([a.numpy() for a in args]).values()
    w = model.embed.weight.detach().numpy()
    np.testing.assert_array_equal(rows, FORMATS[name].decode(FORMATS[name].encode(w), K)[args[0].numpy()])


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_gpu.reason()), reason=cuda_gpu.reason() or "there is a GPU")
def test_products_on_a_gpu(rows: int) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        _check("cuda", cuda_gpu.backend(), list(FORMATS), dtype, _rows(rows, 16 if rows == 1 else 1))


@cuda_gpu.compiles()
def test_machine_code_for_cuda() -> None:
    names = list(FORMATS)[:: 1 if FULL else 7]
    model = Layers(names).bfloat16()
    ir = capture(model, (torch.zeros(1, K, dtype=torch.bfloat16),))
    assert npu_compiler.compile(ir, "cuda", weights={f"{n}.weight": n for n in names}).binary
