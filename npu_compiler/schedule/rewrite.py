"""Named rewrites of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schedule import Schedule


@dataclass(frozen=True)
class ScheduleRewrite:
    """A change of kernels that keeps the results of a schedule, whose memory is not planned yet.

    A target's rewrites are an ordered table. ``--disable NAME`` skips one, ``--until NAME`` stops after it,
    ``NPU_DUMP`` writes its result, and ``NPU_VERIFY=2`` runs the schedule in numpy before and after it
    (:mod:`npu_compiler.schedule.interp`).
    """

    name: str
    summary: str  # one line, for people
    apply: Callable[[Schedule], None]  # changes the schedule in place
    required: str = ""  # if it cannot be disabled: the reason
