"""npusim.build(): how a built model is called, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import npu_runtime
import npusim
from npu_compiler.frontend import state_dict_numpy
from npu_compiler.support.errors import CaptureError, InputError, WeightError

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


class Fn(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.forward = function


def masked(x: Any, mask: Any = None, *, scale: float = 1.0, **extra: Any) -> Any:
    y = x * scale if mask is None else (x + 10 * mask) * scale
    return y - extra["bias"] if "bias" in extra else y


def test_keywords_in_any_order_and_by_position() -> None:
    mask, bias = torch.ones(3), torch.full((2, 1), 7.0)
    built = npusim.build(Fn(masked), X, example_kwargs={"bias": bias, "mask": mask, "scale": 2.0})
    wanted = masked(X, mask, scale=2.0, bias=bias)
    assert torch.equal(built(X, mask=mask, scale=2.0, bias=bias), wanted)
    assert torch.equal(built(bias=bias, scale=2.0, mask=mask, x=X), wanted)
    assert torch.equal(built(X, mask, bias=bias, scale=2.0), wanted)
    swapped = npusim.build(Fn(lambda x, y: x - 2 * y), example_kwargs={"y": X + 1, "x": X})
    assert torch.equal(swapped(X, X + 1), swapped(y=X + 1, x=X)) and torch.equal(swapped(X, X + 1), X - 2 * (X + 1))
    assert torch.equal(npusim.build(Fn(masked), (X, mask))(mask=mask, x=X, scale=1.0), masked(X, mask))


def test_arguments_left_out_have_their_defaults() -> None:
    built = npusim.build(Fn(masked), (X, None), example_kwargs={"scale": 1.0})
    assert torch.equal(built(X), X)
    assert torch.equal(npusim.build(Fn(masked), X)(X, None, scale=1.0), X)


@pytest.mark.parametrize(("number", "others"), [(math.nan, [0.0]), (0.0, [-0.0, math.nan]), (-0.0, [0.0])])
def test_floats_are_those_of_the_example_to_the_sign_of_zero(number: float, others: list[float]) -> None:
    def forward(x: Any, y: float) -> Any:
        return torch.copysign(x, torch.tensor(y))

    built = npusim.build(Fn(forward), (X, number))
    assert torch.equal(built(X, float(str(number))), forward(X, number))
    for other in others:
        with pytest.raises(InputError, match="the model was built for"):
            built(X, other)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, "argument 'mask' .*None.*built for float32"),
        ((), {"mask": X[0]}, "missing a required argument: 'x'"),
        ((X, X[0]), {"attention": X}, "argument 'attention' was not among"),
        ((X, X[0]), {"scale": 3.0}, "argument 'scale' was not among"),
        ((X, X[0], X), {}, "too many positional arguments"),
        ((X, X[0]), {"mask": X[0]}, "multiple values for argument 'mask'"),
        ((X.tolist(), X[0]), {}, r"argument 'x' .*\[\[0.0, 1.0, 2.0\].*built for float32"),
    ],
)
def test_a_wrong_argument_is_named(args: Any, kwargs: Any, message: str) -> None:
    built = npusim.build(Fn(masked), (X, X[0]))
    with pytest.raises(InputError, match=message):
        built(*args, **kwargs)


def test_a_number_of_another_type_is_another_model() -> None:
    built = npusim.build(Fn(lambda x, n: x * n), (X.int(), 2))
    assert built(X.int(), 2).dtype == torch.int32
    with pytest.raises(InputError, match=r"argument 'n' .*2\.0.*built for 2"):
        built(X.int(), 2.0)


def test_an_unlike_argument_has_a_short_message() -> None:
    many = [X] * 300
    built = npusim.build(Fn(lambda values: values[0] + 1), (many,))
    with pytest.raises(InputError) as caught:
        built([*many[1:], "x"])
    assert len(str(caught.value)) < 500


def test_results_that_are_no_tensors_keep_their_values() -> None:
    def forward(x: Any) -> Any:
        return {"y": x + 1, "n": 3, "name": "hi", "none": None, "parts": (x, [True, 1.5])}

    assert str(npusim.build(Fn(forward), X)(X)) == str(forward(X))


def test_building_does_not_run_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of PyTorch start threads, with which a process cannot fork."""
    model = nn.Linear(3, 4)
    inputs = []
    model.register_forward_pre_hook(lambda module, args: inputs.append(type(args[0]).__name__))
    built = npusim.build(model, X)
    assert set(inputs) == {"FakeTensor"}
    torch.testing.assert_close(built(X), nn.functional.linear(X, model.weight, model.bias))


def test_an_exported_program() -> None:
    program = torch.export.export(Fn(masked), (X,), {"mask": X[0], "scale": 2.0})
    built = npusim.build(program)
    assert torch.equal(built(X, mask=X[0], scale=2.0), masked(X, X[0], scale=2.0))
    assert torch.equal(built(X, X[0], 2.0), masked(X, X[0], scale=2.0))
    with pytest.raises(InputError, match="'scale'"):
        built(X, X[0])
    with pytest.raises(CaptureError, match="has its example inputs"):
        npusim.build(program, X)
    layer = torch.export.export(nn.Linear(3, 4), (X,))
    torch.testing.assert_close(npusim.build(layer)(X), layer.module()(X))


class Stateful(nn.Module):
    """Keeps ``kept`` as a plain attribute; ``step`` says what a call does with it."""

    def __init__(self, kept: Any, step: Any):
        super().__init__()
        self.kept, self.step = kept, step

    def forward(self, x: Any) -> Any:
        return self.step(self, x)


def counts(m: Any, x: Any) -> Any:
    m.kept += 1
    return x * m.kept


def collects(m: Any, x: Any) -> Any:
    m.kept.append(x)
    return sum(m.kept)


def caches(m: Any, x: Any) -> Any:
    if "table" not in m.kept:
        m.kept["table"] = torch.arange(3.0)
    return x * m.kept["table"]


def logs(m: Any, x: Any) -> Any:
    m.kept["calls"] = m.kept.get("calls", 0) + 1
    return x + 1


def writes(m: Any, x: Any) -> Any:
    m.kept[1:].add_(x[0, 1:])
    return x * m.kept


@pytest.mark.parametrize(("kept", "step"), [(0, counts), ([], collects), (torch.zeros(3), counts), (X[0], writes)])
def test_state_in_a_plain_attribute_is_refused(kept: Any, step: Any) -> None:
    before = copy.deepcopy(kept)
    model = Stateful(kept, step)
    with pytest.raises(CaptureError, match=r"forward changes 'kept'.*make it a buffer"):
        npusim.build(model, X)
    torch.testing.assert_close(model.kept, before)


@pytest.mark.parametrize("step", [caches, logs])
def test_an_attribute_that_changes_no_result_is_fine(step: Any) -> None:
    model = Stateful({}, step)
    built = npusim.build(model, X)
    assert model.kept == {}
    assert torch.equal(built(X), model(X)) and torch.equal(built(X), model(X))


def test_an_attribute_that_is_a_buffer_is_that_buffer() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2, 3), persistent=False)
            self.held = {"also": [self.total]}
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            self.held["also"][0][:, 1:].add_(self.linear(x)[:, 1:])
            return self.total * 2

    model = Aliased().eval()
    built = npusim.build(model, X)
    assert model.held["also"][0] is model.total and not model.total.any() and not model.total.requires_grad
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(built(X), model(X))


def test_a_failed_export_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(x: Any) -> Any:
        print("the model's own words", file=sys.stderr)
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="depends on tensor data"):
        npusim.build(Fn(forward), X)
    out, err = capfd.readouterr()
    assert (out, set(err.splitlines())) == ("", {"the model's own words"})


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


UNEXPORTABLE = [
    (nn.LazyLinear(3), "'weight' has no shape before the first call; call the module once"),
    (Fn(lambda x: Pair(x, x)), "Found .*Pair.* not a known type; return a tuple or a dict of tensors, or register"),
    (Fn(lambda x: torch.from_numpy(np.sin(x.numpy()))), r"in <lambda> .*; NumPy's functions cannot be exported"),
    (Fn(lambda x: torch.linalg.lstsq(x, x).solution), "lstsq.*; the shape of its result depends on data"),
]


@pytest.mark.parametrize(("model", "message"), UNEXPORTABLE)
def test_what_cannot_be_exported_is_reported_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        npusim.build(model, X)
    assert "\n" not in str(error.value) and "file an issue" not in str(error.value)


def check_whole(model: nn.Module, *args: Any) -> Any:
    """Builds one partition and compares a call."""
    built = npusim.build(model, args, fallback=False)
    with torch.no_grad():
        torch.testing.assert_close(built(*args), model(*args))
    return built


def test_vmap() -> None:
    layer = nn.Linear(3, 3)
    check_whole(Fn(lambda x: torch.vmap(lambda row: layer(row).sum() * row)(x)), X)


def test_flex_attention() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    slopes = torch.rand(4)
    bias = lambda score, b, h, i, j: score + slopes[h] * (j - i)  # noqa: E731
    check_whole(Fn(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - (i - j).abs())), q)
    check_whole(Fn(lambda q, k: flex_attention(q, k, k, score_mod=bias, block_mask=mask, enable_gqa=True)), q, k)


def test_an_exported_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    exported = torch.export.export(model, (X,)).module()
    check_whole(exported, X)
    check_whole(nn.Sequential(exported, nn.ReLU()), X)


def test_wrapped_modules() -> None:
    model = nn.Linear(3, 4)
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0]  # as where there is a GPU; the wrapper itself then refuses tensors of the host
    built = npusim.build(parallel, X, fallback=False)
    torch.testing.assert_close(built(X), model(X).detach())
    assert parallel.device_ids == [0]
    check_whole(torch.compile(model), X)
    with pytest.raises(CaptureError, match="ScriptModule"):
        npusim.build(torch.jit.trace(model, X), X)


class Scaled(torch.Tensor):
    """A matrix as integers and a scale for each row, in the way of quantisation libraries."""

    @staticmethod
    def __new__(cls, values: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Any, scale: Any):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Scaled(inner["values_"], inner["scale"])

    def dequantize(self) -> Any:
        return self.values_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (aten.detach.default, aten.alias.default):
            return cls(args[0].values_, args[0].scale)
        return op(*pytree.tree_map_only(cls, cls.dequantize, args), **(kwargs or {}))


def test_weights_that_consist_of_several_tensors(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    values = torch.randint(-127, 128, (4, 8), dtype=torch.int8)
    model.weight = nn.Parameter(Scaled(values, torch.rand(4, 1)), requires_grad=False)
    x = torch.randn(2, 8)
    built = check_whole(model, x)
    path, weights = built.save(tmp_path / "scaled")
    assert torch.equal(npu_runtime.load(path, weights)(x), built(x))
    torch.testing.assert_close(built(x[:1]), model(x[:1]))
    with pytest.raises(WeightError, match="weight: a Scaled has no numpy form"):
        state_dict_numpy(model)


def test_an_argument_that_is_changed_but_not_returned_is_refused() -> None:
    def forward(x: Any, states: Any) -> Any:
        states[0] = states[0] + x
        return states[0] * 2

    with pytest.raises(CaptureError, match="other tensors into its argument 1, which is not part of the result"):
        npusim.build(Fn(forward), (X, [X]))
    taken = npusim.build(Fn(lambda batch: batch.pop("x") + 1), ({"x": X},))
    assert torch.equal(taken({"x": X}), X + 1)


@pytest.mark.parametrize("copy", [torch.Tensor.contiguous, torch.Tensor.flatten, lambda x: x.reshape(6, 4)])
def test_a_copy_of_a_strided_argument_is_changed(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A program takes its inputs for dense, and a copy of a dense tensor may be the tensor itself."""

    def forward(x: torch.Tensor) -> Any:
        copy(x).narrow(-1, 0, 1).fill_(3)
        return x.squeeze()

    x = torch.randn(2, 4, 3).mT
    assert torch.equal(npusim.build(Fn(forward), (x,))(x), x)


def test_modules_with_extra_state_are_built() -> None:
    """A state_dict has whatever ``get_extra_state`` returns beside the tensors."""

    class Versioned(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

        def set_extra_state(self, state: Any) -> None: ...

    model, x = torch.nn.Sequential(Versioned(3, 2)).eval(), torch.ones(1, 3)
    built = npusim.build(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(built(x), model(x))
        model[0].weight.mul_(2)
        built.load_weights(model.state_dict())
        torch.testing.assert_close(built(x), model(x))
