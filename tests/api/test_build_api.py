"""``npusim.build`` and what it returns, as a newcomer uses them: dtypes, saving, changed shapes, pickling, repr."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npu_compiler.frontend.export  # noqa: E402
import npu_runtime  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.artifact.serialize import dumps  # noqa: E402
from npu_compiler.frontend import capture, state_dict_numpy  # noqa: E402
from npu_compiler.graph import expr  # noqa: E402
from npu_compiler.pipeline import run_phases  # noqa: E402
from npu_compiler.support import dtypes  # noqa: E402
from npu_compiler.support.errors import ConfigError, InputError, WeightError  # noqa: E402
from npu_compiler.support.text import html_table  # noqa: E402
from npu_compiler.weights.files import open_weights  # noqa: E402
from npu_runtime import DAGExecutor  # noqa: E402
from npusim import cli  # noqa: E402

from ..support.toy_ir import HEAVY, RELU, Builder  # noqa: E402


def toy() -> Any:
    return Builder(weights=("w",)).node("r", RELU, "x").node("y", HEAVY, "r", "p_w").out("y")


# --------------------------------------------------------------------------------------------------------------- dtype


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("fp16", "float16"),
        ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("torch.float16", "float16"),
        (torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.half, "float16"),
        (np.float16, "float16"), (np.dtype(np.float32), "float32"), (ml_dtypes.bfloat16, "bfloat16"),
    ],
)  # fmt: skip
def test_storage_dtypes_have_many_spellings(given: Any, name: str) -> None:
    assert dtypes.storage_dtype(given) == name
    assert run_phases(toy(), "cpu", given, until="lower").dtype == name


@pytest.mark.parametrize("given", ["int8", "bool", "int32", "float64", "complex64", "fp8", "", torch.int8, np.int32])
def test_no_other_dtype_is_taken(given: Any) -> None:
    calls = [
        lambda: npu_compiler.compile(toy(), dtype=given),
        lambda: run_phases(toy(), "cpu", given),
        lambda: npusim.build(nn.Linear(4, 4), (torch.zeros(1, 4),), dtype=given),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="float32, float16, bfloat16 only"):
            call()


def test_the_command_line_takes_the_same_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "toy.json", tmp_path / "toy.npubin"
    from npu_compiler.aten.json_writer import save_ir

    save_ir(toy(), path)
    assert cli.main(["compile", str(path), "-o", str(out), "--dtype", "bf16"]) == 0
    assert npu_compiler.CompiledProgram.load(out).dtype == "bfloat16"
    with pytest.raises(SystemExit) as stop:
        cli.main(["compile", str(path), "--dtype", "int8"])
    assert stop.value.code == 1 and "float32, float16, bfloat16 only" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- save


class Scalars(nn.Module):
    """A 0-dim weight, and a 0-dim buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("calls", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.logit_scale.exp() + self.calls


def test_saved_scalars_load_again(tmp_path: Path) -> None:
    model, x = Scalars(), torch.randn(2, 3)
    built = npusim.build(model, (x,))
    program, weights = built.save(tmp_path / "scalars")
    loaded = npu_runtime.load(program, weights)
    for _ in range(2):
        np.testing.assert_array_equal(loaded(x.numpy()), built(x.numpy()))
    torch.testing.assert_close(torch.from_numpy(loaded(x.numpy())), x * model.logit_scale.exp() + 6)


class ScalarBetween(nn.Module):
    """A 0-dim value that PyTorch computes and the NPU reads, and the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.special.i1(x.sum())


def test_scalars_pass_between_partitions() -> None:
    x = torch.randn(4, 4).abs() / 8
    built = npusim.build(ScalarBetween(), (x,))
    assert {p.device for p in built.plan.partitions} == {"host", "npu"}
    torch.testing.assert_close(built(x), ScalarBetween()(x))


# ---------------------------------------------------------------------------------------------------- changed shapes


class Counting(nn.Module):
    """An MLP that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(torch.relu(self.up(x))) + self.calls


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


class Counter(nn.Module):
    """As :class:`Counting`, with an op that the NPU lacks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.special.i1(x.relu() + self.calls) * 2


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


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


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


class Nested(nn.Module):
    """Arguments by keyword and nested; the length of the result depends on a shape."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        return list((x + more["y"]).mul(scale).unbind(0))


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


def test_weights_loaded_from_a_file_are_those_that_are_saved(tmp_path: Path) -> None:
    built, other = npusim.build(mlp(), (torch.zeros(1, 8),)), npusim.build(mlp(), (torch.zeros(1, 8),))
    other.load_weights({k: 2 * v for k, v in mlp().state_dict().items()})
    built.load_weights(other.save(tmp_path / "other")[1])
    x = torch.randn(1, 8)
    assert torch.equal(npu_runtime.load(*built.save(tmp_path / "built"))(x), other(x))
    assert torch.equal(built(x), other(x))


def test_loaded_weights_reset_buffers_of_all_shapes() -> None:
    eager = Counting()
    start = {k: v.clone() for k, v in eager.state_dict().items()}
    built = npusim.build(eager, (torch.zeros(1, 64),))
    x = torch.rand(2, 64)
    first = built(x)
    built(x[:1])
    built.load_weights(start)
    torch.testing.assert_close(built(x), first)


def test_weights_that_changed_after_build_are_not_mixed_with_those_before(tmp_path: Path) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    x = torch.randn(1, 8)
    before = built(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(built(x), before)
    with pytest.raises(InputError, match=r"'0\.weight' of the module changed after build"):
        built(torch.zeros(2, 8))
    with pytest.raises(InputError, match=r"load_weights\(module\.state_dict\(\)\)"):
        built.save(tmp_path / "m")
    built.load_weights(model.state_dict())
    for n in (1, 2):
        torch.testing.assert_close(built(x.expand(n, 8)), model(x.expand(n, 8)), rtol=1e-5, atol=1e-6)


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


def test_save_writes_the_program_of_the_example(tmp_path: Path) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    x = torch.randn(1, 8)
    built(x.expand(5, 8))
    loaded = npu_runtime.load(*built.save(tmp_path / "m"))
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- pickle and deepcopy

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


# ------------------------------------------------------------------------------------------------- in a notebook


def test_representations_are_short() -> None:
    model = npusim.build(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), (torch.zeros(1, 8),))
    model(torch.zeros(2, 8))
    assert repr(model) == (
        "<npusim.Model Sequential: 1 NPU and 0 host partition(s), 0 transfer(s), 0 bytes, on cpu; "
        "inputs input float32[1, 8]; 2 programs by shape>"
    )
    (program,) = model.programs
    explanation = npu_compiler.explain(model.plan.ir)
    for thing in (model.plan, model.plan.partitions, model.plan.ir, program, explanation):
        assert (10 < len(repr(thing)) < 200 and "Sequential" in repr(thing)) or "Partition 0 on npu" in repr(thing)


def test_notebooks_get_tables() -> None:
    model = npusim.build(Counter(), (torch.zeros(1, 4),))
    plan, explanation = model.plan._repr_html_(), npu_compiler.explain(model.plan.ir)._repr_html_()
    for text in (plan, explanation):
        assert "special_i1" in text and text.count("<table>") == text.count("</table>") >= 1
    assert plan in model._repr_html_() and explanation in model._repr_html_() and "kernels" in model._repr_html_()
    table = html_table(("a", "b"), [("<x>", i) for i in range(7)], most=5)
    assert "<x>" not in table and "&lt;x&gt;" in table and "and 2 more" in table and table.count("<tr>") == 7


def test_lazy_names_are_listed() -> None:
    code = "import npusim, npu_compiler; print(*dir(npusim), *dir(npu_compiler))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"build", "Model", "capture", "partition", "load_ir", "compile"} <= set(names)


# ------------------------------------------------------------------------------------------------------------ messages


def test_wrong_arguments_are_shown_briefly(tmp_path: Path) -> None:
    built = npusim.build(mlp(), (torch.zeros(1, 8),))
    deep: Any = [[[[0.123456789] * 50] * 50] * 50] * 50
    endless: Any = []
    endless.append(endless)
    for wrong in (deep, {str(i): deep for i in range(50)}, [torch.zeros(2, 3)] * 9, endless):
        with pytest.raises(InputError, match=r"'input'.*float32\[1, 8\]") as raised:
            built(wrong)
        assert len(str(raised.value)) < 500
    with pytest.raises(InputError, match=r"\[float32\[2, 3\], "):
        built([torch.zeros(2, 3)] * 2)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_of_weights_is_named_as_one(tmp_path: Path, old: bool) -> None:
    model, path = mlp(), tmp_path / "weights.pt"
    built = npusim.build(model, (torch.zeros(1, 8),))
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not old)
    with pytest.raises(WeightError, match=r"is a pickle as torch\.save writes it") as raised:
        built.load_weights(path)
    command = str(raised.value).split("convert it once: ")[1]
    exec(f"import torch, safetensors.torch; {command}")
    built.load_weights(path.with_suffix(".safetensors"))
    x = torch.randn(1, 8)
    torch.testing.assert_close(built(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_header_as_long_as_a_pickles_first_bytes_is_read(tmp_path: Path) -> None:
    import safetensors.numpy

    path = tmp_path / "w.safetensors"
    data = safetensors.numpy.save({"w": np.ones(4, np.float32)})
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].ljust(0x280)  # 80 02 00 …: protocol 2 of pickle begins with the same two bytes
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    assert open_weights(path).read("w").tolist() == [1, 1, 1, 1]


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
