"""Random arrays for measurements: programs run as fast with them as with real data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.support import dtypes


def random_weights(program: CompiledProgram | MixedProgram) -> dict[str, np.ndarray]:
    """Return small random values for every weight; programs are as fast with them as with trained ones."""
    rng = np.random.default_rng(0)
    return {w.key: random_array(w.shape, w.dtype, rng) for w in program.weights}


def random_array(shape: Sequence[int], dtype: str, rng: np.random.Generator | None = None) -> np.ndarray:
    """Return small positive floats, or zeros of other dtypes, because 0 is a valid index."""
    if dtypes.is_float(dtype):
        rng = np.random.default_rng(1) if rng is None else rng
        return rng.uniform(0.01, 0.1, tuple(shape)).astype(dtypes.numpy_dtype(dtype))
    return np.zeros(tuple(shape), dtypes.numpy_dtype(dtype))
