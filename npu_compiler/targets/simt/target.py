"""The common part of the GPU targets: everything but the language and its compiler."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from ...schedule.kernel import Kernel
from ...schedule.rewrite import ScheduleRewrite
from ...schedule.schedule import Schedule
from ...support.errors import Reason
from ...target_config import TargetConfig
from .. import CodegenTarget, Emitted, entry_symbols
from .emit import Functions, sources, unsupported
from .lang.dialect import Dialect
from .lang.program import pack
from .rewrites import rewrites


class SimtTarget(CodegenTarget):
    """A :class:`npu_compiler.targets.CodegenTarget` for the SIMT kernels in a ``dialect``. ``suffix``: of its source
    files."""

    name: str
    config: TargetConfig
    suffix: str

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """The definition of the kernels' vocabulary, for the selected device."""

    def supports(self, kernel: Kernel) -> Reason | None:
        return unsupported(kernel, self.dialect)

    @property
    def rewrites(self) -> tuple[ScheduleRewrite, ...]:
        return rewrites(self.config, self.dialect)

    def emit(self, schedules: list[Schedule], *, build: bool = True) -> Emitted:
        functions = Functions(self.dialect)
        symbols = entry_symbols(schedules)
        launches = {symbols[s.name]: functions.launches(s) for s in schedules}
        result = Emitted(self.sources(functions), b"", (), symbols)
        if build:
            code, result.requires, result.build = self.build(functions.text)
            result.binary = pack(launches, code)
        return result

    def sources(self, functions: Functions) -> dict[str, str]:
        """Return readable text by file name."""
        return sources(functions, self.suffix)

    @abstractmethod
    def build(self, functions: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
        """Compile kernel functions, by name and without the dialect's head.

        Returns (the program's code for the backend, the features that a machine must have, a record of the build).
        Raises ``ToolchainError`` if there is no compiler or the compiler fails.
        """
