"""The data of a profile, which --compare reads: its bytes and its fields. Whatever is accepted has all views."""

from __future__ import annotations

import json
import random
from pathlib import Path

from npusim.profiling import compare
from npusim.profiling.records import Arena, Block, Held, KernelError, Limits, NotOnNPU, Place, Row, Section
from npusim.profiling.report import ProfileReport, read_report

from ..mutations import mutate_bytes, mutate_tree

_PLACE = Place("layers.0", "Linear", "a.py:1")
_ROWS = tuple(
    Row(n, f"k{n}", "npu", "gemm", 0, 1e-5, 1e-5, 0.0, 1e-5, 10, 20, 30, 1e-6, "memory", "float32", ("x",), ("y",),
        (f"op{n}",), (_PLACE,), "acc", "", (0,) if n else (), None, KernelError(1e-7, 1e-6))
    for n in range(2)
)  # fmt: skip
_ARENA = Arena("m", 512, (Block("b", "float32[2]", 0, 8, 0, 1),), 0, 8, (0,), (0, 1))
_REPORT = ProfileReport(
    "m", "cpu", "cpu:avx2", "a CPU", "float32", "1", "2026", (Section("main", "m", 3, 2e-5, 2e-5, _ROWS, (_ARENA,)),),
    (Held("w", "weight", "float32[2]", 8),), Limits({"float32": 1e11}, ((1e6, 2e10),), 1e10, "made up"),
    (NotOnNPU("n", "aten.x.default", "no lowering", "", (_PLACE,)),), ("note",),
)  # fmt: skip


def case(rng: random.Random, folder: Path) -> None:
    text, path = json.dumps(_REPORT.to_json()), folder / "profile.json"
    if rng.random() < 0.2:
        data = mutate_bytes(rng, text.encode())
    else:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_tree(rng, tree, (1, 0.5, "x", None, [1, 2], {"name": "x"}))
        data = json.dumps(tree).encode()
    path.write_bytes(data)
    report = read_report(path)
    compare.annotated(report, compare.compare(report, report))
    report.table()
    for view in ("html", "json", "trace", "model-explorer"):
        report.save(folder / "view", view)
