"""Built models keep the structure of arguments and results, and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.support.errors import CompileError, InputError

from ..support.toy_ir import ODD

torch = pytest.importorskip("torch")
import npusim  # noqa: E402
from npu_runtime import load  # noqa: E402


class Structured(torch.nn.Module):
    """Nested arguments and results, a baked number, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pair: Any, scale: float) -> Any:
        self.calls += 1
        y = self.linear(pair["a"]) * scale
        return {"y": y, "parts": (y + pair["b"], None, self.calls * 1)}


def test_build_keeps_structure_kind_and_state() -> None:
    torch.manual_seed(0)
    net = Structured()
    pair = {"a": torch.randn(2, 4), "b": torch.randn(2, 3)}
    built = npusim.build(net, (pair, 2.0))
    assert net.training and net.calls == 0
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            want, found = net(pair, 2.0), built(pair, 2.0)
            torch.testing.assert_close(found, want)
    as_numpy = built({k: v.numpy() for k, v in pair.items()}, 2.0)
    assert isinstance(as_numpy["y"], np.ndarray) and as_numpy["parts"][1] is None and as_numpy["parts"][2] == 3
    with pytest.raises(InputError, match=r"built for 2\.0"):
        built(pair, 3.0)
    with pytest.raises(InputError, match="structure"):
        built(pair["a"], 2.0)
    assert [p.device for p in built.plan.partitions] == ["npu"]
    assert "(100 %)" in built.report() and "program Structured: " in built.report()


def test_build_saves_what_load_runs(tmp_path: Path) -> None:
    net = torch.torch.nn.Linear(4, 3).to(torch.bfloat16)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    built = npusim.build(net, x)
    path, weights = built.save(tmp_path / "new" / "linear")
    assert (path.name, weights.name) == ("linear.npubin", "linear.safetensors")
    again = load(path, weights)(x)
    assert again.dtype == torch.bfloat16 and torch.equal(again, built(x))
    numpy_in = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    assert built(numpy_in).dtype == ml_dtypes.bfloat16


def test_build_without_fallback(tmp_path: Path) -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j1(x) @ x

    x = torch.rand(4, 4)
    with pytest.raises(CompileError) as caught:
        npusim.build(Mixed(), x, fallback=False)
    assert [op for _, op, _ in caught.value.reasons] == [ODD]
    built = npusim.build(Mixed(), x)
    torch.testing.assert_close(built(x), Mixed()(x))
    assert "host node" in built.report()
    torch.testing.assert_close(load(*built.save(tmp_path / "m.npubin"))(x), Mixed()(x))
