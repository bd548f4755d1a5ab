"""Every example of language models runs on its small random model, and agrees with PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *filter(None, sys.path)])}
    command = [sys.executable, str(EXAMPLES / name), "--tiny", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return done.stdout


def agrees(output: str) -> bool:
    """Whether the logits are PyTorch's, but for rounding."""
    found = re.search(r"largest logit error (\S+) of the largest logit, (\d+) of (\d+) choices agree", output)
    assert found is not None, output
    return float(found[1]) < 1e-4 and found[2] == found[3]


def test_every_example_is_in_the_readme_and_tested() -> None:
    readme, tests = (EXAMPLES.parent / "README.md").read_text(), Path(__file__).read_text()
    names = [p.name for p in EXAMPLES.glob("*.py") if "def main()" in p.read_text()]
    assert len(names) >= 3
    for name in names:
        assert f"examples/{name}" in readme and f'"{name}"' in tests, name


def test_run_qwen() -> None:
    assert agrees(run("run_qwen.py", "--max-tokens", "5", "--max-len", "40"))


def test_run_qwen_graph() -> None:
    output = run("run_qwen_graph.py", "--max-tokens", "4", "--force-cpu-ops", "aten.silu.default")
    assert agrees(output) and "5 partition(s)" in output


def test_extracted_ir_fits_together(tmp_path: Path) -> None:
    from npu_compiler.aten.json_reader import load_ir
    from npu_compiler.aten.kv_state import loop_carried

    run("extract_qwen_ir.py", "--output", str(tmp_path), "--prompt-len", "6", "--max-len", "20")
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
