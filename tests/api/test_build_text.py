"""What built models show: representations, tables in notebooks, messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import npu_compiler  # noqa: E402
import npusim  # noqa: E402
from npu_compiler.support.errors import InputError  # noqa: E402
from npu_compiler.support.text import html_table  # noqa: E402

from .modules import Counter, mlp  # noqa: E402


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
        assert "special_bessel_j1" in text and text.count("<table>") == text.count("</table>") >= 1
    assert plan in model._repr_html_() and explanation in model._repr_html_() and "kernels" in model._repr_html_()
    table = html_table(("a", "b"), [("<x>", i) for i in range(7)], most=5)
    assert "<x>" not in table and "&lt;x&gt;" in table and "and 2 more" in table and table.count("<tr>") == 7


def test_lazy_names_are_listed() -> None:
    code = "import npusim, npu_compiler; print(*dir(npusim), *dir(npu_compiler))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"build", "Model", "capture", "partition", "load_ir", "compile"} <= set(names)


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
