"""Two profiles of one model, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from npu_compiler.support.errors import InputError

from .records import Profile, Row, Section

HEADER = ("old µs", "new µs", "change", "%", "kernel", "kind", "module")
TOTALS = ("section", "old ms", "new ms", "change", "verdict")
P = TypeVar("P", bound=Profile)


@dataclass(frozen=True)
class Change:
    """A step in both profiles; ``old`` or ``new`` is None if only one of them has it."""

    old: Row | None
    new: Row | None

    @property
    def seconds(self) -> float:
        """The new time minus the old time."""
        return (self.new.seconds if self.new else 0.0) - (self.old.seconds if self.old else 0.0)

    def cells(self) -> tuple[object, ...]:
        """Return a row of the table whose header is ``HEADER``."""
        shown = self.new or self.old
        assert shown is not None
        before, after = (f"{r.seconds * 1e6:.1f}" if r else "-" for r in (self.old, self.new))
        percent = f"{self.seconds / self.old.seconds:+.1%}" if self.old and self.new and self.old.seconds else "-"
        name = shown.name if self.old and self.new else f"{shown.name} ({'new' if self.new else 'gone'})"
        return before, after, f"{self.seconds * 1e6:+.1f}", percent, name, shown.kind, shown.module[:44]


@dataclass(frozen=True)
class SectionChange:
    """A section in both profiles. Times are sums of the medians of all steps, in seconds."""

    name: str
    title: str
    old: float
    new: float
    changes: tuple[Change, ...]

    @property
    def ratio(self) -> float:
        """New over old time."""
        return self.new / self.old if self.old > 0 else 1.0

    def verdict(self, threshold: float) -> str:
        """Return 'slower', 'faster', or 'same' for changes within ``threshold`` (0.05: 5 %)."""
        return "slower" if self.ratio > 1 + threshold else "faster" if self.ratio < 1 - threshold else "same"

    def cells(self, threshold: float) -> tuple[object, ...]:
        """Return a row of the table whose header is ``TOTALS``."""
        change = f"{self.ratio - 1:+.1%}"
        return self.title, f"{self.old * 1e3:.3f}", f"{self.new * 1e3:.3f}", change, self.verdict(threshold)


def compare(old: Profile, new: Profile) -> list[SectionChange]:
    """Return the changes of the sections that both profiles have. Raises ``InputError`` if there are none."""
    before = {s.name: s for s in old.sections}
    both = [(before[s.name], s) for s in new.sections if s.name in before]
    if not both:
        raise InputError(
            f"the profiles have nothing in common: the old one is of {old.model} ({', '.join(before)}), the new one of "
            f"{new.model} ({', '.join(s.name for s in new.sections)})"
        )
    return [SectionChange(b.name, b.title, a.kernel_seconds, b.kernel_seconds, tuple(_changes(a, b))) for a, b in both]


def _changes(old: Section, new: Section) -> list[Change]:
    """Return the steps of both, the greatest change first. Kernels that implement the same nodes are the same; several
    kernels of the same nodes are paired in order."""
    waiting: dict[Hashable, list[Row]] = defaultdict(list)
    for row in old.rows:
        waiting[_key(row)].append(row)
    found = [Change(waiting[_key(row)].pop(0) if waiting[_key(row)] else None, row) for row in new.rows]
    found += [Change(row, None) for rows in waiting.values() for row in rows]
    return sorted(found, key=lambda c: -abs(c.seconds))


def _key(row: Row) -> Hashable:
    return row.device, row.ops or row.name


def annotated(report: P, changes: Sequence[SectionChange]) -> P:
    """The newer report, in which compared rows and sections say how long they took before."""
    times = {c.name: c for c in changes}
    return replace(report, sections=tuple(_annotated(s, times.get(s.name)) for s in report.sections))


def _annotated(section: Section, change: SectionChange | None) -> Section:
    if change is None:
        return section
    before = {c.new.index: c.old.seconds for c in change.changes if c.new is not None and c.old is not None}
    rows = tuple(replace(r, before=before.get(r.index)) for r in section.rows)
    return replace(section, rows=rows, before=change.old)


def slower(changes: Sequence[SectionChange], threshold: float) -> bool:
    """Whether a section takes longer than before by more than ``threshold``."""
    return any(c.verdict(threshold) == "slower" for c in changes)
