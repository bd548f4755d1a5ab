"""Build a PyTorch model into native code and call it: ``npusim.build(model, example_inputs)(inputs)``.

``npusim.load(path)`` is ``npu_runtime.load``: it runs what ``npusim compile`` or ``Model.save`` wrote.

``npusim.profile(model)`` measures any model kernel by kernel.

``npusim.LLM`` is ``npu_runtime.llm.model.LLM``, which then also loads the built-in language models by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM
    from npu_runtime.model import load

    from .bars import progress_bars
    from .builder.model import Model, build
    from .profiling.collect import profile
    from .profiling.report import ProfileReport

__version__: str  # npu_compiler's

__all__ = ["LLM", "Model", "ProfileReport", "__version__", "build", "load", "profile", "progress_bars"]


def __getattr__(name: str) -> Any:
    if name in ("Model", "build"):
        from .builder import model

        return getattr(model, name)
    if name == "load":
        from npu_runtime.model import load

        return load
    if name == "progress_bars":
        from .bars import progress_bars

        return progress_bars
    if name == "__version__":
        from npu_compiler import __version__

        return __version__
    if name == "profile":
        from .profiling.collect import profile

        return profile
    if name == "ProfileReport":
        from .profiling.report import ProfileReport

        return ProfileReport
    if name == "LLM":
        from npu_runtime.llm.model import LLM

        from .models import llm_weights

        llm_weights.register()
        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
