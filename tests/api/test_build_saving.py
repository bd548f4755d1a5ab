"""Saving built models, and loading weights into them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_runtime  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.support.errors import InputError, WeightError  # noqa: E402
from npu_compiler.weights.files import open_weights  # noqa: E402

from .modules import mlp  # noqa: E402


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
        return x * torch.special.bessel_j1(x.sum())


def test_scalars_pass_between_partitions() -> None:
    x = torch.randn(4, 4).abs() / 8
    built = npusim.build(ScalarBetween(), (x,))
    assert {p.device for p in built.plan.partitions} == {"host", "npu"}
    torch.testing.assert_close(built(x), ScalarBetween()(x))


def test_save_writes_the_program_of_the_example(tmp_path: Path) -> None:
    model = mlp()
    built = npusim.build(model, (torch.zeros(1, 8),))
    x = torch.randn(1, 8)
    built(x.expand(5, 8))
    loaded = npu_runtime.load(*built.save(tmp_path / "m"))
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)


def test_weights_loaded_from_a_file_are_those_that_are_saved(tmp_path: Path) -> None:
    built, other = npusim.build(mlp(), (torch.zeros(1, 8),)), npusim.build(mlp(), (torch.zeros(1, 8),))
    other.load_weights({k: 2 * v for k, v in mlp().state_dict().items()})
    built.load_weights(other.save(tmp_path / "other")[1])
    x = torch.randn(1, 8)
    assert torch.equal(npu_runtime.load(*built.save(tmp_path / "built"))(x), other(x))
    assert torch.equal(built(x), other(x))


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
