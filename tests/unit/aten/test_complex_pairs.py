"""Complex numbers inside of a graph are pairs of real ones; an op that is not known leaves them as they are."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import npusim
from npu_compiler import load_ir, save_ir
from npu_compiler.aten.complex_pairs import complex_as_pairs
from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.frontend import capture


class Rotary(nn.Module):
    """Pairs of elements, turned by products of complex numbers."""

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None] * 1.5
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Layouts(nn.Module):
    """Ops that move complex numbers, with dims from the front and from the back."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.complex(x, y).unsqueeze(-1).transpose(0, -2).squeeze(-1).permute(-1, 0)
        z = torch.cat([z, -z.conj()], -1)[:, 1:].reshape(-1).expand(2, -1)
        z = z.unsqueeze(0).select(0, -1)
        return z.real, z.imag, torch.view_as_real(z)


class Arithmetic(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.complex(x, y[:1])
        w = (z * x + y * z - z / 3) * z.conj() * torch.arange(4)
        return torch.view_as_real(w / y.abs().add(1)), w.real


class Tables(nn.Module):
    """Complex constants, an attribute and a buffer, from which rows are taken, split, padded and joined."""

    turns: torch.Tensor
    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.turns = torch.polar(torch.ones(6, 4), torch.arange(24.0).reshape(6, 4))
        self.register_buffer("other", torch.polar(torch.ones(3, 4), torch.arange(12.0).reshape(3, 4)), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.complex(x, y)
        at = torch.tensor([2, 0, 5])
        a, b = torch.split(z * self.turns[at], [1, 3], -1)
        c, d = self.turns.index_select(0, at).chunk(2, -1)
        e, *_ = torch.stack([self.other, z], -2).unbind(1)
        padded = torch.nn.utils.rnn.pad_sequence([z, self.turns, self.other[1:]], batch_first=True)
        behind = torch.nn.utils.rnn.pad_sequence([z, self.turns])
        found = torch.cat([a, b], -1), torch.stack([c, d], -2), e * z, padded, behind, self.turns
        return tuple(torch.view_as_real(f) for f in found)


class Mixed(nn.Module):
    """PyTorch pads real numbers as complex ones if the first are complex."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.nn.utils.rnn.pad_sequence([torch.complex(x, y), x[:2]], batch_first=True))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(x, y).sqrt())


def _args(model: nn.Module) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return (
        (torch.randn(2, 5, 3, 8), torch.randn(5, 4))
        if isinstance(model, Rotary)
        else (torch.randn(3, 4), torch.randn(3, 4))
    )


@pytest.mark.parametrize("model", [Rotary(), Layouts(), Arithmetic(), Tables()], ids=lambda m: type(m).__name__)
def test_one_partition_with_the_same_results(model: nn.Module) -> None:
    args = _args(model)
    built = npusim.build(model, copy.deepcopy(args))
    assert [p.device for p in built.plan.partitions] == ["npu"]
    ours, theirs = (r if isinstance(r, tuple) else (r,) for r in (built(*args), model(*args)))
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_results_keep_their_names_and_files_have_no_complex_numbers(tmp_path: object) -> None:
    model = Layouts()
    ir = capture(model, _args(model))
    assert [t.name for t in ir.graph_outputs] == ["real", "imag", "view_as_real"]
    assert not any("complex" in t.dtype for n in ir.nodes for t in n.outputs)
    path = f"{tmp_path}/ir.json"
    save_ir(ir, path)
    assert [n.op_type for n in load_ir(path).nodes] == [n.op_type for n in ir.nodes]


def test_constants_are_saved_as_pairs(tmp_path: Path) -> None:
    model = Tables()
    ir = capture(model, _args(model))
    found = {k: (str(v.dtype), v.shape) for k, v in ir.constants.items() if k in ("turns", "other")}
    assert found == {"turns": ("float32", (6, 4, 2)), "other": ("float32", (3, 4, 2))}
    assert not any("complex" in t.dtype for t in ir.weights)
    built = npusim.build(model, _args(model))
    built.save(tmp_path / "model.npubin")
    loaded = npusim.load(tmp_path / "model.npubin")
    for x, y in zip(loaded(*_args(model)), model(*_args(model)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["transpose.int", "unsqueeze.default", "permute.default"])
@pytest.mark.parametrize("bad", [None, 1.5, [1]])
def test_arguments_that_do_not_fit_leave_the_graph_as_it_is(op: str, bad: object) -> None:
    z, name = TensorSpec("z", (2, 3), "complex64", ("z", 0)), f"aten.{op}"
    known = {
        "transpose.int": {"dim0": 0, "dim1": 1},
        "unsqueeze.default": {"dim": 0},
        "permute.default": {"dims": [1, 0]},
    }
    real = [TensorSpec(n, (2, 3), "float32", (n, 0)) for n in "xy"]
    made = OpNode("z", "aten.complex.default", real, [replace(z, producer=None)])

    def paired(attrs: dict[str, Any]) -> bool:
        moved = OpNode("moved", name, [z], [TensorSpec("moved", (3, 2), "complex64")], attrs)
        ir = IRGraph("m", real, [], [], {}, [made, moved])
        return complex_as_pairs(ir) is not ir

    assert paired(known[op]) and not paired(dict.fromkeys(known[op], bad))


@pytest.mark.parametrize("model", [Unknown(), Mixed()], ids=lambda m: type(m).__name__)
def test_an_unknown_op_leaves_the_graph_as_it_is(model: nn.Module) -> None:
    args = _args(model)
    built = npusim.build(model, args)
    assert any("complex" in t.dtype for n in built.plan.ir.nodes for t in n.outputs)
    torch.testing.assert_close(built(*args), model(*args))
