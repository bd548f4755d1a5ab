"""Every example runs offline, on its small random model or on random weights, and agrees with PyTorch.

``run_qwen_graph.py`` runs in ``tests/promises/test_quick_start.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..support.run_example import EXAMPLES, run_example

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

Example = Callable[..., tuple[str, str]]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs an example that must end with ``code``; (standard output, standard error)."""

    def run(name: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        status, out, err = run_example(monkeypatch, capsys, name, *arguments)
        assert status == code, (out, err)
        return out, err

    return run


def agrees(output: str) -> bool:
    """Whether the logits are PyTorch's, but for rounding."""
    found = re.search(r"largest logit error (\S+) of the largest logit, (\d+) of (\d+) choices agree", output)
    assert found is not None, output
    return float(found[1]) < 1e-4 and found[2] == found[3]


def test_every_example_is_tested() -> None:
    names = [p.name for p in EXAMPLES.glob("*.py") if "__main__" in p.read_text()]
    assert len(names) >= 4
    for name in names:
        assert f'"{name}"' in Path(__file__).read_text(), name


def test_run_qwen(example: Example) -> None:
    out, _ = example("run_qwen.py", "--max-tokens", "5", "--max-len", "40", "--prompt", "Hello")
    assert "random weights" in out and "\nHello" in out and agrees(out)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("run_qwen.py", ["/nonexistent"], "/nonexistent: there is no such file or directory"),
        ("run_qwen_graph.py", ["/nonexistent"], "/nonexistent: there is no such file or directory"),
        ("run_qwen_graph.py", ["--prompt", ""], "the prompt has no tokens"),
        ("extract_qwen_ir.py", ["--output", "/dev/null/ir"], "Not a directory"),
        ("run_resnet.py", ["/nonexistent.png", "--model", "resnet18"], "/nonexistent.png: cannot be read"),
    ],
)
def test_an_error_is_one_line(example: Example, name: str, arguments: list[str], message: str) -> None:
    _, err = example(name, *arguments, code=2)
    assert err.startswith(f"{name}: error: ") and message in err and err.count("\n") == 1


def test_run_resnet(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are named as such; without network, classes have no names."""
    from npusim.models import weights
    from npusim.models.download import RegistryUnavailable

    def offline(*args: object) -> Path:
        raise RegistryUnavailable("there is no network")

    monkeypatch.setattr(weights, "fetch", offline)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 80, 3), np.uint8)).save(tmp_path / "image.png")
    out, _ = example("run_resnet.py", str(tmp_path / "image.png"), "--model", "resnet18")
    rows = re.findall(r"^(0\.\d{4}) +(0\.\d{4}) +\d+ *$", out, re.MULTILINE)
    assert len(rows) == 5 and all(abs(float(ours) - float(torch)) <= 1e-4 for ours, torch in rows)
    assert "1 NPU and 0 host partition(s)" in out
    assert "the classes have no names: there is no network" in out and "the weights are random" in out


def test_extracted_ir_fits_together(example: Example, tmp_path: Path) -> None:
    from npu_compiler.aten.json_reader import load_ir
    from npu_compiler.frontend.kv_state import loop_carried

    example("extract_qwen_ir.py", "--output", str(tmp_path), "--prompt-len", "6", "--max-len", "20")
    prefill, decode = load_ir(tmp_path / "qwen_prefill.json"), load_ir(tmp_path / "qwen_decode.json")
    mapping = json.loads((tmp_path / "qwen_kv_mapping.json").read_text())
    made = dict(zip(prefill.output_names(), (t.shape for t in prefill.graph_outputs), strict=True))
    taken = {t.name: t.shape for t in decode.graph_inputs}
    given = dict(zip(decode.output_names(), (t.shape for t in decode.graph_outputs), strict=True))
    assert len(mapping["layers"]) == 2
    pairs = {x[f"decode_{k}_input"]: x[f"decode_{k}_output"] for x in mapping["layers"] for k in ("key", "value")}
    assert loop_carried(decode) == pairs
    for layer in mapping["layers"]:
        for kind in ("key", "value"):
            assert made[layer[f"prefill_{kind}_output"]] == (1, 2, 6, 16)
            assert taken[layer[f"decode_{kind}_input"]] == given[layer[f"decode_{kind}_output"]] == (1, 2, 20, 16)


def test_the_benchmark_of_the_dag_executor(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans leave nothing, one op, every activation to the host, and all of them pass the error gate."""
    import torch

    from npu_compiler.frontend import capture, state_dict_numpy

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 8, 8), torch.nn.ReLU(True), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(4 * 14 * 14, 10), torch.nn.ReLU(True)).eval()
    ir = capture(net, (torch.zeros(1, 3, 224, 224),), name="small")
    monkeypatch.setattr("npusim.builtin.captured", lambda name, batch: (net, ir, state_dict_numpy(net)))
    out, _ = example("../benchmarks/partitioned.py", "--models", "resnet18", "--seconds", "0.01", "--threads", "1")
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["all on the NPU", "max_pool2d on the host", "relu on the host", "torch eager"]
    assert [row[2:4] for row in rows[:3]] == [["1", "0"], ["3", "2"], ["4", "3"]] and "✗" not in out
