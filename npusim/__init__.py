"""Build a PyTorch model into native code and call it: ``npusim.build(model, example_inputs)(inputs)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_compiler import __version__

if TYPE_CHECKING:
    from .model import Model, build

__all__ = ["Model", "__version__", "build"]


def __getattr__(name: str) -> Any:
    if name in ("Model", "build"):
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
