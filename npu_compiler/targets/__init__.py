"""Code generators. A target is one folder here, found by name, plus one backend file in ``npu_runtime/backends``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np

from ..graph.graph import Node
from ..schedule.kernel import Kernel
from ..schedule.rewrite import ScheduleRewrite
from ..schedule.schedule import Schedule
from ..support.errors import ConfigError, Reason
from ..target_config import Device, TargetConfig, register_config, target_config, target_names

AnyDevice = TypeVar("AnyDevice", bound=Device)


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
    """The contract of ``targets/<name>/target.py``: its module-level ``TARGET``.

    A target with several devices also has ``on(device) -> CodegenTarget``: the generator of code for one of them
    (:class:`Selectable` is one). ``compiler() -> str`` is what ``npusim doctor`` shows, if a target has it; it raises
    ``ToolchainError`` if there is no compiler.
    """

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


class Selectable(ABC, Generic[AnyDevice]):
    """A generator of code for one of a target's devices: that of this machine, unless :meth:`on` selected another."""

    _selected: AnyDevice | None = None

    @staticmethod
    @abstractmethod
    def device_at_hand() -> AnyDevice:
        """The device of this machine."""

    @property
    def device(self) -> AnyDevice:
        """What code is generated for."""
        return self.device_at_hand() if self._selected is None else self._selected

    def on(self, device: AnyDevice) -> Self:
        """The same generator for another device."""
        made = copy(self)
        made._selected = device
        return made


_registered: dict[str, CodegenTarget] = {}


def register_target(target: CodegenTarget) -> None:
    """Make a target known that is not part of this package: ``compile(target=target.name)`` finds it from then on."""
    register_config(target.config)
    _registered[target.name] = target


def target_name(target: str | CodegenTarget) -> str:
    """The name of a target that is given by name or as a code generator, which is registered then."""
    if isinstance(target, str):
        return target
    if isinstance(target, type) or not isinstance(getattr(target, "config", None), TargetConfig):
        what = f"the class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
        known = ", ".join(target_names())
        raise ConfigError(f"target is {what}: pass a name ({known}) or an object with name, config, supports and emit")
    register_target(target)
    return target.name


def get_target(target: str | TargetConfig) -> CodegenTarget:
    """The code generator of 'cuda', 'cuda:sm_80' or a configuration; :class:`ConfigError` lists the known names."""
    config = target_config(target)
    generator = _registered.get(config.name)
    if generator is None:
        generator = cast(CodegenTarget, import_module(f".{config.name}.target", __package__).TARGET)
    if config.device is None:
        return generator
    on: Callable[[Device], CodegenTarget] | None = getattr(generator, "on", None)
    if on is None:
        raise ConfigError(f"target {config.name!r} generates code for one device, not for {config.device.spec!r}")
    return on(config.device)
