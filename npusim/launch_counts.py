"""What a run of each entry point costs in numbers that need no device: launches, barriers, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.artifact.program import CompiledProgram, EntryPoint
from npu_compiler.support.ordering import barrier_groups
from npu_compiler.target_config import target_config
from npu_compiler.targets import get_target
from npu_compiler.targets.simt.lang.program import Launch, unpack
from npu_compiler.targets.simt.target import SimtTarget


@dataclass(frozen=True)
class LaunchCounts:
    """Counts of one run of an entry point.

    Attributes:
        launches: of kernels.
        barriers: between the launches, if launches run concurrently wherever they may: one before each launch that
            accesses what a launch since the last barrier writes, or writes what one reads.
        bytes_read: of the kernels, each distinct element of an operand once; weights in their stored form.
        bytes_written: likewise.
        shared_bytes: of the kernel that declares the most shared memory, per workgroup; None if the target's kernels
            do not state it.
    """

    launches: int
    barriers: int
    bytes_read: int
    bytes_written: int
    shared_bytes: int | None


def launch_counts(program: CompiledProgram) -> dict[str, LaunchCounts]:
    """Return the counts by entry point. Raises ``ArtifactError`` if the program's launch list is damaged."""
    target = get_target(target_config(program.target))
    if not isinstance(target, SimtTarget):
        return {name: _counts(entry, None, None) for name, entry in program.entries.items()}
    launches, _ = unpack(program.binary)
    declared = getattr(target, "shared_bytes", None)
    found = {}
    for name, entry in program.entries.items():
        listed = [x for x in launches[entry.symbol] if x.workgroups]
        shared = None
        if declared is not None:
            texts = (program.sources[f"{x.function}.{target.suffix}"] for x in listed)
            shared = max((x.shared + declared(text) for x, text in zip(listed, texts, strict=True)), default=0)
        found[name] = _counts(entry, launches[entry.symbol], shared)
    return found


def _counts(entry: EntryPoint, launches: list[Launch] | None, shared: int | None) -> LaunchCounts:
    calls = [c for i, c in enumerate(entry.calls) if launches is None or launches[i].workgroups]
    numbers = barrier_groups((c.inputs, c.outputs) for c in calls)
    return LaunchCounts(
        launches=len(calls),
        barriers=numbers[-1] if numbers else 0,
        bytes_read=sum(c.bytes_read for c in calls),
        bytes_written=sum(c.bytes_written for c in calls),
        shared_bytes=shared,
    )
