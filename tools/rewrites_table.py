"""The table of rewrites in docs/passes.md, from the declarations of the rewrites:

    python tools/rewrites_table.py         writes what is between <!-- rewrites --> and <!-- /rewrites -->

The rows of docs/passes.ko.md are written by hand, in the same order.
"""

from __future__ import annotations

from pathlib import Path

from npu_compiler.schedule.rewrite import ScheduleRewrite
from npu_compiler.targets import get_target

PAGE = Path(__file__).resolve().parent.parent / "docs" / "passes.md"
TARGETS = ("cpu", "cuda", "metal")
START, END = "<!-- rewrites -->\n", "\n<!-- /rewrites -->"


def table() -> str:
    """Return the rewrites of all targets, in the order in which each target applies its own."""
    found: dict[str, tuple[ScheduleRewrite, list[str]]] = {}
    for target in TARGETS:
        for rewrite in get_target(target).rewrites:
            found.setdefault(rewrite.name, (rewrite, []))[1].append(target)
    rows = ["| rewrite | targets | what it does |", "|---|---|---|"]
    for rewrite, targets in found.values():
        where = "all" if len(targets) == len(TARGETS) else ", ".join(targets)
        rows.append(f"| `{rewrite.name}` | {where} | {rewrite.summary}{' (mandatory)' if rewrite.required else ''} |")
    return "\n".join(rows)


def main() -> None:
    """Write the table into the page."""
    head, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(head + START + table() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
