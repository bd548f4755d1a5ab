"""Set-up and quick start: what is installed, which machines, the examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from npu_compiler.targets.cuda import devices

from ..models.gate import Expected
from ..support.names_page import ROOT, row_of
from ..support.run_example import run_example


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def extra(name: str) -> set[str]:
    """The packages of an extra, with those of the extras that it includes."""
    found: set[str] = set()
    for requirement in project()["optional-dependencies"][name]:
        if own := re.match(r"npusim\[([\w,-]+)\]", requirement):
            found.update(package for part in own[1].split(",") for package in extra(part))
        else:
            found.add(re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-"))
    return found


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs an example with arguments in this process; (exit status, standard output, standard error)."""
    return partial(run_example, monkeypatch, capsys)


# -- installation -----------------------------------------------------------------------------------------------------


def test_python_and_the_base_packages() -> None:
    assert project()["requires-python"] == ">=3.11"
    base = {re.split(r"[^\w-]", r)[0].replace("_", "-") for r in project()["dependencies"]}
    assert {"numpy", "ml-dtypes", "msgpack", "safetensors"} == base
    assert "pyobjc-framework-metal" in extra("metal") and "pytorch-ir" in extra("test")


def test_row_001_dev_brings_all_that_the_tests_need() -> None:
    """uv sync --extra dev, then uv run pytest tests/ -v and uv run ruff check."""
    assert {"pytest", "torch", "ruff", "transformers", "hypothesis", "pytorch-ir"} <= extra("dev")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert settings["pytest"]["ini_options"]["testpaths"] == ["tests"] and settings["ruff"]["line-length"] == 120


def test_row_003_examples_have_an_extra() -> None:
    assert {"torch", "pillow", "tokenizers"} <= extra("examples")


def test_row_016_benchmarks_have_their_extras_and_one_measures_the_dag_executor() -> None:
    named = re.findall(r"EXTRAS := ([\w,-]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert any("bench" in names for names in named)
    assert {name for names in named for name in names.split(",")} <= set(project()["optional-dependencies"])
    assert "DAGExecutor(" in (ROOT / "benchmarks" / "partitioned.py").read_text(encoding="utf-8")


def test_row_018_the_gate_of_the_tests_holds_on_any_cpu() -> None:
    """Errors with a smaller rms than PyTorch's pass, also if the largest is 1.58 times as large as PyTorch's."""
    rng = np.random.default_rng(0)
    exact, noise = rng.standard_normal((2, 1000)), 1e-6 * rng.standard_normal((2, 1000))
    eager = np.clip(noise, -2.5e-6, 2.5e-6)
    ours = 0.9 * eager
    ours[0, 0] = 1.58 * np.abs(eager).max()
    expected = Expected("float32", [exact], [exact + eager])
    expected.check([exact + ours])
    with pytest.raises(AssertionError, match="exceed what eager's allow"):
        expected.check([exact + 1.5 * noise])


# -- machines ---------------------------------------------------------------------------------------------------------


def test_row_021_windows_by_design() -> None:
    row = row_of("Linux/Windows with NVIDIA GPU")
    row.check()
    assert "does not run on Windows" in row.differs
    assert "npusim does not run on Windows" in (ROOT / "docs" / "setup.md").read_text(encoding="utf-8")
    assert not any("Windows" in c for c in project()["classifiers"])


def test_row_022_oldest_gpus_and_drivers() -> None:
    row_of("Compute Capability 7.0+").check()
    row_of("cupy-cuda12x").check()
    assert devices.DEVICES[0].capability == (8, 0)
    assert "7.0; the oldest that is supported is 8.0" in str(devices.too_old((7, 0)))
    assert "cupy-cuda13x" in extra("cuda") and "cupy-cuda12x" in extra("cuda12")


@pytest.mark.parametrize(
    ("chip", "capability", "units", "arch"),
    [("RTX 3090", (8, 6), 82, "sm_86"), ("A100", (8, 0), 108, "sm_80"), ("H200", (9, 0), 132, "sm_90a")],
)
def test_row_023_programs_are_compiled_for_the_gpu_present(
    monkeypatch: pytest.MonkeyPatch, chip: str, capability: tuple[int, int], units: int, arch: str
) -> None:
    monkeypatch.setattr(devices, "present", lambda: (capability, units))
    device = devices.device_at_hand()
    assert (device.arch, device.compute_units) == (arch, units), chip


# -- examples ---------------------------------------------------------------------------------------------------------


def test_rows_010_and_117_qwen_takes_and_makes_text(example: Callable[..., tuple[int, str, str]]) -> None:
    """Prefill and decode through the partitioner, on the small random model that needs no network."""
    options = "--max-tokens", "4", "--force-cpu-ops", "aten.silu.default"
    status, out, _ = example("run_qwen_graph.py", "--prompt", "Hello", *options)
    assert status == 0 and "\nHello" in out and "qwen_decode: 5 partition(s)" in out
    found = re.search(r"largest logit error (\S+) of the largest logit, 4 of 4 choices agree", out)
    assert found is not None and float(found[1]) < 1e-4, out


def test_row_014_an_example_ends_with_one_line(example: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = example("run_qwen.py", "/nonexistent")
    assert status == 2 and err.startswith("run_qwen.py: error: /nonexistent") and err.count("\n") == 1


def test_row_015_there_is_a_resnet_example(example: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = example("run_resnet.py", "--help")
    assert status == 0 and "five most likely classes" in out and "resnet18" in out
