"""``npusim describe``: what a .npubin file holds."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from npu_compiler.mixed.program import MixedProgram, load_program
from npu_compiler.support.text import si

from ..console import Result, Table
from ..launch_counts import LaunchCounts, launch_counts


def run(args: argparse.Namespace) -> Result:
    """Describe a program or a mixed model as text and as data, or count what its runs cost."""
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


def _table(found: dict[str, LaunchCounts]) -> Table:
    header = ("entry", "launches", "barriers", "reads", "writes", "shared memory of a workgroup")
    rows = [
        (name, c.launches, c.barriers, si(c.bytes_read, "B"), si(c.bytes_written, "B"),
         "-" if c.shared_bytes is None else si(c.shared_bytes, "B"))
        for name, c in found.items()
    ]  # fmt: skip
    return Table(header, rows)
