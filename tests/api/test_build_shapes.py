"""Built models with inputs of other shapes: programs, buffers and weights that they share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npu_compiler.frontend.export  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.frontend import capture, state_dict_numpy  # noqa: E402
from npu_compiler.support.errors import InputError  # noqa: E402
from npu_runtime import DAGExecutor  # noqa: E402

from .modules import Counter, Counting, Nested, mlp  # noqa: E402


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of every capture."""
    seen: list[Any] = []
    real = npu_compiler.frontend.export.capture_call

    def counted(model: Any, args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return real(model, args, **kwargs)

    monkeypatch.setattr(npu_compiler.frontend.export, "capture_call", counted)
    return seen


def test_executors_for_other_shapes_share_weights_and_state() -> None:
    model = Counting()
    weights = state_dict_numpy(model)
    plans = [npu_compiler.partition(capture(model, (torch.zeros(n, 64),))) for n in (8, 16)]
    first = DAGExecutor(plans[0], weights=weights)
    second = DAGExecutor(plans[1], first.backend, weights=weights, beside=first)
    stores = [next(iter(e.executors.values())).weights for e in (first, second)]
    assert {id(b) for b in stores[0].values()} == {id(b) for b in stores[1].values()}
    alone = DAGExecutor(plans[1], first.backend, weights=weights)
    assert not {id(b) for b in stores[0].values()} & {id(b) for b in alone.executors[0].weights.values()}
    x = torch.randn(16, 64)
    for executor, batch in ((first, 8), (second, 16), (first, 8)):
        (got,) = executor.execute([x[:batch]]).values()
        np.testing.assert_allclose(got, model(x[:batch]).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_another_batch_is_compiled_for_once(captures: list[Any]) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    for batch in (4, 1, 4, 2, 4):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(built(x), model(x), rtol=1e-5, atol=1e-6)
        assert isinstance(built(x.numpy()), np.ndarray)
    assert len(captures) == 3
    assert built.shapes == [[(1, 8)], [(4, 8)], [(2, 8)]]
    assert built.plan.inputs[0].shape == (1, 8)


def test_another_shape_may_change_the_structure_of_the_result() -> None:
    model = Nested()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    built = npusim.build(model, (x,), example_kwargs={"more": {"y": y}, "scale": 2.0})
    for n in (3, 2):
        got = built(x[:n], more={"y": y[:n]}, scale=2.0)
        assert isinstance(got, list) and len(got) == n
        torch.testing.assert_close(got, model(x[:n], {"y": y[:n]}, 2.0))


def test_fixed_shapes_refuse() -> None:
    built = npusim.build(mlp(), (torch.zeros(1, 8),), fixed_shapes=True)
    with pytest.raises(InputError, match=r"input 'input': shape \[4, 8\], expected \[1, 8\]; .*fixed_shapes=True"):
        built(np.zeros((4, 8), np.float32))


def test_an_exported_program_says_why_its_shapes_are_fixed() -> None:
    built = npusim.build(torch.export.export(mlp(), (torch.zeros(1, 8),)))
    with pytest.raises(InputError, match=r"expected \[1, 8\]; an ExportedProgram cannot be captured"):
        built(np.zeros((4, 8), np.float32))


def test_shapes_that_the_model_cannot_take_are_refused() -> None:
    built = npusim.build(mlp(), (torch.zeros(1, 8),))
    with pytest.raises(InputError, match=r"shape \[1, 9\], expected \[1, 8\]; the model cannot be compiled for these"):
        built(torch.zeros(1, 9))
    with pytest.raises(InputError, match="dtype float64, expected float32"):
        built(torch.zeros(4, 8, dtype=torch.float64))
    assert built.shapes == [[(1, 8)]]
    half = torch.randn(4, 8).half()
    torch.testing.assert_close(built(half), built(half.float()))  # widened, as for the first shape


@pytest.mark.parametrize("model", [Counting, Counter])
def test_buffers_have_one_content_for_all_shapes(model: type[nn.Module]) -> None:
    eager = model()
    built = npusim.build(eager, (torch.zeros(2, 64),))
    for batch in (2, 3, 2, 5, 3):
        x = torch.rand(batch, 64)
        torch.testing.assert_close(built(x), eager(x), rtol=1e-4, atol=1e-4)


def test_loaded_weights_are_those_of_all_shapes() -> None:
    model, other = mlp(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    built = npusim.build(model, (torch.zeros(1, 8),))
    built(torch.zeros(2, 8))
    built.load_weights(other.state_dict())
    for batch in (1, 2, 3):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(built(x), other(x), rtol=1e-5, atol=1e-6)


def test_loaded_weights_reset_buffers_of_all_shapes() -> None:
    eager = Counting()
    start = {k: v.clone() for k, v in eager.state_dict().items()}
    built = npusim.build(eager, (torch.zeros(1, 64),))
    x = torch.rand(2, 64)
    first = built(x)
    built(x[:1])
    built.load_weights(start)
    torch.testing.assert_close(built(x), first)


def test_the_programs_used_last_are_kept(captures: list[Any]) -> None:
    built = npusim.build(mlp(), (torch.zeros(1, 8),), max_shapes=3)
    built(torch.zeros(2, 8))
    built(torch.zeros(3, 8))
    built(torch.zeros(2, 8))
    with pytest.warns(RuntimeWarning, match="more than 3 tuples of input shapes"):
        built(torch.zeros(4, 8))
    assert built.shapes == [[(1, 8)], [(2, 8)], [(4, 8)]]
    built(torch.zeros(3, 8))  # no second warning
    assert built.shapes == [[(1, 8)], [(4, 8)], [(3, 8)]] and len(captures) == 5
    alone = npusim.build(mlp(), (torch.zeros(1, 8),), max_shapes=1)
    with pytest.warns(RuntimeWarning, match="more than 1 tuples of input shapes"):
        assert alone(torch.zeros(2, 8)).shape[0] == 2
    assert alone.shapes == [[(1, 8)]]
    with pytest.raises(InputError, match="max_shapes=0"):
        npusim.build(mlp(), (torch.zeros(1, 8),), max_shapes=0)


def test_threads_compile_each_shape_once(captures: list[Any]) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    xs = [torch.randn(1 + i % 4, 8) for i in range(32)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(built, xs))
    for x, got in zip(xs, results, strict=True):
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-6)
    assert len(captures) == 4


def test_options_and_inputs_of_odd_types() -> None:
    x = torch.randn(2, 8)
    built = npusim.build(mlp(), (x,), disable=(name for name in ["fuse_epilogue"]))
    kernels = [len(p.entries["main"].calls) for p in built.programs]
    built(torch.randn(3, 8))  # compiled with the same passes left out
    other = built._by_shape.others[((3, 8),)].executor.programs
    assert [len(p.entries["main"].calls) for p in other.values()] == kernels
    one = npusim.build(mlp(), (x,), disable="fuse_epilogue")
    assert [len(p.entries["main"].calls) for p in one.programs] == kernels
    with pytest.raises(InputError, match="an input has no shape"):
        built(torch.nested.nested_tensor([torch.randn(2, 8)]))


def test_a_module_whose_forward_is_a_built_model_is_captured_as_it_was() -> None:
    """A pipeline computes with built models in place of the forward of its modules."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU())).eval()
    x, other = torch.randn(2, 8), torch.randn(3, 8)
    with torch.no_grad():
        wanted = [model(v) for v in (x, other)]
    inner = npusim.build(model[1], x)
    model[1].forward = inner
    outer = npusim.build(model, x)
    model.forward = outer
    for value, want in zip((x, other), wanted, strict=True):
        torch.testing.assert_close(model(value), want, rtol=1e-5, atol=1e-6)
    assert model.forward is outer and model[1].forward is inner
