"""Rewrites of a schedule that depend on the kernels of one SIMT target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....schedule.rewrite import ScheduleRewrite
from ....schedule.schedule import Schedule
from ..lang.dialect import Dialect


@dataclass(frozen=True)
class DialectRewrite:
    """A :class:`npu_compiler.schedule.rewrite.ScheduleRewrite` whose function also takes the target's dialect, which
    says which kernels the device has."""

    name: str
    summary: str
    apply: Callable[[Schedule, Dialect], None]
    required: str = ""

    def bind(self, dialect: Dialect) -> ScheduleRewrite:
        """Return the rewrite for the targets with this dialect."""
        return ScheduleRewrite(self.name, self.summary, lambda schedule: self.apply(schedule, dialect), self.required)
