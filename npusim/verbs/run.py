"""``npusim run``: a .npubin file on arrays or images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step

from ..arrays import IMAGES, read_inputs, save_npz
from ..classes import read_labels, top_classes
from ..console import Result, Table


def load_program(path: str, weights: str | None, threads: int | None, from_source: bool = False) -> Any:
    """Load a program with its weights, ready to run.

    Args:
        weights: a file; None: the safetensors file beside the program.
        from_source: compile the sources in the file instead of using its binary.

    Raises:
        InputError: the program needs weights and there are none.
        ArtifactError, WeightError: a file is damaged.
    """
    import npu_compiler
    import npu_runtime
    from npu_runtime.model import weights_beside

    program = npu_compiler.load_program(path)
    beside = weights_beside(path)
    if weights is None and program.weights and not beside.exists():
        raise InputError(f"{path} needs {len(program.weights)} weights: pass --weights, or put them into {beside}")
    source = weights or (beside if beside.exists() else None)
    with step(f"loading {path}"):
        return npu_runtime.load(program, source, threads, from_source)


def run(args: argparse.Namespace) -> Result:
    """Run a program once and summarise its outputs; for a classifier, with class names. --output writes all values."""
    if args.output and Path(args.output).suffix in (".npy", *IMAGES):
        raise InputError(f"--output {args.output}: all outputs are written into one archive; call it .npz")
    model = load_program(args.program, args.weights, args.threads, args.from_source)
    outputs: dict[str, np.ndarray] = model.run(read_inputs(args.input, model.inputs, model.program.name))
    header = ("output", "dtype", "shape", "min", "max", "mean")
    blocks: list[str | Table] = [Table(header, list(map(_row, outputs.items())))]
    data: dict[str, Any] = {"program": model.program.name, "outputs": {k: _facts(v) for k, v in outputs.items()}}
    scores = next(iter(outputs.values())) if len(outputs) == 1 else None
    if scores is not None and scores.ndim == 2 and scores.shape[1] == 1000:
        names = read_labels(args.labels, Path(args.program))
        data["top5"] = [top_classes(row, names) for row in scores]
        blocks += [_top_table(rows) for rows in data["top5"]]
        if "weights" in model.program.build:
            blocks.append(f"the weights are {model.program.build['weights']}")
    elif args.labels:
        raise InputError(f"--labels {args.labels}: the results of {args.program} are not scores of 1000 classes")
    if args.output:
        save_npz(args.output, outputs)
        blocks.append(f"wrote {args.output}")
        data["file"] = args.output
    return Result(data, blocks)


def _top_table(rows: list[dict[str, Any]]) -> Table:
    shown = [(f"{r['probability']:.4f}", r["class"], r["name"] or "") for r in rows]
    return Table(("probability", "class", "name"), shown)


def _facts(v: np.ndarray) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": str(v.dtype), "shape": list(v.shape)}
    if v.size and v.dtype.kind != "c":
        wide = v.astype(np.float64)
        numbers = {"min": wide.min(), "max": wide.max(), "mean": wide.mean()}
        facts |= {k: float(n) if np.isfinite(n) else str(n) for k, n in numbers.items()}
    return facts


def _row(item: tuple[str, np.ndarray]) -> tuple[object, ...]:
    name, value = item
    facts = _facts(value)
    numbers = (f"{n:.5g}" if isinstance(n := facts.get(k, ""), float) else n for k in ("min", "max", "mean"))
    return (name, facts["dtype"], facts["shape"], *numbers)
