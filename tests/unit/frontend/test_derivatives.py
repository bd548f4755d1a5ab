"""Models whose forward computes derivatives become ordinary graphs, which run natively."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import npu_compiler  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.support.errors import CaptureError  # noqa: E402

func, grad = torch.func, torch.autograd.grad


class With(nn.Module):
    """A net, and a function of it and an input."""

    def __init__(self, net: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.net, x)


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def with_gradient(net: nn.Module, x: torch.Tensor) -> Any:
    """A network and its gradient, as in physics-informed networks."""
    x = x.detach().clone().requires_grad_(True)
    u = net(x)
    return u, grad(u, x, torch.ones_like(u), create_graph=True)[0]


def laplacian(net: nn.Module, x: torch.Tensor) -> Any:
    x.requires_grad_(True)
    u = net(x)
    slope = grad(u.sum(), x, create_graph=True)[0]
    return u, sum(grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(4))


def forces(net: nn.Module, x: torch.Tensor) -> Any:
    def energy(places: torch.Tensor) -> torch.Tensor:
        squares = (places[:, None] - places[None]).square().sum(-1, keepdim=True)
        return net(squares.expand(-1, -1, 4)).sum()

    return -func.grad(energy)(x)


def descent(net: Any, x: torch.Tensor) -> Any:
    """Steps of gradient descent inside of forward."""
    weight = net[0].weight
    for _ in range(2):
        weight = weight - 0.1 * func.grad(lambda w: (x @ w.T).square().mean())(weight)
    return x @ weight.T


TRANSFORMS = {
    "autograd": (mlp, with_gradient),
    "laplacian": (mlp, laplacian),
    "of a weight": (mlp, lambda net, x: grad(net(x).square().sum(), net[0].weight)[0]),
    "forces": (lambda: mlp(1), forces),
    "descent": (mlp, descent),
    "vjp": (mlp, lambda net, x: func.vjp(net, x)[1](torch.ones(5, 3))),
    "jvp": (mlp, lambda net, x: func.jvp(net, (x,), (x.flip(0),))),
    "jacrev": (mlp, lambda net, x: torch.vmap(func.jacrev(net))(x)),
    "jacfwd": (mlp, lambda net, x: torch.vmap(func.jacfwd(net))(x)),
    "hessian": (lambda: mlp(1), lambda net, x: torch.vmap(func.hessian(lambda row: net(row)[0]))(x)),
    "functional": (mlp, lambda net, x: torch.autograd.functional.jacobian(lambda v: net(v).sum(0), x)),
    "vmap": (mlp, lambda net, x: torch.vmap(lambda row: torch.tanh(net[0].weight @ row))(x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_run_natively(name: str) -> None:
    torch.manual_seed(0)
    make, function = TRANSFORMS[name]
    _check(With(make(), function), torch.randn(5, 4))


NETS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "activations": (lambda: [nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.SiLU(), nn.Softmax(-1)], (5, 4)),
    "convolutions": (lambda: [nn.Conv2d(4, 6, 3, padding=1), nn.ELU(), nn.Conv2d(6, 4, 3, stride=2)], (2, 4, 8, 8)),
    "groups": (lambda: [nn.Conv1d(4, 8, 3, dilation=2), nn.Conv1d(8, 8, 2, groups=4, bias=False)], (2, 4, 9)),
    "transposed": (lambda: [nn.ConvTranspose2d(4, 3, 3, 2, output_padding=1), nn.AvgPool2d(3, 2, 1)], (2, 4, 5, 5)),
    "pooling": (lambda: [nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)], (2, 4, 8, 8)),
    "attention": (lambda: [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], (2, 5, 8)),
}


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_layers_run_natively(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    _check(With(nn.Sequential(*make()), with_gradient), torch.randn(shape))


def _check(model: nn.Module, x: torch.Tensor) -> None:
    model.eval()
    built = npusim.build(model, (x.clone(),), fallback=False)
    wanted = pytree.tree_leaves(model(x.clone()))
    with torch.no_grad():
        for ours, theirs in zip(pytree.tree_leaves(built(x)), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_names_buffers_and_other_shapes_are_those_of_the_model() -> None:
    class Counting(With):
        def __init__(self) -> None:
            super().__init__(mlp(), with_gradient)
            self.register_buffer("calls", torch.zeros(1))
            self.seen = 0

        def forward(self, x: torch.Tensor, *, scale: float) -> Any:
            self.calls += 1
            self.seen += 1
            u, slope = super().forward(x)
            return {"u": u * scale, "slope": slope, "calls": self.calls * 1}

    model = Counting().eval()
    ir = npu_compiler.capture(model, (torch.randn(5, 4),), example_kwargs={"scale": 2.0})
    assert [t.name for t in ir.graph_inputs] == ["x"] and [u.key for u in ir.state] == ["calls"]
    built = npusim.build(model, (torch.randn(5, 4),), example_kwargs={"scale": 2.0})
    assert model.seen == 0 and not model.calls.any()
    for rows in (5, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(built(x, scale=2.0), pytree.tree_map(torch.detach, model(x, scale=2.0)))


def test_backward_is_refused_with_its_line() -> None:
    def accumulate(net: nn.Module, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        net(x).sum().backward()
        return x.grad

    with pytest.raises(
        CaptureError, match=r"forward calls backward\(\) at .*test_derivatives.py:\d+ in accumulate"
    ) as e:
        npu_compiler.capture(With(mlp(), accumulate), (torch.randn(5, 4),))
    assert str(e.value).endswith("call torch.autograd.grad, which returns gradients")


def test_an_error_of_the_model_is_reported_as_such() -> None:
    def wrong(net: nn.Module, x: torch.Tensor) -> Any:
        return func.grad(lambda v: net(v))(x)  # not a scalar

    with pytest.raises(CaptureError, match=r"in wrong .*return a scalar"):
        npu_compiler.capture(With(mlp(), wrong), (torch.randn(5, 4),))


def test_other_threads_differentiate_during_a_capture() -> None:
    x = torch.ones(3, requires_grad=True)
    found: list[Any] = []

    def forward(net: nn.Module, given: torch.Tensor) -> Any:
        thread = threading.Thread(target=lambda: found.append(grad((x * x).sum(), x)[0]))
        thread.start()
        thread.join()
        return net(given)

    npu_compiler.capture(With(mlp(), forward), (torch.randn(5, 4),))
    assert torch.equal(found[0], torch.full((3,), 2.0))
