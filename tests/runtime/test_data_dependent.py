"""Models whose sizes, numbers or branches depend on tensor data: that part runs in PyTorch, the rest natively."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npu_compiler
import npusim
from npu_compiler.aten.ir import DataSize, IRGraph
from npu_compiler.aten.json_reader import load_ir, load_ir_from_dict
from npu_compiler.aten.json_writer import ir_to_dict, save_ir
from npu_compiler.partitioning.partitioner import partition
from npu_compiler.partitioning.plan import HOST, NPU
from npu_compiler.support.errors import BackendError, CompileError, IRError, NPUError
from npu_runtime import DAGExecutor
from npu_runtime.partitioned.fallback import HostPartition

torch = pytest.importorskip("torch")
from torch._higher_order_ops.while_loop import while_loop  # noqa: E402 - imports torch

from npu_compiler.frontend import capture, state_dict_numpy  # noqa: E402


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


X = torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.0, 0.0, 5.0, -1.0], [2.0, 2.0, -4.0, 0.0]])
OTHER = torch.tensor([[0.0, 0.0, 0.0, 3.0], [0.0, 9.0, 5.0, 0.0], [0.0, 2.0, 0.0, 0.0]])


def item_as_size(x: Any) -> Any:
    n = (x > 4).sum().item()
    torch._check(n <= 4)
    return x[:, :n] * 2


def number_chain(x: Any) -> Any:
    n = x.nonzero().shape[0]
    return x * n + (n // 2 + 1) ** 2, torch.zeros(2 * n, 3)


def double_until(x: Any) -> Any:
    step = x[0] + 1  # a value that the loop reads and does not change

    def body(i: Any, y: Any) -> Any:
        return i + 1, y * 2 + step

    return while_loop(lambda i, y: (y.abs().max() < 100) & (i < 9), body, (torch.zeros((), dtype=torch.int64), x))


def branches(x: Any) -> Any:
    def nested(y: Any) -> Any:
        return torch.cond(y.sum() > 100, lambda y: y.cos(), lambda y: y.sin(), (y,))

    return torch.cond(x.sum() > 10, nested, lambda y: y - 1, (x.relu(),)) + 1


CASES: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0] + 1,
    "masked_select": lambda x: torch.masked_select(x, x > 0).sum(),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "bincount": lambda x: torch.bincount(x.abs().long().flatten()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.flatten(), x.abs().long().flatten()),
    "item": lambda x: x * x.sum().item(),
    "int item": lambda x: x.to(torch.int32) * (x > 0).sum().item(),
    "item as size": item_as_size,
    "numbers": number_chain,
    "where": lambda x: torch.where(x > 0),
    "in place": lambda x: (y := x * 2, y.relu_(), n := y.nonzero(), n.mT[0].add_(1), y)[2::2],
    "in place as strided": lambda x: (n := x.nonzero(), m := n.flatten(), m.add_(1), n)[1::2],
    "cond": branches,
    "while_loop": double_until,
}


def check(ir: IRGraph, model: torch.nn.Module, x: torch.Tensor) -> None:
    found = DAGExecutor(partition(ir), weights=state_dict_numpy(model)).execute([x])
    with torch.no_grad():
        expected = model(x)
    expected = expected if isinstance(expected, tuple | list) else [expected]
    for value, want in zip(found.values(), expected, strict=True):
        assert value.shape == tuple(want.shape)
        np.testing.assert_allclose(value, want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorch_for_other_data_and_after_a_round_trip(name: str, tmp_path: Path) -> None:
    model = Function(CASES[name])
    ir = capture(model, (X,))
    save_ir(ir, tmp_path / "ir.json")
    read = load_ir(tmp_path / "ir.json")
    assert ir_to_dict(read) == ir_to_dict(ir)
    for graph in (ir, read, copy.deepcopy(ir)):
        for x in (X, OTHER, X.neg()):
            check(graph, model, x)


def test_what_is_static_again_runs_natively() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            y = self.a(x)
            return self.b(y[y[:, 0] > 0].sum(0, keepdim=True).relu())

    torch.manual_seed(0)
    model = Net()
    ir = capture(model, (X,))
    plan = partition(ir)
    assert [p.device for p in plan.partitions] == [NPU, HOST, NPU]
    reason = next(r for n, r in plan.reasons.items() if n.startswith("index"))
    assert (reason.rule, reason.detail) == ("data_dependent", "its shape depends on data")
    check(ir, model, X)
    check(ir, model, torch.zeros(3, 4) - 100)
    with pytest.raises(CompileError, match=r"its shape depends on data .*torch.where"):
        npu_compiler.compile(ir)


def test_a_number_of_the_result_is_a_number() -> None:
    model = Function(lambda x: {"sum": x.sum().item(), "positive": (x > 0).sum().item(), "twice": x * 2})
    built = npusim.build(model, X)
    for x in (X, OTHER):
        result, wanted = built(x), model(x)
        assert (type(result["sum"]), type(result["positive"])) == (float, int)
        assert result["positive"] == wanted["positive"] and abs(result["sum"] - wanted["sum"]) < 1e-5
        assert torch.equal(result["twice"], wanted["twice"])
    assert type(built(X.numpy())["positive"]) is int


def test_checks_of_the_model_hold_at_run_time() -> None:
    executor = DAGExecutor(partition(capture(Function(item_as_size), (X,))))
    with pytest.raises(BackendError, match=r"u0 <= 4"):
        executor.execute([torch.full((3, 4), 9.0)])


def test_numbers_that_only_assertions_read_are_gone() -> None:
    def forward(x: Any) -> Any:
        torch._check((x > 0).sum().item() > 1)
        return x.relu()

    assert [n.op_type for n in capture(Function(forward), (X,)).nodes if "item" in n.op_type] == []
    assert [p.device for p in partition(capture(Function(forward), (X,))).partitions] == [NPU]


def test_sizes_are_expressions_in_the_ir() -> None:
    ir = capture(Function(number_chain), (X,))
    size = ir.graph_outputs[1].shape[0]
    assert isinstance(size, DataSize) and str(size) == "2*u0"
    assert repr(pickle.loads(pickle.dumps(size))) == "2*u0"
    document = ir_to_dict(ir)
    assert document["graph_outputs"][1]["shape"] == ["2*u0", 3]
    assert not load_ir_from_dict(document).graph_outputs[1].is_static


def broken(change: Callable[[dict[str, Any]], None], name: str) -> str:
    document = ir_to_dict(capture(Function(CASES[name]), (X,)))
    change(document)
    with pytest.raises((IRError, CompileError)) as error:
        DAGExecutor(partition(load_ir_from_dict(document)))
    return str(error.value)


def node(document: dict[str, Any], op: str) -> dict[str, Any]:
    return next(n for n in document["nodes"] if n["op_type"] == op)


def test_damaged_files_are_refused_by_name() -> None:
    def reference(d: dict[str, Any]) -> None:
        node(d, "number.floordiv")["attrs"]["args"][0] = {"number": 7}

    def power(d: dict[str, Any]) -> None:
        node(d, "number.pow")["attrs"]["args"] = ["2", 3]

    def graph_missing(d: dict[str, Any]) -> None:
        del node(d, "higher_order.cond")["graphs"]["false"]

    def graph_damaged(d: dict[str, Any]) -> None:
        node(d, "higher_order.cond")["graphs"]["true"]["nodes"][0]["inputs"] = 3

    def graph_forbidden(d: dict[str, Any]) -> None:
        inner = node(d, "higher_order.cond")["graphs"]["false"]["nodes"][0]
        inner["op_type"], inner["attrs"], inner["inputs"] = "aten.from_file.default", {"size": 12}, []

    def carried(d: dict[str, Any]) -> None:
        node(d, "higher_order.while_loop")["attrs"]["carried"] = 1

    def input_size(d: dict[str, Any]) -> None:
        d["graph_inputs"][0]["shape"][0] = "u0"

    def size(d: dict[str, Any]) -> None:
        node(d, "aten.nonzero.default")["outputs"][0]["shape"][0] = "u0; import os"

    assert "refers to input 7" in broken(reference, "numbers")
    assert "a list of numbers" in broken(power, "numbers")
    assert "true and false" in broken(graph_missing, "cond")
    assert "graphs['true'].nodes[0].inputs" in broken(graph_damaged, "cond")
    assert "aten.from_file" in broken(graph_forbidden, "cond")
    assert "carried" in broken(carried, "while_loop")
    assert "graph_inputs[0].shape[0]" in broken(input_size, "nonzero")
    assert "shape[0]" in broken(size, "nonzero")


def test_a_power_that_no_tensor_holds_ends_at_once() -> None:
    document = ir_to_dict(capture(Function(number_chain), (X,)))
    node(document, "number.pow")["attrs"]["args"][1] = 1 << 60
    executor = DAGExecutor(partition(load_ir_from_dict(document)))
    with pytest.raises(BackendError, match="does not fit 64 bits"):
        executor.execute([X])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.fft(x).abs(),
        lambda x: (torch.fft.rfft(x) * torch.full((1,), 1j) + (2 - 3j)).real,
        lambda x: torch.fft.fft(x),
        lambda x: torch.istft(torch.stft(x, 4, window=torch.ones(4), return_complex=True), 4, window=torch.ones(4)),
    ],
)
def test_complex_numbers_run_in_pytorch(function: Callable[[Any], Any], tmp_path: Path) -> None:
    model = Function(function)
    save_ir(capture(model, (X,)), tmp_path / "ir.json")
    for x in (X, OTHER):
        check(load_ir(tmp_path / "ir.json"), model, x)


def test_damaged_documents_end_in_typed_errors() -> None:
    """Whatever attributes, graphs and ops say: it runs, or the error is one of ours."""
    names = ("item as size", "numbers", "cond", "int item")
    documents = [ir_to_dict(capture(Function(CASES[name]), (X,))) for name in names]
    odd: list[Any] = [None, -1, 1 << 62, 1.5, "u0", "number.sum", "higher_order.cond", "aten.item.default"]
    odd += [[], {}, {"number": 0}, {"number": True}, {"number": 99}, {"complex": 3}, {"complex": [1, 2.0]}, [[1]]]
    rng, typed = random.Random(5), 0
    for _ in range(400):
        document = copy.deepcopy(rng.choice(documents))
        places = list(_places(document))
        for owner, key in rng.sample(places, rng.choice((1, 1, 2))):
            owner[key] = copy.deepcopy(rng.choice(odd))
        try:
            HostPartition(load_ir_from_dict(document)).run({"args_0": X.numpy()}, {})
        except NPUError:
            typed += 1
    assert typed > 100


def _places(value: Any, inside: bool = False) -> Iterator[tuple[Any, Any]]:
    """What nodes say about themselves: (owner, key)."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if inside or key in ("op_type", "attrs", "graphs"):
            yield value, key
        yield from _places(item, inside or key == "attrs")
