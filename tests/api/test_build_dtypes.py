"""The dtype of ``npusim.build``, ``compile`` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.pipeline import run_phases  # noqa: E402
from npu_compiler.support import dtypes  # noqa: E402
from npu_compiler.support.errors import ConfigError  # noqa: E402
from npusim import cli  # noqa: E402

from ..support.toy_ir import HEAVY, RELU, Builder  # noqa: E402


def toy() -> Any:
    return Builder(weights=("w",)).node("r", RELU, "x").node("y", HEAVY, "r", "p_w").out("y")


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
