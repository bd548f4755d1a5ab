"""The dispatches of a run, and how an encoder gets them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .device import frameworks

Binding = tuple[Any, int, int]  # MTLBuffer, byte offset, index of the argument


class Step(NamedTuple):
    """A dispatch of launch ``number``.

    ``name``: its kernel, for messages. ``barrier``: whether it waits for the dispatches before it. ``bindings``: all
    arguments. ``bound``: whether some are inputs or outputs that a run was bound to. ``groups``, ``threads``: MTLSize.
    """

    number: int
    name: str
    barrier: bool
    pipeline: Any
    bindings: tuple[Binding, ...]
    bound: bool
    groups: Any
    threads: Any


def encode_step(step: Step, encoder: Any) -> None:
    """Encode a dispatch with all that it needs."""
    encoder.setComputePipelineState_(step.pipeline)
    for buffer, offset, index in step.bindings:
        encoder.setBuffer_offset_atIndex_(buffer, offset, index)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(step.groups, step.threads)


def list_encoder(steps: Sequence[Step]) -> Callable[[Any], None]:
    """Return a function that encodes ``steps``. What a dispatch has in common with the one before it is set once, and
    each has a signpost, by which an error names the kernel that the GPU had reached."""
    packed = _packed(steps)
    scope = frameworks().MTLBarrierScopeBuffers

    def encode(encoder: Any) -> None:
        set_pipeline, set_buffer = encoder.setComputePipelineState_, encoder.setBuffer_offset_atIndex_
        barrier, dispatch = encoder.memoryBarrierWithScope_, encoder.dispatchThreadgroups_threadsPerThreadgroup_
        signpost = encoder.insertDebugSignpost_
        for name, waits, pipeline, changed, groups, threads in packed:
            if waits:
                barrier(scope)
            if pipeline is not None:
                set_pipeline(pipeline)
            for buffer, offset, index in changed:
                set_buffer(buffer, offset, index)
            signpost(name)
            dispatch(groups, threads)

    return encode


def _packed(steps: Sequence[Step]) -> list[tuple[str, bool, Any, list[Binding], Any, Any]]:
    """Return (name, barrier, pipeline or None, bindings, groups, threads) of each step: only what differs from the
    state that the steps before it leave in an encoder."""
    state: dict[int, Binding] = {}
    pipeline, rows = None, []
    for s in steps:
        changed = [b for b in s.bindings if not _same(state.get(b[2]), b)]
        state.update((b[2], b) for b in changed)
        switch = s.pipeline if s.pipeline is not pipeline else None
        rows.append((s.name, s.barrier, switch, changed, s.groups, s.threads))
        pipeline = s.pipeline
    return rows


def _same(a: Binding | None, b: Binding) -> bool:
    return a is not None and a[0] is b[0] and a[1] == b[1]
