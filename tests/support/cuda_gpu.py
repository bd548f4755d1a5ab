"""Whether an NVIDIA GPU can be used here, and why not."""

from __future__ import annotations

from functools import cache

import pytest

from npu_compiler.support.errors import NPUError
from npu_runtime.backends.cuda import CUDABackend, missing_parts


@cache
def reason() -> str:
    """Why tests cannot run on a GPU here; empty if they can."""
    return "; ".join(missing_parts())


@cache
def backend() -> CUDABackend:
    """One for all tests: a GPU's context takes a while to make."""
    return CUDABackend()


def marks() -> list[pytest.MarkDecorator]:
    """Of tests that need a GPU; without one they are skipped with the reason."""
    return [pytest.mark.cuda, pytest.mark.skipif(bool(reason()), reason=reason() or "there is a GPU")]


def compiler_missing() -> str:
    """Why CUDA code cannot be compiled here; empty if it can."""
    from npu_compiler.targets.cuda.nvrtc import find_nvrtc

    try:
        find_nvrtc()
    except NPUError as error:
        return str(error)
    return ""


def compiles() -> pytest.MarkDecorator:
    """Of tests that compile CUDA code, here and without a GPU."""
    return pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing() or "it is there")
