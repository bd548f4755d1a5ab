"""Results of benchmarks/ops.py: a figure, the guarantees that explain slow ops, files of results, tables."""

from __future__ import annotations

import fnmatch
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from readme import ROOT, write_section

RESULTS = ROOT / "benchmarks" / "results"
LIMITS = {"cpu": 1.3, "cuda": 1.5}  # of eager's time
SLOWEST = 12  # ops of a machine that the page lists


class Guarantee(NamedTuple):
    """Why ops of a target are slower than the limit: globs of overloads, and dtypes ('': all)."""

    target: str
    globs: tuple[str, ...]
    dtype: str
    why: str


SLOWER = [
    *(
        Guarantee(
            "cpu", ("index_add*", "scatter_add*", "scatter*reduce*", "*index_put*"), dtype,
            "sums of 16-bit numbers are added up in float32 and rounded once, not after each addition",
        )
        for dtype in ("bfloat16", "float16")
    ),
    Guarantee(
        "cuda", ("index_add*", "scatter_add*", "scatter*reduce*", "*index_put*"), "",
        "a sum does not depend on the order of its additions, unlike one of atomic additions of floats",
    ),
    Guarantee(
        "cuda", ("lgamma*", "digamma*", "polygamma*"), "",
        "it is computed in float64, because float32 loses all bits beside the zeros of the function",
    ),
]  # fmt: skip


@dataclass
class Figure:
    """Seconds of one call, medians and minima of the bursts; ``ratio``: median of the rounds' ours / eager. ``wrong``:
    what the gate says, empty if the result passes."""

    op: str
    aliases: list[str]
    family: str
    sample: str
    dtype: str
    size: str
    kernels: int
    ours: float
    eager: float
    ours_min: float
    eager_min: float
    ratio: float
    wrong: str
    slower_because: str = ""

    def too_slow(self, target: str) -> bool:
        """Whether it is above the limit, without a guarantee that explains it."""
        return self.ratio > LIMITS[target] and not self.slower_because


def guarantee(target: str, op_type: str, dtype: str) -> str:
    """Return the guarantee that makes an op slower, or ''."""
    name = op_type.removeprefix("aten.")
    found = (
        g.why
        for g in SLOWER
        if g.target == target and g.dtype in ("", dtype) and any(fnmatch.fnmatchcase(name, x) for x in g.globs)
    )
    return next(found, "")


def table(figures: Sequence[Figure], target: str, most: int | None = None) -> str:
    """Return the figures as text, the worst ratio first."""
    lines = [f"{'ratio':>7}  {'ours':>9}  {'eager':>9}  op"]
    ordered = sorted(figures, key=lambda f: -f.ratio)
    for f in ordered[:most]:
        marks = f" ✗ {f.wrong}" if f.wrong else ""
        marks += f" ({f.slower_because})" if f.slower_because else ""
        lines.append(
            f"{f.ratio:6.2f}{'!' if f.too_slow(target) else ' '}  {_time(f.ours)}  {_time(f.eager)}  "
            f"{f.op.removeprefix('aten.')} {f.dtype} {f.size} {f.sample[:90]}{marks}"
        )
    slow, wrong = sum(f.too_slow(target) for f in figures), sum(bool(f.wrong) for f in figures)
    overloads = {name for f in figures for name in (f.op, *f.aliases)}
    mean = math.exp(statistics.fmean(math.log(f.ratio) for f in figures)) if figures else 1.0
    lines.append(
        f"{len(figures)} figures of {len(overloads)} overloads; {slow} above {LIMITS[target]} × eager, {wrong} wrong; "
        f"geometric mean of the ratios {mean:.2f}"
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:6.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:6.2f} ms"


# -- files -------------------------------------------------------------------------------------------------------------
def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of the parts of a run on one machine as those of one run: later figures replace earlier ones
    of the same call. Raises ``ValueError`` if the parts are not of one machine and target."""
    for name in ("hardware", "target", "threads", "float32_precision"):
        if len({part.get(name) for part in parts}) > 1:
            raise ValueError(f"the parts of a run differ in {name!r}")
    rows = {(r["op"], r["sample"], r["dtype"], r["size"]): r for part in parts for r in part["rows"]}
    target = parts[0]["target"]
    for r in rows.values():  # guarantees may have been stated later
        r["slower_because"] = guarantee(target, r["op"], r["dtype"]) if r["ratio"] > LIMITS[target] else ""
    measured = {(r["op"], r["dtype"], r["size"]) for r in rows.values()}
    skipped = {name: why for part in parts for name, why in part["not_measured"].items()}
    skipped = {name: why for name, why in skipped.items() if _call(name) not in measured}
    sizes = {name: n for part in parts for name, n in part["sizes"].items()}
    ordered = sorted(rows.values(), key=lambda r: -r["ratio"])
    return {**parts[-1], "sizes": sizes, "rows": ordered, "not_measured": skipped}


def _call(name: str) -> tuple[str, str, str]:
    """Return op, dtype and size of the name of a case, such as aten.mm.default-0-float32-small."""
    op, _, dtype, size = name.rsplit("-", 3)
    return op, dtype, size


# -- pages -------------------------------------------------------------------------------------------------------------
def write_pages() -> None:
    """Write the tables of all machines into docs/performance.md."""
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("ops_*.json"))]
    if stored:
        write_section("ops", section(stored), readme=False)


def section(stored: Iterable[dict[str, Any]]) -> str:
    """Return the tables of a page: how fast the ops of each machine and dtype are, and the slowest of them."""
    head = "machine | dtype | calls | geometric mean | not slower than eager | above the limit | because of a guarantee"
    lines = [f"| {head} |", "|---|---|---:|---:|---:|---:|---:|"]
    slow = ["| machine | slowest ops | dtype | size | npusim | eager | ratio |", "|---|---|---|---|---:|---:|---:|"]
    caption = []
    for results in stored:
        target, figures = results["target"], [Figure(**row) for row in results["rows"]]
        for dtype in dict.fromkeys(f.dtype for f in figures if f.dtype.startswith(("float", "bfloat"))):
            own = [f for f in figures if f.dtype == dtype]
            over = [f for f in own if f.ratio > LIMITS[target]]
            mean = math.exp(statistics.fmean(math.log(f.ratio) for f in own))
            lines.append(
                f"| {results['hardware']} | {dtype} | {len(own)} | {mean:.2f} | "
                f"{sum(f.ratio <= 1 for f in own) / len(own):.0%} | {sum(f.too_slow(target) for f in over)} | "
                f"{sum(bool(f.slower_because) for f in over)} |"
            )
        over = sorted((f for f in figures if f.too_slow(target)), key=lambda f: -f.ratio)
        for f in over[:SLOWEST]:
            name = f.op.removeprefix("aten.")
            slow.append(
                f"| {results['hardware']} | `{name}` | {f.dtype} | {f.size} | {_time(f.ours).strip()} | "
                f"{_time(f.eager).strip()} | {f.ratio:.2f} |"
            )
        caption.append(f"{results['hardware']}: {results['date']}, torch {results['versions']['torch']}.")
    text = (
        "Time of npusim divided by that of PyTorch eager, for calls of all overloads that are enlarged to a few sizes. "
        "A call is above the limit if it takes more than 1.3 × eager's time on a CPU or 1.5 × on a GPU. Command: "
        "`python benchmarks/ops.py`."
    )
    return "\n".join([*lines, "", *slow, "", " ".join([*caption, text])])
