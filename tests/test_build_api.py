"""``npusim.build`` and what it returns, as a newcomer uses them: dtypes, saving, changed shapes, pickling, repr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npu_runtime  # noqa: E402
import npusim  # noqa: E402
from npu_compiler import dtypes  # noqa: E402
from npu_compiler.errors import ConfigError  # noqa: E402
from npu_compiler.frontend import capture, state_dict_numpy  # noqa: E402
from npu_compiler.pipeline import run_phases  # noqa: E402
from npu_runtime import DAGExecutor  # noqa: E402
from npusim import cli  # noqa: E402

from .toy_ir import HEAVY, RELU, Builder  # noqa: E402


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
    from npu_compiler.ir_reader import save_ir

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
    assert {p.device for p in built.plan.partitions} == {"cpu", "npu"}
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
