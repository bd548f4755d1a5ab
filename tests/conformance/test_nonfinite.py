"""One NaN or infinity in the input of every op that looks through windows: results are not finite where PyTorch's are
not, and nowhere else.

The conformance samples of convolutions, pooling and resizing, with one element of the first tensor replaced. PyTorch's
results are those in float64: its kernels for half types spread such values, too.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from .cases import TARGETS, Case, all_cases, compile_cases, to_numpy

WINDOWED = re.compile(r"aten\.(_?conv|_?upsample|.*_pool\dd|im2col|col2im|.*_pad\dd)")
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, eq=False)
class Poisoned(Case):
    """A case with one element of its first tensor replaced."""

    value: float

    @cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().arguments
        x = args[0].clone(memory_format=torch.contiguous_format)
        x.view(-1)[zlib.crc32(str(self).encode()) % x.numel()] = self.value
        return (x, *args[1:]), kwargs


def poisoned(value: float) -> list[Poisoned]:
    """A half type and float32 take turns."""
    cases = [c for c in all_cases() if WINDOWED.match(c.op_type) and c.dtype in ("float32", "bfloat16")]
    made = [
        Poisoned(c.op_type, c.op, c.number, c.dtype, value) for c in cases if (c.number + (c.dtype != "float32")) % 2
    ]
    return [c for c in made if c.sample.args[0].shape and 0 not in c.sample.args[0].shape]


@pytest.mark.parametrize("target", ["interp", "cpu"])
@pytest.mark.parametrize("name", VALUES)
def test_one_element_changes_what_sees_it(target: str, name: str) -> None:
    batch = compile_cases(poisoned(VALUES[name]))
    assert not batch.failed and len(batch.outputs) > 200
    results = TARGETS[target](batch.graph, batch.inputs)
    wrong = []
    for case, outputs in batch.outputs.items():
        for out, reference in zip(outputs, case.reference, strict=True):
            ours, want = (np.asarray(x).astype(np.float64) for x in (results[out], to_numpy(reference)))
            special = ~np.isfinite(want)
            if not np.array_equal(np.isfinite(ours), ~special) or not np.array_equal(
                ours[special], want[special], equal_nan=True
            ):
                wrong.append(f"{case} {case.sample}: {int((~np.isfinite(ours)).sum())}, PyTorch {int(special.sum())}")
    assert not wrong, "\n".join(wrong)
