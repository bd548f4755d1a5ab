"""The stored IR files, and random weights for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npu_compiler.aten.ir import IRGraph
from npu_compiler.aten.json_reader import graph_weights_used
from npu_compiler.support.dtypes import numpy_dtype

FILES = Path(__file__).parents[1] / "data" / "ir"


def random_weights(graph: IRGraph, seed: int) -> dict[str, np.ndarray]:
    """A state_dict by the names that PyTorch gives tensors; He-scaled matrices, batch norm statistics included."""
    rng = np.random.default_rng(seed)
    made = {}
    for key, spec in graph_weights_used(graph).items():
        if key.endswith("running_var"):
            value = rng.uniform(0.5, 2, spec.shape)
        elif len(spec.shape) == 1 and key.endswith("weight"):  # of a batch norm
            value = rng.uniform(0.3, 0.9, spec.shape)
        elif len(spec.shape) == 1:
            value = rng.normal(0, 0.2, spec.shape)
        else:
            value = rng.normal(0, (2 / np.prod(spec.shape[1:])) ** 0.5, spec.shape)
        made[key] = value.astype(numpy_dtype(spec.dtype))
    return made
