"""``npusim describe``: what a .npubin file holds."""

from __future__ import annotations

import argparse

from npu_compiler.artifact.program import CompiledProgram

from ..console import Result, Status


def run(args: argparse.Namespace, status: Status) -> Result:
    """Describe a program as text and as data."""
    program = CompiledProgram.load(args.program)
    return Result({"program": program.to_json()}, [program.describe().rstrip()])
