"""The result of a profile: plain, typed records that every view is made of."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from npu_compiler.support.errors import ConfigError, InputError
from npu_compiler.support.files import write_atomic
from npu_compiler.support.text import html_table, html_text, json_safe, si, table

SCHEMA = 1
HEADER = ("#", "lost µs", "µs", "share", "of roof", "GFLOP/s", "GB/s", "kernel", "kind", "module")


@dataclass(frozen=True)
class Place:
    """A module of the model and the line of code that calls it; see ``npu_compiler.aten.ir.Location``."""

    module: str
    kind: str
    source: str


@dataclass(frozen=True)
class KernelError:
    """The error of a kernel's results against float64 with the same inputs. ``rms``: root mean square, relative to that
    of the results; ``largest``: relative to the largest result; ``note``: why there is none."""

    rms: float = math.nan
    largest: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A kernel ('npu'), an op that PyTorch runs ('host') or a copy between them ('transfer').

    Attributes:
        part: the number of the step of the plan, 0 for a program of its own.
        seconds, least: the median and the least of the runs.
        start, end: seconds since the start of the run that the timeline shows.
        flops, read, written: operations, and bytes of distinct elements.
        roof: seconds that the device needs at least; 0 if that is unknown. ``bound``: by 'memory' or 'compute'.
        dtype: of what is multiplied. ``inputs``, ``outputs``: tensors in words.
        ops: the nodes of the IR. ``text``: the formula. ``launch``: threads of a GPU.
        after: the rows whose results it reads, by index.
    """

    index: int
    name: str
    device: str
    kind: str
    part: int
    seconds: float
    least: float
    start: float
    end: float
    flops: int = 0
    read: int = 0
    written: int = 0
    roof: float = 0.0
    bound: str = ""
    dtype: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    text: str = ""
    launch: str = ""
    after: tuple[int, ...] = ()
    error: KernelError | None = None

    @property
    def lost(self) -> float:
        """Seconds beyond what the device needs at least: of a transfer or a host op, all; 0 if that is unknown."""
        if self.device != "npu":
            return self.seconds
        return max(0.0, self.seconds - self.roof) if self.roof else 0.0

    @property
    def of_roof(self) -> float:
        """The least time over the time taken: 1 is the roofline; 0 if that is unknown."""
        return self.roof / self.seconds if self.seconds > 0 else 0.0

    @property
    def gflops(self) -> float:
        """GFLOP/s."""
        return self.flops / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def gbytes(self) -> float:
        """GB/s."""
        return (self.read + self.written) / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def module(self) -> str:
        """The modules in words."""
        return ", ".join(dict.fromkeys(p.module or p.kind for p in self.places))


@dataclass(frozen=True)
class Block:
    """A buffer of an arena: its place in bytes, and the first and the last kernel that touch it."""

    name: str
    tensor: str
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """The arena of a program. ``peak``: the kernel at which most bytes are in use, and ``owners`` the blocks that are
    alive then, the largest first, by position in ``blocks``. ``rows``: the numbers of its kernels among all rows."""

    name: str
    nbytes: int
    blocks: tuple[Block, ...]
    peak: int
    live: int
    owners: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A buffer that stays: a 'weight', a 'const' or a 'state'. ``format``: its weight format, if it has one."""

    name: str
    kind: str
    tensor: str
    nbytes: int
    format: str = ""


@dataclass(frozen=True)
class Section:
    """One entry point of a program, or one plan. ``seconds``: the median of the runs in which each step is timed;
    ``whole``: the median of those in which none is. ``count``: how many such runs what ``title`` names takes."""

    name: str
    title: str
    runs: int
    seconds: float
    whole: float
    rows: tuple[Row, ...]
    arenas: tuple[Arena, ...]
    count: int = 1

    @property
    def kernel_seconds(self) -> float:
        """The sum of the medians of all rows."""
        return sum(r.seconds for r in self.rows)

    @property
    def roof(self) -> float:
        """Seconds that all kernels need at least."""
        return sum(r.roof for r in self.rows)

    @property
    def of_roof(self) -> float:
        """The least time of the kernels over the sum of the medians; 0 if that is unknown."""
        return self.roof / self.kernel_seconds if self.rows else 0.0

    @property
    def flops(self) -> int:
        return sum(r.flops for r in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that kernels read and write."""
        return sum(r.read + r.written for r in self.rows if r.device == "npu")


@dataclass(frozen=True)
class Limits:
    """The roofline of the device: FLOP/s by dtype, and bytes per second of its caches (bytes, rate) and its memory."""

    flops: dict[str, float]
    caches: tuple[tuple[float, float], ...]
    memory: float
    source: str


@dataclass(frozen=True)
class NotOnNPU:
    """A node that PyTorch runs on the host, and why."""

    node: str
    op: str
    reason: str
    fix: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class ProfileReport:
    """What a profile found out. Views: :meth:`table`, :meth:`save`, and an HTML table in notebooks."""

    model: str
    target: str
    device: str
    machine: str
    dtype: str
    version: str
    created: str
    sections: tuple[Section, ...]
    held: tuple[Held, ...] = ()
    limits: Limits | None = None
    not_on_npu: tuple[NotOnNPU, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.table()

    def summary(self, section: Section) -> str:
        """A section in one line."""
        many = f" ({section.count} such runs)" if section.count > 1 else ""
        roof = f", {section.of_roof:.0%} of the roofline" if section.roof else ""
        seconds = section.seconds or 1.0
        rates = f"{si(section.flops / seconds, 'FLOP/s')}, {si(section.nbytes / seconds, 'B/s')}"
        return (
            f"{section.title}: {section.seconds * 1e3:.3f} ms{many}, {section.whole * 1e3:.3f} ms without timing "
            f"(medians of {section.runs} runs); {len(section.rows)} steps, {rates}{roof}"
        )

    def cells(self, section: Section) -> list[tuple[object, ...]]:
        """The rows under :data:`HEADER`, those that lose the most time first."""
        total = section.kernel_seconds or 1.0
        return [
            (
                r.index, f"{r.lost * 1e6:.1f}", f"{r.seconds * 1e6:.1f}", f"{r.seconds / total:.1%}",
                f"{r.of_roof:.0%}" if r.roof else "-", f"{r.gflops:.1f}", f"{r.gbytes:.1f}", _clip(r.name, 32),
                r.kind if r.device == "npu" else r.device, _clip(r.module, 44),
            )
            for r in sorted(section.rows, key=lambda r: (-r.lost, -r.seconds))
        ]  # fmt: skip

    def table(self, limit: int | None = 20) -> str:
        """The sections as text, the rows that lose the most time first, at most ``limit`` of each."""
        lines = [f"{self.model} on {self.machine} ({self.device}), {self.dtype}"]
        for section in self.sections:
            cells = self.cells(section)
            lines += ["", self.summary(section), *table(HEADER, cells[:limit])]
            lines += [f"  … {len(cells) - limit} more"] if limit is not None and len(cells) > limit else []
        if self.not_on_npu:
            rows = [(n.node, n.op, n.reason) for n in self.not_on_npu]
            lines += ["", "not on the NPU", *table(("node", "op", "reason"), rows)]
        return "\n".join([*lines, *(f"\nnote: {note}" for note in self.notes)]) + "\n"

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = html_text(f"{self.model} on {self.machine} ({self.device}), {self.dtype}")
        return head + "".join(html_text(self.summary(s)) + html_table(HEADER, self.cells(s), 30) for s in self.sections)

    # -- files ------------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """All records as JSON-safe data; :meth:`from_json` reads it."""
        return {"schema": SCHEMA, **json_safe(asdict(self))}

    @classmethod
    def from_json(cls, data: Any, origin: str = "the profile") -> ProfileReport:
        """Inverse of :meth:`to_json`. Raises ``InputError`` for other data; the message begins with ``origin``."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{origin} is not a profile that this version reads; write one with npusim profile --json")
        try:
            return cls(**{
                **{f.name: data[f.name] for f in fields(cls)},
                "sections": tuple(_section(s) for s in data["sections"]),
                "held": tuple(Held(**h) for h in data["held"]),
                "limits": None if data["limits"] is None else _limits(data["limits"]),
                "not_on_npu": tuple(NotOnNPU(**{**n, "places": _places(n)}) for n in data["not_on_npu"]),
                "notes": tuple(data["notes"]),
            })  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{origin} is damaged: {type(error).__name__}: {error}; write it again") from None

    def save(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write one view, atomically. ``format``: 'html', 'json', 'trace' (Perfetto) or 'model-explorer'; None: by the
        file's name, '.html' or '.json'. Raises ``InputError`` if the file cannot be written, ``ConfigError`` for any
        other format."""
        from . import html, model_explorer, trace

        target = Path(path)
        views: dict[str, Callable[[], str]] = {
            "html": lambda: html.page(self),
            "json": lambda: json.dumps(self.to_json(), allow_nan=False),
            "trace": lambda: json.dumps(trace.trace(self), allow_nan=False),
            "model-explorer": lambda: json.dumps(model_explorer.graphs(self), allow_nan=False),
        }
        format = target.suffix.removeprefix(".") if format is None else format
        if format not in views:
            raise ConfigError(f"{target}: a profile is saved as {', '.join(views)}, not as {format!r}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, views[format]().encode())
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
        return target


def read_report(path: str | os.PathLike[str]) -> ProfileReport:
    """A report from the file that ``save(..., 'json')`` wrote. Raises ``InputError``."""
    from npu_compiler.support.records import parse_json

    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return ProfileReport.from_json(parse_json(text, str(path), InputError), str(path))


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _places(record: dict[str, Any]) -> tuple[Place, ...]:
    return tuple(Place(**p) for p in record["places"])


def _row(r: dict[str, Any]) -> Row:
    lists = {name: tuple(r[name]) for name in ("inputs", "outputs", "ops", "after")}
    error = None if r["error"] is None else KernelError(*(r["error"][k] for k in ("rms", "largest", "note")))
    if error is not None:
        error = KernelError(float(error.rms), float(error.largest), error.note)  # NaN is a text in JSON
    return Row(**{**r, **lists, "places": _places(r), "error": error})


def _arena(a: dict[str, Any]) -> Arena:
    blocks = tuple(Block(**b) for b in a["blocks"])
    return Arena(**{**a, "blocks": blocks, "owners": tuple(a["owners"]), "rows": tuple(a["rows"])})


def _section(s: dict[str, Any]) -> Section:
    return Section(**{**s, "rows": tuple(map(_row, s["rows"])), "arenas": tuple(map(_arena, s["arenas"]))})


def _limits(record: dict[str, Any]) -> Limits:
    return Limits(**{**record, "caches": tuple((size, rate) for size, rate in record["caches"])})
