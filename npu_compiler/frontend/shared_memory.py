"""Parameters and buffers that share memory. Each is a value of its own in the IR: what is written to one is not seen in
the others, unless they are tied, that is, the same tensor under several names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..support.errors import CaptureError
from .aliases import storage_id

__all__ = ["check_writes", "first_keys", "sharing_advice"]

_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def first_keys(program: ExportedProgram, keys: Iterable[str]) -> dict[str, str]:
    """Return for each of ``keys`` of the state_dict the first one of the same tensor; empty tensors are left out."""
    first: dict[object, str] = {}
    held = {key: t for key in keys if isinstance(t := program.state_dict.get(key), torch.Tensor) and t.numel()}
    return {key: first.setdefault(_tie(t), key) for key, t in held.items()}


def _tie(t: torch.Tensor) -> object:
    """Return a key that tied weights have in common: they are the same elements of the same memory."""
    return storage_id(t), t.storage_offset(), t.dtype, t.shape, t.stride()


def check_writes(program: ExportedProgram, written: Iterable[str]) -> None:
    """Raise ``CaptureError`` if another weight that the graph uses has a part of the memory of a ``written`` one."""
    ties = {_tie(t) for key in written if (t := _held(program, key)) is not None}
    for key, t, other in _overlapping(program) if ties else ():
        if _tie(t) in ties:
            raise CaptureError(f"forward writes to {key!r}{_advice(key, other)}")


def sharing_advice(program: ExportedProgram) -> str:
    """Return what to change if weights of the program share memory, else ''."""
    return next((_advice(key, other) for key, _, other in _overlapping(program, tied=True)), "")


def _advice(key: str, other: str) -> str:
    return (
        f"; {key!r} shares memory with {other!r}: make one of them a buffer, and take the other one from it in forward"
    )


def _overlapping(program: ExportedProgram, tied: bool = False) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield a weight's key and tensor and the key of another with memory in common: of those that the graph uses, or
    also of ``tied`` ones."""
    groups: dict[int | None, list[tuple[str, torch.Tensor]]] = {}
    placeholders = (n for n in program.graph_module.graph.nodes if n.op == "placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        t = _held(program, str(spec.target)) if spec.kind in _HELD and (tied or node.users) else None
        if t is not None and t.numel() and storage_id(t) is not None:
            groups.setdefault(storage_id(t), []).append((str(spec.target), t))
    for group in groups.values():
        for key, t in group:
            for other, u in group:
                if key != other and (tied or _tie(t) != _tie(u)) and _overlap(t, u):
                    yield key, t, other


def _held(program: ExportedProgram, key: str) -> torch.Tensor | None:
    held = program.state_dict.get(key, program.constants.get(key))
    return held if isinstance(held, torch.Tensor) else None


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors of one storage overlap."""
    return max(_first(a), _first(b)) <= min(_last(a), _last(b))


def _first(t: torch.Tensor) -> int:
    return int(t.storage_offset()) * t.element_size()


def _last(t: torch.Tensor) -> int:
    steps = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return _first(t) + (steps + 1) * t.element_size() - 1
