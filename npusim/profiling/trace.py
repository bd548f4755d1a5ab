"""The run that the timeline shows as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's trace event format: complete events ('X') in microseconds, with metadata ('M') that names
processes and threads. Each section is a process; kernels, host ops and transfers are its threads.
"""

from __future__ import annotations

from typing import Any

from .records import DEVICES, Profile, Row

_THREADS = {device: number for number, device in enumerate(DEVICES, 1)}


def trace(report: Profile) -> dict[str, Any]:
    """Return the events of all sections."""
    events: list[dict[str, Any]] = []
    for process, section in enumerate(report.sections, 1):
        events.append(_name("process_name", process, 0, f"{report.model}: {section.title}"))
        for device in dict.fromkeys(r.device for r in section.rows):
            label = report.target if device == "npu" else device
            events.append(_name("thread_name", process, _THREADS[device], label))
        events += [_event(r, process) for r in section.rows]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": _about(report)}


def _about(report: Profile) -> dict[str, str]:
    return {"model": report.model, "device": f"{report.machine} ({report.device})", "version": report.version}


def _name(what: str, process: int, thread: int, label: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": label}}


def _event(r: Row, process: int) -> dict[str, Any]:
    args = {
        "module": r.module, "source": ", ".join(dict.fromkeys(p.source for p in r.places)), "ops": ", ".join(r.ops),
        "inputs": list(r.inputs), "outputs": list(r.outputs), "flops": r.flops, "bytes": r.read + r.written,
        "median_us": r.seconds * 1e6, "lost_us": r.lost * 1e6, "of_roofline": r.of_roof, "bound": r.bound,
    }  # fmt: skip
    return {
        "name": r.name, "cat": r.kind, "ph": "X", "pid": process, "tid": _THREADS[r.device], "ts": r.start * 1e6,
        "dur": (r.end - r.start) * 1e6, "args": args,
    }  # fmt: skip
