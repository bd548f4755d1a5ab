"""``npusim describe``: what a .npubin file holds."""

from __future__ import annotations

import argparse

from npu_compiler.mixed.program import load_program

from ..console import Result


def run(args: argparse.Namespace) -> Result:
    """Describe a program or a mixed model as text and as data."""
    program = load_program(args.program)
    return Result({"program": program.to_json()}, [program.describe().rstrip()])
