"""Schedules -> Metal Shading Language. The program contains the text: Apple's compiler is part of macOS, so a Mac
compiles the text when it loads the program, and caches the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schedule.kernel import Kernel
from ...support.errors import Reason
from .. import Selectable
from ..simt.emit import Functions
from ..simt.lang.dialect import Dialect
from ..simt.target import SimtTarget
from .devices import CONFIG, AppleGPU, device_at_hand
from .dialect import MAX_BUFFERS, dialect_for, shared_bytes

LANGUAGE = "metal3.1"  # the first with bfloat
COHERENT_LANGUAGE = "metal3.2"  # the first with coherent pointers and fences


class MetalTarget(Selectable[AppleGPU], SimtTarget):
    """The Metal code generator. ``sources`` are ``prelude.h``, the headers that kernels include, and a ``.metal`` file
    for each kernel, which ``xcrun metal -c`` accepts."""

    name = "metal"
    config = CONFIG
    suffix = "metal"
    device_at_hand = staticmethod(device_at_hand)
    shared_bytes = staticmethod(shared_bytes)

    @property
    def dialect(self) -> Dialect:
        return dialect_for(self.device)

    def compiler(self) -> str:
        return "no compiler: the Mac that loads a program compiles its text"

    def supports(self, kernel: Kernel) -> Reason | None:
        if len(kernel.inputs) + len(kernel.outputs) >= MAX_BUFFERS:
            return Reason("too_many_operands", f"a Metal kernel takes {MAX_BUFFERS} buffers at most")
        return super().supports(kernel)

    def sources(self, functions: Functions) -> dict[str, str]:
        kernels = {f"{name}.metal": f'#include "prelude.h"\n\n{text}' for name, text in functions.text.items()}
        return {"prelude.h": self.dialect.head, **self.dialect.included(functions.text.values()), **kernels}

    def build(self, functions: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
        text = self.dialect.source(functions.values())
        language = COHERENT_LANGUAGE if "COHERENT" in text.removeprefix(self.dialect.head) else LANGUAGE
        return {"language": language, "text": text}, (language,), {"compiler": "none: the Mac that loads it"}


TARGET = MetalTarget()
