"""What Metal's API validation checks of a dispatch, in an encoder or in an indirect command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .faults import require
from .resources import Buffer, Pipeline


class MTLSize(NamedTuple):
    width: int
    height: int
    depth: int


def check_offset(buffer: object, offset: int, index: int, limit: int) -> None:
    require(isinstance(buffer, Buffer), f"{buffer!r} is not a buffer")
    assert isinstance(buffer, Buffer)
    require(0 <= index < limit, f"buffer index {index}; there are {limit}")
    require(0 <= offset < buffer.length(), f"offset {offset} in a buffer of {buffer.length()} bytes")


def arguments(
    pipeline: Pipeline, buffers: Mapping[int, tuple[Buffer, int]], groups: MTLSize, threads: MTLSize
) -> dict[int, tuple[Buffer, int]]:
    """The buffers of a dispatch by index, after what API validation checks."""
    require(min(*groups, *threads) > 0, f"a grid of {tuple(groups)} threadgroups of {tuple(threads)} threads")
    count = threads.width * threads.height * threads.depth
    limit = pipeline.maxTotalThreadsPerThreadgroup()
    require(count <= limit, f"{count} threads in a threadgroup; {pipeline.label} takes {limit}")
    wanted = [p.index for p in pipeline.function.signature.buffers]
    require(all(n in buffers for n in wanted), f"{pipeline.label}: a buffer is missing")
    bound = {n: buffers[n] for n in wanted}
    for n, size in zip(wanted, pipeline.function.element_sizes, strict=False):
        require(bound[n][1] % size == 0, f"{pipeline.label}: offset {bound[n][1]} for elements of {size} bytes")
    return bound
