"""The runtime: load a compiled program with its weights and run it. Names are imported at their first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _HOMES, for type checkers and the API reference
    from .backends.base import Backend, DeviceBuffer, available_backends, get_backend
    from .backends.cpu import CPUBackend, CPUBuffer
    from .backends.cuda import CUDABackend as CUDABackend
    from .backends.metal import MetalBackend as MetalBackend
    from .executor import BoundRun, Executor
    from .model import Model, load
    from .partitioned.dag_executor import DAGExecutor
    from .partitioned.fallback import execute_cpu_partition
    from .partitioned.model import MixedModel
    from .partitioned.profile import PlanProfile
    from .profiler import EntryProfile
    from .state import State
    from .weight_loader import WeightStore, load_weights

_HOMES = {
    "backends.base": ("Backend", "DeviceBuffer", "available_backends", "get_backend"),
    "backends.cpu": ("CPUBackend", "CPUBuffer"),
    "backends.cuda": ("CUDABackend",),
    "backends.metal": ("MetalBackend",),
    "partitioned.fallback": ("execute_cpu_partition",),
    "partitioned.dag_executor": ("DAGExecutor",),
    "partitioned.model": ("MixedModel",),
    "executor": ("BoundRun", "Executor"),
    "model": ("Model", "load"),
    "partitioned.profile": ("PlanProfile",),
    "profiler": ("EntryProfile",),
    "state": ("State",),
    "weight_loader": ("WeightStore", "load_weights"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Backend",
    "BoundRun",
    "CPUBackend",
    "CPUBuffer",
    "DAGExecutor",
    "DeviceBuffer",
    "EntryProfile",
    "Executor",
    "MixedModel",
    "Model",
    "PlanProfile",
    "State",
    "WeightStore",
    "available_backends",
    "execute_cpu_partition",
    "get_backend",
    "load",
    "load_weights",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/names.md")
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{module}":
            raise
        raise AttributeError(f"{name} is not available: this build has no {__name__}.{module}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
