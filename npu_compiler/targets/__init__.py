"""Code generators. A target is one folder here, found by name, plus one backend file in ``npu_runtime/backends``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """The code that a target generated.

    ``sources``: file name -> text. ``binary``: the bytes that the runtime loads; empty if nothing was built.
    ``requires``: the features that a machine must have to run it. ``symbols``: schedule name -> entry symbol.
    ``build``: compiler and flags, for ``npusim describe``.
    """

    sources: dict[str, str]
    binary: bytes
    requires: tuple[str, ...]
    symbols: dict[str, str]
    build: dict[str, Any] = field(default_factory=dict)


def entry_symbols(schedules: Sequence[Schedule]) -> dict[str, str]:
    """Return a symbol for each entry point, by name: a C identifier, unique in the program."""
    return {s.name: f"npu_run_{i}_{re.sub(r'[^A-Za-z0-9_]', '_', s.name)[:40]}" for i, s in enumerate(schedules)}


class CodegenTarget(Protocol):
    """The contract of a code generator: the module-level ``TARGET`` of ``targets/<name>/target.py``.

    ``name``: the target's name, as in ``compile(target=name)``. ``config``: the limits that rules and passes read.

    A class that derives from this one only has to define these two and :meth:`supports` and :meth:`emit`.
    """

    name: str
    config: TargetConfig

    def supports(self, kernel: Kernel) -> Reason | None:
        """Return None if the target has code for this kernel, else the reason why not."""

    def winograd(self, conv: Node) -> np.ndarray | None:
        """Return the filter transform G [points, 3] if Winograd's algorithm computes this conv2d node faster, else
        None."""
        return None

    def in_limbs(self, conv: Node) -> bool:
        """Return whether this conv2d node is computed faster, at the precision of float32, by products of the bfloat16
        numbers whose sums are its float16 or float32 operands. It is asked if :meth:`winograd` returned None."""
        return False

    @property
    def rewrites(self) -> Sequence[ScheduleRewrite]:
        """The rewrites that turn an entry point's kernels into those that this target runs fastest, in the order in
        which they are applied before memory planning. Those of
        :func:`npu_compiler.schedule.horizontal_fusion.common_rewrites` are useful for most targets."""
        return ()

    def emit(self, schedules: list[Schedule], *, build: bool = True) -> Emitted:
        """Generate code for the entry points ``schedules`` of one program, and compile it if ``build``.

        Raises ``ToolchainError`` if there is no compiler or the compiler fails.
        """

    def for_device(self, device: Device) -> CodegenTarget:
        """Return the code generator for one of the target's devices (:class:`Selectable` implements it).

        Raises ``ConfigError`` if the target generates code for one device only, as it does by default."""
        raise ConfigError(f"target {self.name!r} generates code for one device, not for {device.spec!r}")

    def compiler(self) -> str | None:
        """Return the compiler's name and version for ``npusim doctor``; None, as by default, if it has none.

        Raises ``ToolchainError`` if the compiler is missing."""
        return None


class Selectable(ABC, Generic[AnyDevice]):
    """A code generator for one of a target's devices: the device of this machine, unless :meth:`for_device` selected
    another."""

    _selected: AnyDevice | None = None

    @staticmethod
    @abstractmethod
    def device_at_hand() -> AnyDevice:
        """Return the device of this machine."""

    @property
    def device(self) -> AnyDevice:
        """The device for which code is generated."""
        return self.device_at_hand() if self._selected is None else self._selected

    def for_device(self, device: Device) -> Self:
        """Return the code generator for ``device``, a row of this target."""
        generator = copy(self)
        generator._selected = cast(AnyDevice, device)
        return generator


_registered: dict[str, CodegenTarget] = {}


def register_target(target: CodegenTarget) -> None:
    """Register a target that is not part of this package. ``compile(target=target.name)`` then finds it. Raises
    ``ConfigError`` if it lacks a member of :class:`CodegenTarget`."""
    members = [*CodegenTarget.__annotations__, *(m for m in vars(CodegenTarget) if not m.startswith("_"))]
    missing = [m for m in members if not hasattr(target, m)]
    if missing:
        raise ConfigError(
            f"target {getattr(target, 'name', type(target).__name__)!r} has no {', '.join(missing)}: derive its class "
            "from npu_compiler.targets.CodegenTarget, which needs name, config, supports and emit"
        )
    register_config(target.config)
    _registered[target.name] = target


def target_name(target: str | CodegenTarget) -> str:
    """Return the name of a target that is given by name or as a code generator; a code generator is registered.

    Raises ``ConfigError`` if ``target`` is neither.
    """
    if isinstance(target, str):
        return target
    if isinstance(target, type) or not isinstance(getattr(target, "config", None), TargetConfig):
        what = f"the class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
        known = ", ".join(target_names())
        raise ConfigError(f"target is {what}: pass a name ({known}) or an object of a class that derives CodegenTarget")
    register_target(target)
    return target.name


def get_target(target: str | TargetConfig) -> CodegenTarget:
    """Return the code generator of 'cuda', 'cuda:sm_80' or a configuration.

    Raises ``ConfigError``, which lists the known names, if the target or its device is unknown.
    """
    config = target_config(target)
    generator = _registered.get(config.name)
    if generator is None:
        generator = cast(CodegenTarget, import_module(f".{config.name}.target", __package__).TARGET)
    return generator if config.device is None else generator.for_device(config.device)
