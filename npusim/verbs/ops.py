"""``npusim ops``: the native operators."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from npu_compiler.support.errors import NPUError

from ..console import Result, Table


def run(args: argparse.Namespace) -> Result:
    """Show the table of native operators, whole or filtered by a pattern."""
    from npu_compiler.ops.table import operators as native
    from npu_compiler.ops.table import operators_markdown

    if args.markdown and args.pattern:
        raise NPUError("--markdown writes the whole page; leave out the pattern")
    if args.markdown:
        return Result({"markdown": operators_markdown()}, [operators_markdown().rstrip()])
    rows = [r for r in native() if args.pattern in r.op_type]
    cells = [(r.op_type, r.family, " ".join(r.dtypes), r.samples, r.doc) for r in rows]
    table = Table(("op", "family", "tested dtypes", "samples", "what it computes"), cells)
    data = {"count": len(rows), "ops": [asdict(r) for r in rows]}
    return Result(data, [table, "", f"{len(rows)} native overloads"])
