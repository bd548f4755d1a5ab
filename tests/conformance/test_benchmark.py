"""benchmarks/ops.py: samples grow to calls that PyTorch and the compiler accept, and a short run has results."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_compiler.ops import REGISTRY

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_GROWN = {  # without results, with empty or undefined ones, or whose numbers do not grow together
    "_assert_async.default", "_assert_async.msg", "_assert_tensor_metadata.default", "empty.memory_format",
    "empty_like.default", "empty_permuted.default", "empty_strided.default", "new_empty.default",
    "reshape_as.default", "scalar_tensor.default", "view_as.default",
}  # fmt: skip


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("ops")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def grown(ops: Any) -> list[Any]:
    return list(ops.grown_cases("*", "float32", {"small": 4 << 10}))


def test_every_declaration_grows(grown: list[Any]) -> None:
    covered = {name for case in grown for name in (case.op_type, *case.aliases)}
    assert {name.removeprefix("aten.") for name in REGISTRY.keys() - covered} == NOT_GROWN


def test_groups_keep_what_belongs_together(grown: list[Any]) -> None:
    def shapes(op: str, number: int = 0) -> list[Any]:
        (case,) = [c for c in grown if c.op_type == f"aten.{op}" and c.number == number]
        return [x.shape if hasattr(x, "shape") else x for x in case.sample.args]

    (rows, inner), (inner_too, columns) = shapes("mm.default")
    assert inner == inner_too and min(rows, inner, columns) >= 8
    x, normalized, weight, bias = shapes("layer_norm.default")
    assert [x[-1]] == normalized and weight == bias == (x[-1],)
    x, weight, bias, *_, groups = shapes("conv2d.default", 1)
    assert (
        x[1] == groups * weight[1]
        and weight[0] == bias[0]
        and weight[2:] == REGISTRY["aten.conv2d.default"].samples[1].args[1].shape[2:]
    )
    table, index = next(c for c in grown if c.op_type == "aten.embedding.default").sample.args
    assert index.high == table.shape[0] > 5


@pytest.mark.parametrize("op", ["sort.default", "argsort.default", "topk.default", "kthvalue.default"])
def test_any_order_of_equal_elements_is_right_and_no_other(ops: Any, op: str) -> None:
    """Many numbers of 16 bits are equal. A position twice, of another number or outside is wrong, and so is another
    order than that of a stable op."""
    (case,) = [c for c in ops.grown_cases(op, "bfloat16", {"small": 4 << 10}) if c.number == 0]
    x, attrs = case.encoded[0][0].float(), case.encoded[1]
    if op == "kthvalue.default":
        at = (x == case.eager[0].float()[:, None]).int().argmax(1)
        results = [case.eager[0], at]
    else:
        order = torch.sort(x.flip(1), dim=1, stable=True, descending=op == "topk.default").indices
        at = x.shape[1] - 1 - order[:, : attrs.get("k", x.shape[1])]
        results = [*case.eager[:-1], at]
    arrays = [ops.to_numpy(t) for t in results]
    assert not ops.verdict(case, arrays, False)
    wrong = arrays[-1].copy()
    wrong.flat[0] = int((x[0] != x[0, wrong.flat[0]]).int().argmax())
    assert ops.verdict(case, [*arrays[:-1], wrong], False)
    assert ops.verdict(case, [*arrays[:-1], arrays[-1] - x.shape[1]], False)


def test_short_run(ops: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ops.json"
    arguments = ["--ops", "s*max.int", "--quick", "--json", str(path)]
    assert ops.main(arguments) == 0
    stored = json.loads(path.read_text())
    assert {(r["op"], r["size"]) for r in stored["rows"]} == {("aten.softmax.int", s) for s in ("small", "cache")}
    assert all(0 < r["ours_min"] <= r["ours"] and not r["wrong"] and math.isfinite(r["ratio"]) for r in stored["rows"])
    assert "0 wrong" in capsys.readouterr().out
    assert ops.main(["--table", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("softmax.int float32") == len(stored["rows"])


def test_gate(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = importlib.import_module("ops_results")
    figure = ops.Figure("aten.x", [], "f", "S()", "float32", "small", 1, 2.0, 1.0, 2.0, 1.0, 2.0, "")
    assert figure.too_slow("cpu")
    monkeypatch.setattr(results, "SLOWER", [results.Guarantee("cpu", ("y", "x*"), "float32", "the order is fixed")])
    figure.slower_because = ops.guarantee("cpu", "aten.x", "float32")
    assert figure.slower_because and not figure.too_slow("cpu")
    assert not ops.guarantee("cuda", "aten.x", "float32") and not ops.guarantee("cpu", "aten.x", "float16")


def part(*rows: tuple[str, float], **changed: Any) -> dict[str, Any]:
    """Stored results with figures of (op, ratio)."""
    seconds = {"ours": 2e-6, "eager": 1e-6, "ours_min": 2e-6, "eager_min": 1e-6}
    call = {"aliases": [], "family": "f", "sample": "S()", "dtype": "float32", "size": "small", "kernels": 1}
    figure = {**call, **seconds, "wrong": "", "slower_because": ""}
    return {
        "hardware": "a CPU", "target": "cpu", "threads": 1, "float32_precision": "highest", "date": "2026-01-02",
        "versions": {"torch": "2.0"}, "sizes": {"small": 4096}, "not_measured": {"aten.a.b-0-float32-small": "no time"},
        "rows": [{**figure, "op": op, "ratio": ratio} for op, ratio in rows], **changed,
    }  # fmt: skip


def test_parts_of_a_run_are_merged_and_become_tables(ops: Any) -> None:
    results = importlib.import_module("ops_results")
    whole = results.merged([part(("aten.c.d", 3.0)), part(("aten.a.b", 2.0), ("aten.c.d", 0.5))])
    assert [(r["op"], r["ratio"]) for r in whole["rows"]] == [("aten.a.b", 2.0), ("aten.c.d", 0.5)]
    assert not whole["not_measured"]
    with pytest.raises(ValueError, match="differ in 'hardware'"):
        results.merged([part(), part(hardware="another CPU")])
    text = results.section([whole])
    assert "| a CPU | float32 | 2 | 1.00 | 50% | 1 | 0 |" in text
    assert "| a CPU | `a.b` | float32 | small | 2.0 µs | 1.0 µs | 2.00 |" in text
    assert "기하 평균" in importlib.import_module("korean").korean(text)
