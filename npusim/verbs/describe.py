"""``npusim describe``: what a .npubin file or the checkpoint of a language model holds."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from npu_compiler.frontend.llm import Checkpoint, open_checkpoint
from npu_compiler.mixed.program import MixedProgram, load_program
from npu_compiler.support.errors import InputError
from npu_compiler.support.text import si

from ..console import Result, Table
from ..launch_counts import LaunchCounts, launch_counts


def run(args: argparse.Namespace) -> Result:
    """Describe a program, a mixed model or a checkpoint as text and as data, or count what a program's runs cost."""
    path = Path(args.program)
    if path.is_dir() or path.suffix == ".gguf":
        if args.counts:
            raise InputError(f"{path}: --counts counts the runs of a program; compile the model first")
        return _checkpoint(open_checkpoint(path))
    program = load_program(args.program)
    if not args.counts:
        return Result({"program": program.to_json()}, [program.describe().rstrip()])
    parts = program.programs if isinstance(program, MixedProgram) else {None: program}
    found = {
        name if partition is None else f"partition {partition}: {name}": counts
        for partition, part in parts.items()
        for name, counts in launch_counts(part).items()
    }
    return Result({"counts": {name: asdict(c) for name, c in found.items()}}, [_table(found)])


def _checkpoint(checkpoint: Checkpoint) -> Result:
    c, held = checkpoint.config, checkpoint.weights.bytes_by_format()
    sizes = ", ".join(f"{name} {si(size, 'B')}" for name, size in held.items())
    lines = [
        f"checkpoint {checkpoint.path.name}: {c.model_type}, {c.num_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads ({c.num_kv_heads} of keys and values), vocabulary {c.vocab_size}, "
        f"context {c.max_position_embeddings}, computes in {c.dtype}",
        f"weights by format: {sizes}",
    ]
    return Result({"checkpoint": {"config": asdict(c), "bytes_by_format": held}}, [*lines])


def _table(found: dict[str, LaunchCounts]) -> Table:
    header = ("entry", "launches", "barriers", "reads", "writes", "shared memory of a workgroup")
    rows = [
        (name, c.launches, c.barriers, si(c.bytes_read, "B"), si(c.bytes_written, "B"),
         "-" if c.shared_bytes is None else si(c.shared_bytes, "B"))
        for name, c in found.items()
    ]  # fmt: skip
    return Table(header, rows)
