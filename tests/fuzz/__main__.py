"""``python -m tests.fuzz KIND [KIND …]``: many cases in worker processes, or one again. ``all`` is every kind."""

from __future__ import annotations

import argparse
import sys

from . import harness


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="+", metavar="KIND", help=", ".join([*harness.kinds(), "all"]))
    parser.add_argument("--cases", type=int, default=2000, help="of each kind (default: 2000)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run only this one, here, and show its exception")
    parser.add_argument("--details", action="store_true", help="show the traceback of each cause's first case")
    args = parser.parse_args()
    names = harness.kinds() if "all" in args.kinds else args.kinds
    if args.case is not None:
        harness.run_case(names[0], args.seed, args.case)
        return 0
    failed = False
    for name in names:
        report = harness.run_in_workers(name, args.seed, args.cases, args.jobs, harness.show_progress)
        print(f"\r{report}", flush=True)
        if args.details:
            for failure in {f.where: f for f in reversed(report.failures)}.values():
                print(f"\n{failure.replay}\n{failure.detail}")
        failed |= bool(report.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
