"""Named rewrites of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schedule import Schedule


@dataclass(frozen=True)
class ScheduleRewrite:
    """A change of kernels after which a schedule computes the same; its memory is not planned yet.

    A target's rewrites are an ordered table. ``--disable NAME`` leaves one out, ``--until NAME`` stops behind it,
    ``NPU_DUMP`` shows what it changed, and ``NPU_VERIFY=2`` runs the schedule in numpy before and after it
    (:mod:`npu_compiler.schedule.interp`).
    """

    name: str
    summary: str  # one line, for people
    apply: Callable[[Schedule], None]  # changes the schedule in place
    required: str = ""  # why no program is correct without it, if so: it cannot be left out then
