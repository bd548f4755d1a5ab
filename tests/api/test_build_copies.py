"""Pickles and deep copies of built models, programs and expressions."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npu_runtime  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.artifact.serialize import dumps  # noqa: E402
from npu_compiler.graph import expr  # noqa: E402
from npu_compiler.support.errors import InputError  # noqa: E402

from .modules import Counter, Counting, Nested, mlp  # noqa: E402

ANOTHER_PROCESS = """
import pickle, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    model, inputs = pickle.load(file)
np.savez(sys.argv[2], *[model(x) for x in inputs])
"""


def in_another_process(model: Any, inputs: list[np.ndarray], folder: Path) -> list[np.ndarray]:
    """The results of a pickled model where neither this file nor the model's class can be imported."""
    (folder / "model.pickle").write_bytes(pickle.dumps((model, inputs)))
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(folder / "model.pickle"), str(folder / "results.npz")]
    environment = {**os.environ, "PYTHONPATH": str(Path(npusim.__file__).parents[1])}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    with np.load(folder / "results.npz") as file:
        return [file[f"arr_{i}"] for i in range(len(inputs))]


@pytest.mark.parametrize("model", [Counting, Counter])
def test_a_pickled_model_goes_on_in_another_process(model: type[nn.Module], tmp_path: Path) -> None:
    eager = model()
    built = npusim.build(eager, (torch.zeros(2, 64),))
    inputs = [np.random.default_rng(n).random((n, 64), np.float32) for n in (2, 3, 2)]
    for x in inputs:
        eager(torch.from_numpy(x)), built(x)
    results = in_another_process(built, inputs, tmp_path)
    for x, got in zip(inputs, results, strict=True):
        np.testing.assert_allclose(got, eager(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_an_unpickled_model_keeps_its_shapes_and_can_be_saved(tmp_path: Path) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    built(torch.zeros(2, 8))
    again = pickle.loads(pickle.dumps(built))
    assert again.shapes == built.shapes and again.plan.describe() == built.plan.describe()
    with pytest.raises(InputError, match="a pickled model does not have the module"):
        again(torch.zeros(3, 8))
    x = torch.randn(2, 8)
    torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-6)
    loaded = npu_runtime.load(*again.save(tmp_path / "m"))
    torch.testing.assert_close(loaded(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-6)
    again.load_weights({k: 2 * v for k, v in model.state_dict().items()})
    assert not torch.equal(again(x), built(x))


def test_pickled_structures_of_arguments_and_results() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    built = pickle.loads(pickle.dumps(npusim.build(Nested(), (x,), example_kwargs={"more": {"y": y}, "scale": 2.0})))
    torch.testing.assert_close(built(x, more={"y": y}, scale=2.0), Nested()(x, {"y": y}, 2.0))


def test_a_copied_model_has_buffers_of_its_own() -> None:
    eager = Counting()
    built = npusim.build(eager, (torch.zeros(1, 64),))
    x = torch.rand(2, 64)
    built(x)
    copied = copy.deepcopy(built)
    results = [m(x) for m in (built, built, copied, copied)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])
    stores = [m.executor.executors[0].weights for m in (built, copied)]
    assert stores[0] is stores[1]
    copied(torch.rand(5, 64))
    assert [(5, 64)] in copied.shapes and [(5, 64)] not in built.shapes


def test_programs_and_loaded_models_are_pickled_and_copied(tmp_path: Path) -> None:
    eager = Counting()
    files = npusim.build(eager, (torch.zeros(2, 64),)).save(tmp_path / "m")
    program = npu_compiler.CompiledProgram.load(files[0])
    for copied in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert dumps(copied) == dumps(program)
    model = npu_runtime.load(*files, threads=1)
    x = np.ones((2, 64), np.float32)
    model(x)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    wanted = model(x)
    for twin in twins:
        assert twin.backend.threads == 1
        np.testing.assert_array_equal(twin(x), wanted)
    np.testing.assert_array_equal(in_another_process(twins[0], [x], tmp_path)[0], model(x))


def test_copied_expressions_stay_interned() -> None:
    e = expr.load(0, "float32", [expr.index(0)]) * 2.0 + 1.0
    assert copy.deepcopy(e) is e and pickle.loads(pickle.dumps(e)) is e
