"""Constants, buffers and tied weights of captured models; writes in place and the aliases that see them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npusim
from npu_compiler.aten.json_reader import graph_weights_used
from npu_compiler.frontend import capture
from npu_compiler.support.errors import CaptureError

from ...support.captured import Fn, X, check, leaves, ops
from ...support.torch_oracle import run_ir


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]
)
def test_constants_keep_value_and_dtype(dtype: torch.dtype) -> None:
    table = torch.arange(12).reshape(3, 4).to(dtype)
    graph = check(Fn(lambda m, x: (x + table, m.big + x.sum()), big=torch.zeros(0)), X)
    (constant,) = (v for v in graph.constants.values() if v.shape == (3, 4))
    assert constant.dtype == (ml_dtypes.bfloat16 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


def test_non_persistent_buffers_are_constants() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("freq", torch.arange(4.0) + 0.5, persistent=False)
            self.register_buffer("scale", torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.freq * self.scale

    graph = check(M(), X)
    np.testing.assert_array_equal(graph.constants["freq"], np.arange(4, dtype=np.float32) + 0.5)
    assert list(graph_weights_used(graph)) == ["scale"]


@pytest.mark.parametrize("persistent", [False, True])
def test_sparse_buffers_that_nothing_reads_are_left_out(persistent: bool) -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("heads", torch.eye(3).to_sparse(), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    graph = capture(M(), (X,))
    assert list(graph_weights_used(graph)) == ["linear.weight", "linear.bias"]
    built = npusim.build(M().eval(), X)
    assert built(X).shape == (2, 3, 3)


def test_whole_buffer_writes_become_state_without_functionalisation() -> None:
    def forward(m: Any, position: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        m.cache.index_copy_(1, position, k)
        m.count.add_(1)
        return m.cache.sum(1) * m.count

    model = Fn(forward, cache=torch.zeros(2, 8, 4), count=torch.zeros((), dtype=torch.int64))
    graph = check(model, torch.tensor([3, 4, 5]), X)
    assert [n.op_type for n in graph.nodes[:2]] == ["aten.index_copy_.default", "aten.add_.Tensor"]
    assert [(u.key, u.value.producer) for u in graph.state] == [("cache", ("index_copy_", 0)), ("count", ("add_", 0))]


def test_writes_through_views_become_state() -> None:
    def forward(m: Any, k: torch.Tensor) -> torch.Tensor:
        m.cache[:, 2:5] = k
        m.cache[0, 0].mul_(2)
        return m.cache + 1

    graph = check(Fn(forward, cache=torch.ones(2, 8, 4)), X)
    assert [u.key for u in graph.state] == ["cache"]
    assert not any(op.split(".")[1].endswith("_") for op in ops(graph))


@pytest.mark.parametrize(
    "write", [lambda w: w.unsqueeze_(0), lambda w: w.transpose_(0, 1).add_(1), lambda w: w[0].mul_(2) + w.squeeze_()]
)
def test_buffers_keep_their_shapes(write: Callable[..., Any]) -> None:
    """What a call leaves is there in the next one, which was captured for the shape of the first."""
    with pytest.raises(CaptureError, match=r"changes the shape of 'w' from \[1, 3, 2\] to .* write to a view"):
        capture(Fn(lambda m, x: (write(m.w), x + 1)[1], w=torch.ones(1, 3, 2)), X)
    graph = check(Fn(lambda m, x: (m.w.unsqueeze_(0).add_(1).squeeze_(0), x + m.w.sum())[1], w=torch.ones(3, 2)), X)
    assert [u.value.shape for u in graph.state] == [(3, 2)]


def test_copy_into_a_buffer_and_buffer_read_before_and_after() -> None:
    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = m.memory * 1
        m.memory.copy_(x)
        return before, m.memory

    graph = check(Fn(forward, memory=torch.ones(2, 3, 4)), X)
    assert [u.key for u in graph.state] == ["memory"]


ALIASING: dict[str, Callable[..., Any]] = {
    "temporary": lambda m, x: (x * 2).relu_().add_(1),
    "base_after_view_write": lambda m, x: (y := x * 2, y[0].zero_(), y)[2],
    "view_before_write": lambda m, x: (y := x * 2, v := y[1], y.add_(5), v)[3],
    "view_of_view": lambda m, x: (y := x * 2, y.transpose(0, 1)[1].mul_(3), y.flatten())[2],
    "chunks": lambda m, x: (y := x * 2, c := y.chunk(2, -1), c[0].add_(1), (c[1], y))[3],
    "dead_base": lambda m, x: (x * 2).view(-1).sigmoid_(),
    "eval_dropout_returns_its_input": lambda m, x: (y := x * 2, z := F.dropout(y, 0.5, m.training), z.add_(1), y)[3],
    "eval_dropout_output": lambda m, x: (y := x * 2, z := F.dropout(y, 0.5, m.training), y[0].add_(1), z)[3],
    "copy_of_strided": lambda m, x: (y := torch.clamp(x.mT, -9, 9), z := y.flatten(), z.add_(1), y)[3],
    "view_of_strided": lambda m, x: (y := torch.clamp(x.mT, -9, 9), z := y.mT.flatten(), z.add_(1), y)[3],
    "requested_copy": lambda m, x: (y := x * 2, z := y.to(x.dtype, copy=True), z.add_(1), y)[3],
    "out_argument": lambda m, x: (y := x * 2, v := y[1], torch.add(y, x, out=y), v)[3],
    "masked": lambda m, x: (y := x.clone(), y.masked_fill_(y < 0, 0.0), y.index_fill_(1, torch.tensor([1]), 7), y)[3],
    "lifted": lambda m, x: (t := torch.tensor([1.0, 2, 3, 4]), t.add_(1), x * t)[2],
    "setitem": lambda m, x: (y := torch.zeros(2, 3, 4), y.__setitem__((slice(None), 1), x[:, 0]), y + x)[2],
}


@pytest.mark.parametrize("case", ALIASING)
def test_in_place_operations_and_aliases(case: str) -> None:
    check(Fn(ALIASING[case]), X.clone())


@pytest.mark.parametrize("case", ALIASING)
def test_in_place_operations_in_a_saved_program(case: str, tmp_path: Path) -> None:
    """Storages do not survive saving: schemas must find the aliases."""
    program = torch.export.export(Fn(ALIASING[case]).eval(), (X.clone(),))
    torch.export.save(program, tmp_path / "p.pt2")
    graph = capture(torch.export.load(tmp_path / "p.pt2"))
    outputs, _ = run_ir(graph, {}, [X.clone()])
    for got, want in zip(outputs, leaves(Fn(ALIASING[case]).eval()(X.clone())), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 2), lambda x: x[1:], lambda x: x[:1]])
def test_strides_of_another_layout_are_refused(view: Callable[..., Any]) -> None:
    """Values of a program are dense: the strides would find other elements."""
    with pytest.raises(CaptureError, match=r"as_strided.*contiguous copy"):
        capture(Fn(lambda m, x: view(x * 2).as_strided((12, 2), (1, 1))), X)
    check(Fn(lambda m, x: view(x * 2).clone(memory_format=torch.contiguous_format).as_strided((3, 2), (1, 2))), X)


def test_writes_through_windows_are_refused() -> None:
    """PyTorch's functional form of them has zeros between the windows."""
    with pytest.raises(CaptureError, match=r"writes through unfold\(\).*write to slices"):
        capture(Fn(lambda m, x: (y := x * 2, y.unfold(-1, 1, 2).add_(1), y)[2]), X)
    check(Fn(lambda m, x: (y := x * 2, w := y.unfold(-1, 1, 2), y[0].add_(1), w)[3]), X)


def test_in_place_inside_no_grad_sees_outer_aliases() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y[0]
        with torch.no_grad():
            y.add_(1)
        return view * 3

    check(Fn(forward), X)


def test_writing_to_an_input_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes to its input 'args_0'.*clone"):
        capture(Fn(lambda m, x: x.relu_() + 1), X.clone())


def test_tied_weights_are_listed_and_share_one_key() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    graph = check(Tied(), torch.tensor([[1, 2]]))
    assert [w.name for w in graph.weights] == ["embed.weight", "head.weight"]
    assert set(graph.weight_name_mapping.values()) == {"embed.weight"}
    assert list(graph_weights_used(graph)) == ["embed.weight"]
    with torch.device("meta"):
        meta = capture(Tied(), torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    assert meta.weight_name_mapping == graph.weight_name_mapping


class Pair(nn.Module):
    """A buffer ``a``, and a view of it as buffer ``b``."""

    def __init__(self, view: Callable[..., Any], forward: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(6.0))
        self.register_buffer("b", view(self.a))
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _write_both(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    first = m.b * x
    m.a.add_(1)
    second = m.b * x
    m.b.mul_(2)
    return [first, second, m.a * x]


@pytest.mark.parametrize("strict", [False, True])
def test_tied_buffers_are_one_state(strict: bool) -> None:
    """Whichever name a write uses, the other one sees it, also in the next call."""
    model = Pair(lambda a: a, _write_both)
    assert [u.key for u in capture(model, X[0, :1, :1], strict=strict).state] == [["a", "b"][strict]]
    built, x = npusim.build(copy.deepcopy(model), (X[0, 0, :1],)), X[0, 0, :1]
    for _ in range(2):
        torch.testing.assert_close(built(x), model(x))


@pytest.mark.parametrize(("written", "read"), [("a", "b"), ("b", "a")])
def test_writes_to_buffers_that_share_a_part_are_refused(written: str, read: str) -> None:
    """The read comes first: only the next call would see that the buffers are different values."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = getattr(m, read).sum() * x
        getattr(m, written).add_(1)
        return y

    with pytest.raises(CaptureError, match=f"writes to '{written}'; '{written}' shares memory with '{read}'"):
        capture(Pair(lambda a: a[2:5], forward), X)
    check(Pair(lambda a: a.clone(), forward), X, tolerance=1e-6)


def test_buffers_side_by_side_in_one_memory_are_apart() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(6.0)
            self.register_buffer("a", both[:3])
            self.register_buffer("b", both[3:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a.sum() + self.b.sum()
            self.a.add_(1)
            return y * x

    assert [u.key for u in check(Halves(), X, tolerance=1e-6).state] == ["a"]


def test_functional_form_names_buffers_that_share_memory() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.a[:2].add_(1)
        return m.b.sum() * x

    with pytest.raises(CaptureError, match=r"in-place operations failed: .*; 'a' shares memory with 'b': make one"):
        capture(Pair(lambda a: a[1:], forward), X)
