"""The figures of the documentation, drawn from the compiler's own objects and from ``benchmarks/results``:

    python tools/figures.py              writes docs/figures/*.svg

``pipeline.svg`` has ``PHASES`` and the passes that each of them asks for, ``memory_plan.svg`` the arena of ResNet-18,
and ``roofline.svg`` the measured share of what the hardware allows. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from npu_compiler.graph import expr
from npu_compiler.graph.graph import Graph
from npu_compiler.phases import State
from npu_compiler.pipeline import PHASES, run_phases
from npu_compiler.schedule.memory_planner import in_place, lifetimes
from npu_compiler.target_config import target_config
from npu_compiler.targets import get_target

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
H200_BFLOAT16 = 989e12  # FLOP/s of dense products of 16-bit floats: NVIDIA H200 data sheet
RESNET_FLOPS = {"resnet18": 3.628e9, "resnet50": 8.178e9}  # of one image, as benchmarks/cpu.py counts them

_STYLE = """
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
  .b { font-weight: 600 }
  .m { font-family: ui-monospace, monospace; font-size: 11.5px }
  .s { font-size: 11.5px; fill: #57606a }
  .card { fill: #eef2f7; stroke: #b7c3d0 }
  .accent { fill: #d5e4f7; stroke: #5b8dc9 }
  .inner { fill: #fff; stroke: #b7c3d0 }
  .line { stroke: #6e7781; fill: none }
  .head { fill: #6e7781 }
  .grid { stroke: #d0d7de }
  .bandwidth { fill: #4c7fbf }
  .arithmetic { fill: #c77d3a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .s { fill: #9aa7b4 }
    .card { fill: #262d36; stroke: #47515d }
    .accent { fill: #1f3a5c; stroke: #5b8dc9 }
    .inner { fill: #161b22; stroke: #47515d }
    .line { stroke: #8b949e }
    .head { fill: #8b949e }
    .grid { stroke: #363e48 }
    .bandwidth { fill: #6ea3e6 }
    .arithmetic { fill: #e0a064 }
  }
"""
_STAGES = {
    "nn.Module": "PyTorch",
    "capture": "torch.export",
    "ATen IR": "IR JSON",
    "check": "reasons",
    "partition": "NPU or host",
}
_CONTENT = "object, sources, launches, memory plan, weight recipes → npu_runtime"


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A drawing with the common style."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text whose baseline is at ``y``."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    """A rectangle with round corners; ``tip`` is shown when the pointer is on it."""
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>" if tip else f"<rect {shape}/>"


def arrow(x: float, y: float, to: float) -> str:
    """An arrow down."""
    return f'<path d="M{x:g} {y:g} V{to - 5:g}" class="line"/><path d="M{x - 4:g} {to - 6:g} h8 l-4 6 z" class="head"/>'


class _Asked(frozenset[str]):
    """Names that are left out, of which there are none; it notes which of them a phase asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and name not in self.names:
            self.names.append(name)
        return False


def passes_by_phase(target: str = "cpu:avx2") -> dict[str, list[str]]:
    """The passes and rewrites that can be left out, by the phase that runs them."""
    graph = Graph("relu")
    x = graph.input("x", (2, 8), "float32")
    graph.outputs = [("out", graph.pointwise(lambda v: expr.maximum(v, 0), x))]
    asked = _Asked()
    state = State(None, target_config(target), None, asked, graph)
    found: dict[str, list[str]] = {}
    for name, run, _ in PHASES:
        asked.names = []
        if name not in ("lower", "codegen"):  # no IR here, no compiler needed
            run(state)
        found[name] = asked.names
    found["fold"].append("compress_weights")  # asked only where a block format was chosen
    return found


def pipeline() -> str:
    """From a module to a program: the phases with their passes, from the compiler's tables."""
    passes = passes_by_phase()
    rewrites = (r.name for target in ("cpu", "cuda:sm_90") for r in get_target(target).rewrites)
    passes["rewrite"] = list(dict.fromkeys(rewrites))  # these two have those of all targets
    left, width, step = 20.0, 796.0, 164.0
    parts = []
    for i, (name, note) in enumerate(_STAGES.items()):
        x, wide = left + i * step, step - 24
        parts += [box(x, 14, wide, 40, "card"), *_two_lines(x + wide / 2, 31, name, note)]
        if i:
            parts.append(
                f'<path d="M{x - 24:g} 34 h18" class="line"/><path d="M{x - 7:g} 30 v8 l6 -4 z" class="head"/>'
            )
    parts.append(arrow(left + width - 70, 54, 80))
    rows, y = [], 108.0
    for number, (name, _, summary) in enumerate(PHASES, 1):
        row, height = _phase(left + 12, y, width - 24, f"{number}  {name}", summary, passes[name])
        rows += row
        y += height + 6
    parts += [box(left, 80, width, y - 76, "card"), text(left + 12, 99, "npu_compiler.pipeline.PHASES", "b"), *rows]
    parts += [arrow(left + width / 2, y + 4, y + 28), box(left, y + 28, width, 44, "card")]
    parts += _two_lines(left + width / 2, y + 47, "model.npubin", _CONTENT)
    return svg(left * 2 + width, y + 86, "The phases of the compiler", parts)


def _two_lines(x: float, y: float, name: str, note: str) -> list[str]:
    return [text(x, y, name, "b", "middle"), text(x, y + 16, note, "s", "middle")]


def _phase(x: float, y: float, width: float, name: str, summary: str, passes: Sequence[str]) -> tuple[list[str], float]:
    """A row of the pipeline and its height."""
    lines = _wrapped(passes, 78)
    height = 34.0 + 22 * len(lines)
    parts = [box(x, y, width, height, "inner"), text(x + 14, y + 21, name, "b"), text(x + 118, y + 21, summary, "s")]
    for i, line in enumerate(lines):
        at, top = x + 118, y + 31 + 22 * i
        for word in line:
            wide = 7.1 * len(word) + 14
            parts += [box(at, top, wide, 18, "accent"), text(at + 7, top + 13, word, "m")]
            at += wide + 6
    return parts, height


def _wrapped(names: Sequence[str], columns: int) -> list[list[str]]:
    """Return names in lines of at most about ``columns`` characters."""
    lines: list[list[str]] = []
    for name in names:
        if not lines or sum(len(n) + 3 for n in lines[-1]) + len(name) > columns:
            lines.append([])
        lines[-1].append(name)
    return lines


def memory_plan() -> str:
    """The arena of ResNet-18, float16: a buffer is as wide as its life and as tall as its bytes."""
    import torch

    import npu_compiler
    from npusim.models.resnet import resnet18

    ir = npu_compiler.capture(resnet18().eval(), (torch.zeros(1, 3, 224, 224),))
    schedule = run_phases(ir, "cpu:avx2", "float16", until="memory").schedule
    assert schedule is not None
    life = lifetimes(schedule.kernels)
    for id in in_place(schedule.kernels):  # drawn from the step after the residual, whose place it takes
        life[id] = (life[id][0] + 1, life[id][1])
    phases, size = schedule.kernels[-1].barrier_group + 1, schedule.arena_bytes
    left, top, width, height = 84.0, 34.0, 720.0, 260.0
    column = width / phases
    head = f"ResNet-18, float16, batch 1: {len(life)} buffers in an arena of {size / 1e6:.2f} MB"
    parts = [text(left, 20, head, "b")]
    for mark in range(5):
        y = top + height * (1 - mark / 4)
        parts.append(f'<path d="M{left:g} {y:g} H{left + width:g}" class="grid"/>')
        parts.append(text(left - 8, y + 4, f"{size * mark / 4e6:.2f} MB", "s", "end"))
    total = 0
    for b in sorted((b for b in schedule.buffers if b.id in life), key=lambda b: b.id):
        first, last = life[b.id]
        total += b.nbytes
        y, tall = top + height * (1 - (b.offset + b.nbytes) / size), height * b.nbytes / size
        tip = f"{b.name}: {b.nbytes} bytes at {b.offset}, steps {first} to {last}"
        parts.append(box(left + first * column, y, (last - first + 1) * column, max(tall, 1), "accent", tip))
        if tall > 16 and (last - first + 1) * column > 7.6 * len(b.name):
            parts.append(text(left + (first + last + 1) / 2 * column, y + tall / 2 + 4, b.name, "m", "middle"))
    parts.append(text(left, top + height + 18, "first kernel", "s"))
    parts.append(text(left + width, top + height + 18, "last kernel", "s", "end"))
    caption = f"Without sharing the buffers would need {total / 1e6:.2f} MB, {total / size:.1f} times as much."
    parts.append(text(left + width / 2, top + height + 18, caption, "s", "middle"))
    return svg(left + width + 20, top + height + 30, "The arena of ResNet-18", parts)


def shares() -> dict[str, list[tuple[str, float, str]]]:
    """(workload, measured share of the limit, what limits it) for each machine, from the stored results."""
    names = "h200.json", "cpu_resnet_amd_epyc_zen_5_2_cpus.json"
    gpu, cpu = (json.loads((RESULTS / name).read_text()) for name in names)
    parts: dict[str, Any] = gpu["parts"]
    reading = parts["bandwidth"]["read_tb_per_s"] * 1e12
    found: list[tuple[str, float, str]] = []
    plain = {name: part for name, part in parts.items() if "rows" in part and name.count("-") == 1}  # not quantised
    measured = [(*name.split("-"), part) for name, part in plain.items()]
    for kind, number, part in sorted(measured, key=lambda row: (row[0], int(row[1]))):
        (seconds,) = (r["median_ms"] * 1e-3 for r in part["rows"] if r["contender"] == "npusim")
        if "bytes_read" in part:
            label = f"one token at position {int(number):,}"
            found.append((label, part["bytes_read"] / seconds / reading, "bandwidth"))
        elif "flops" in part:
            found.append((f"prompt of {int(number):,}", part["flops"] / seconds / H200_BFLOAT16, "arithmetic"))
        else:
            work = RESNET_FLOPS[kind] * part["batch"]
            label = f"{kind.replace('resnet', 'ResNet-')}, batch {number}"
            found.append((label, work / seconds / H200_BFLOAT16, "arithmetic"))
    rows = [r for r in cpu["rows"] if r["contender"].startswith("npusim")]
    own = [
        (f"{r['model'].replace('resnet', 'ResNet-')}, batch {r['batch']}, {r['dtype']}", r["of_roofline"], "arithmetic")
        for r in rows
    ]
    return {f"{gpu['hardware']} (Qwen2.5-1.5B in bfloat16, ResNets in float16)": found, cpu["hardware"]: own}


def roofline() -> str:
    """Bars: the measured share of the bandwidth or of the arithmetic that the machine has."""
    left, width, y = 230.0, 520.0, 26.0
    parts = []
    for machine, rows in shares().items():
        parts.append(text(20, y, machine, "b"))
        y += 12
        bottom = y + 22 * len(rows)
        for mark in (0, 0.5, 1):
            x = left + width * mark / 1.75
            parts.append(f'<path d="M{x:g} {y:g} V{bottom:g}" class="{"line" if mark == 1 else "grid"}"/>')
            parts.append(text(x, bottom + 14, f"{mark * 100:.0f} %", "s", "middle"))
        for label, share, limit in rows:
            parts.append(text(left - 10, y + 15, label, "s", "end"))
            parts.append(box(left, y + 4, max(1, width * share / 1.75), 14, limit))
            parts.append(text(left + width * share / 1.75 + 6, y + 15, f"{share * 100:.0f} %", "s"))
            y += 22
        y = bottom + 46
    parts.append(box(20, y - 20, 12, 12, "bandwidth"))
    parts.append(text(38, y - 10, "of the measured read bandwidth", "s"))
    parts.append(box(250, y - 20, 12, 12, "arithmetic"))
    parts.append(text(268, y - 10, "of the peak arithmetic (GPU: data sheet; CPU: measured)", "s"))
    return svg(left + width + 20, y + 6, "Measured share of the roofline", parts)


FIGURES = {"pipeline": pipeline, "memory_plan": memory_plan, "roofline": roofline}


def main() -> None:
    """Write the figures that are named, or all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        (FOLDER / f"{name}.svg").write_text(FIGURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
