"""Code generators. A target is one folder here, found by name, plus one backend file in ``npu_runtime/backends``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ..graph.graph import Node
from ..schedule.kernel import Kernel, Schedule
from ..schedule.rewrite import ScheduleRewrite
from ..support.errors import ConfigError, Reason
from ..target_config import TARGETS, TargetConfig, target_config


@dataclass
class Emitted:
    """What a target makes of schedules: readable ``sources``, the ``binary`` the runtime loads, what it ``requires`` of
    the machine, and the entry symbols by schedule name."""

    sources: dict[str, str]
    binary: bytes
    requires: tuple[str, ...]
    symbols: dict[str, str]
    build: dict[str, Any] = field(default_factory=dict)


class CodegenTarget(Protocol):
    """The contract of ``targets/<name>/target.py``: its module-level ``TARGET``."""

    name: str
    config: TargetConfig

    def supports(self, kernel: Kernel) -> Reason | None:
        """None if the target can emit this kernel, else why not."""

    def winograd(self, conv: Node) -> np.ndarray | None:
        """The filter transform G [tile + 2, 3] if this conv2d node runs faster by Winograd's algorithm, else None."""

    @property
    def rewrites(self) -> Sequence[ScheduleRewrite]:
        """What turns an entry point's kernels into those this target runs fastest, in order, before their memory is
        planned; :func:`npu_compiler.schedule.horizontal_fusion.common_rewrites` are a start."""

    def emit(self, schedules: list[Schedule], *, build: bool = True) -> Emitted:
        """Generate and, unless ``build`` is False, compile; raises ToolchainError."""


_registered: dict[str, CodegenTarget] = {}


def register_target(target: CodegenTarget) -> None:
    """Make a target known that is not part of this package: ``compile(target=target.name)`` finds it from then on."""
    TARGETS[target.name] = target.config
    _registered[target.name] = target


def target_name(target: str | CodegenTarget) -> str:
    """The name of a target that is given by name or as a code generator, which is registered then."""
    if isinstance(target, str):
        return target
    if isinstance(target, type) or not isinstance(getattr(target, "config", None), TargetConfig):
        what = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        known = ", ".join(TARGETS)
        raise ConfigError(f"target is {what}: pass a name ({known}) or an object with name, config, supports and emit")
    register_target(target)
    return target.name


def get_target(name: str) -> CodegenTarget:
    """The code generator called ``name``; :class:`ConfigError` lists the known ones."""
    target_config(name)
    if name in _registered:
        return _registered[name]
    target: CodegenTarget = import_module(f".{name}.target", __package__).TARGET
    return target
