"""A mixed model in memory: PyTorch's results, buffers that last, weights, and what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import npu_compiler
import npu_runtime
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.support.errors import BackendError, CompileError, InputError, WeightError
from npu_runtime.partitioned import fallback
from npu_runtime.partitioned.model import MixedModel

from ..support.mixed_model import example, graph, small_model, weights
from ..support.toy_ir import ODD, Builder

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its weights beside it."""
    path = tmp_path_factory.mktemp("mixed") / "small.npubin"
    small_model().save(path)
    safetensors.numpy.save_file(weights(), path.with_suffix(".safetensors"))
    return path


def expected(runs: int) -> list[dict[str, np.ndarray]]:
    """The outputs of successive runs on PyTorch."""
    state = weights()
    return [npu_runtime.execute_cpu_partition(graph(), {"x": example()}, state) for _ in range(runs)]


def agree(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_buffers_last_from_run_to_run_until_they_are_reset(file: Path) -> None:
    model = npu_runtime.load(file)  # the weights beside the file
    assert isinstance(model, MixedModel)
    wanted = expected(3)
    assert not np.allclose(wanted[0]["y"], wanted[1]["y"])
    for want in wanted:
        agree(model.run({"x": example()}), want)
    model.reset()
    for want in wanted[:2]:
        agree(model.run([example()]), want)


def test_it_is_called_as_any_model(file: Path) -> None:
    wanted = expected(2)
    with npu_runtime.load(file, threads=1) as model:
        assert [t.name for t in model.inputs] == ["x"]
        arrays, tensors = model(example()), model(x=torch.from_numpy(example()))
        assert len(arrays) == 5 and all(isinstance(a, np.ndarray) for a in arrays)
        np.testing.assert_allclose(arrays[0], wanted[0]["y"], rtol=1e-5)
        torch.testing.assert_close(tensors[0], torch.from_numpy(wanted[1]["y"]), rtol=1e-5, atol=1e-6)
        with pytest.raises(InputError, match="got 2 inputs, expected 1"):
            model(example(), example())
        with pytest.raises(InputError, match="'x': shape"):
            model(np.zeros((4, 5), np.float32))
        assert "MixedModel of <MixedProgram small" in repr(model)
    with pytest.raises(BackendError, match="'small' was closed"):
        model(example())


def test_a_profile_leaves_the_buffers_alone(file: Path) -> None:
    model = npu_runtime.load(file)
    assert isinstance(model, MixedModel)
    assert model.profile([example()], runs=2, warmup=1).runs == 2
    agree(model.run([example()]), expected(1)[0])


def test_weights_are_needed_and_checked(file: Path, tmp_path: Path) -> None:
    small_model().save(tmp_path / "alone.npubin")
    with pytest.raises(WeightError, match=r"needs 3 weights: pass them, or put them into .*alone\.safetensors"):
        npu_runtime.load(tmp_path / "alone.npubin")
    with pytest.raises(WeightError, match="'carry'"):
        npu_runtime.load(file, {**weights(), "carry": np.zeros((2, 2), np.float32)})
    agree(npu_runtime.load(tmp_path / "alone.npubin", weights()).run([example()]), expected(1)[0])


def test_the_sources_run_in_place_of_the_binary() -> None:
    model = MixedProgram.loads(npu_compiler.mixed.serialize.dumps(small_model()))
    for program in model.programs.values():
        program.binary = b"\x7fELF garbage"
    agree(npu_runtime.load(model, weights(), from_source=True).run([example()]), expected(1)[0])


def test_without_pytorch_the_error_names_the_ops(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        npu_runtime.load(file)
    message = str(caught.value)
    assert (
        "small runs 2 op(s) on the host, in PyTorch, which is not installed: aten.special_bessel_j0.default, "
        in message
    )
    assert ODD in message and "pip install 'npusim[torch]'" in message and "\n" not in message
    assert npu_compiler.load_program(file).describe(), "it can be described"


def test_ops_that_are_not_allowed_do_not_run() -> None:
    def load(op: str, *, allowed: tuple[str, ...] = ()) -> None:
        plan = npu_compiler.partition(Builder().node("o", op, "x").out("o"), lambda name: False)
        data = npu_compiler.mixed.serialize.dumps(MixedProgram(plan, {}, "cpu", "float32"))
        npu_runtime.load(MixedProgram.loads(data, allowed))

    with pytest.raises(CompileError, match=r"o \(aten.from_file.default\)"):
        load("aten.from_file.default")
    library = torch.library.Library("npusim_mixed", "DEF")
    try:
        library.define("same(Tensor x) -> Tensor")
        with pytest.raises(CompileError, match=r"pass load_ir or npu_runtime.load allowed_ops"):
            load("npusim_mixed.same.default")
        load("npusim_mixed.same.default", allowed=("npusim_mixed.same.default",))
    finally:
        library._destroy()
