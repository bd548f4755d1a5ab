"""A stored model in all the forms that a test may want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import npu_compiler
from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.dtypes import numpy_dtype

from ..support.ir_files import FILES, random_weights


@dataclass(frozen=True)
class Compiled:
    """A compiled model with random weights and an input. ``path``: its IR JSON."""

    path: str
    ir: IRGraph
    program: CompiledProgram
    weights: dict[str, np.ndarray]
    x: np.ndarray

    def reference(self) -> dict[str, np.ndarray]:
        """The outputs as PyTorch computes them."""
        from npu_runtime import execute_cpu_partition

        held = {name: value.copy() for name, value in self.weights.items()}
        return execute_cpu_partition(self.ir, {self.ir.graph_inputs[0].name: self.x.copy()}, held)

    def check(self, outputs: dict[str, np.ndarray]) -> None:
        """Assert that ``outputs`` are PyTorch's."""
        wanted = self.reference()
        assert list(outputs) == list(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-3, atol=1e-4)


def compiled(name: str, **options: Any) -> Compiled:
    """A stored IR file, compiled."""
    path = FILES / f"{name}.json"
    ir = npu_compiler.load_ir(path)
    x = np.random.default_rng(1).standard_normal(ir.graph_inputs[0].shape)
    program = npu_compiler.compile(str(path), **options)
    return Compiled(str(path), ir, program, random_weights(ir, 0), x.astype(numpy_dtype(ir.graph_inputs[0].dtype)))
