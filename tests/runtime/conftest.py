"""A hand-written program, its executors, and its results."""

from __future__ import annotations

import pytest

from npu_compiler.artifact.program import CompiledProgram
from npu_runtime import CPUBackend, Executor

from ..support import handmade


@pytest.fixture(scope="session")
def program() -> CompiledProgram:
    return handmade.program()


@pytest.fixture(scope="module")
def executor(program: CompiledProgram) -> Executor:
    return Executor(program, handmade.weights(), CPUBackend(2), "main")


@pytest.fixture
def step(program: CompiledProgram) -> Executor:
    return Executor(program, handmade.weights(), entry="step")
