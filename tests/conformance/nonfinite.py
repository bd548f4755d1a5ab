"""One NaN or infinity in the input of every op that looks through windows: results are not finite where PyTorch's are
not, and nowhere else.

The conformance samples of convolutions, pooling and resizing, with one element of the first tensor replaced. PyTorch's
results are those in float64: its kernels for half types spread such values, too.

``test_ops.py`` imports the test, so that one process runs both and the second finds the programs of the first compiled.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler.support import dtypes

from ..support.sweeps import FULL
from .cases import PROGRAM, TARGETS, Case, cases_for, compile_cases, to_numpy

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


def batches(value: float) -> Iterator[list[Case]]:
    """The programs that ``test_ops.py`` runs on the CPU, with ``value`` in the
    windowed cases. Those whose turn it is to be integers make one more, in float32."""
    cases = cases_for("cpu")
    families = {c.family for c in cases if WINDOWED.match(c.op_type)}
    integers = [c for c in cases if can_be_poisoned(c) and not dtypes.is_float(c.dtype)]
    for family in sorted(families):
        members = [poison(c, value) for c in cases if c.family == family]
        yield from (members[at : at + PROGRAM] for at in range(0, len(members), PROGRAM))
    yield [poison(replace(c, dtype="float32"), value) for c in integers]


def can_be_poisoned(c: Case) -> bool:
    return bool(WINDOWED.match(c.op_type)) and bool(c.sample.args[0].shape) and 0 not in c.sample.args[0].shape


def poison(c: Case, value: float) -> Case:
    """``c`` with ``value`` in its first tensor, if it is one of those that can hold it."""
    if not can_be_poisoned(c) or not dtypes.is_float(c.dtype):
        return c
    return Poisoned(c.op_type, c.op, c.number, c.dtype, value)


@pytest.mark.parametrize("target", ["interp", "cpu"])
@pytest.mark.parametrize("name", VALUES if FULL else ("nan", "-inf"))
def test_one_element_changes_what_sees_it(target: str, name: str) -> None:
    wrong, count = [], 0
    for cases in batches(VALUES[name]):
        batch = compile_cases(cases)
        results = TARGETS[target](batch.graph, batch.inputs)
        for case, outputs in batch.outputs.items():
            if isinstance(case, Poisoned):
                count += 1
                wrong += differences(case, [results[o] for o in outputs])
        assert not any(isinstance(case, Poisoned) for case in batch.failed)
    assert not wrong, "\n".join(wrong)
    assert count > 200


def differences(case: Poisoned, results: list[np.ndarray]) -> list[str]:
    """What is not finite where PyTorch is, or the other way round."""
    wrong = []
    for out, reference in zip(results, case.reference, strict=True):
        ours, want = (np.asarray(x).astype(np.float64) for x in (out, to_numpy(reference)))
        special = ~np.isfinite(want)
        if not np.array_equal(np.isfinite(ours), ~special) or not np.array_equal(
            ours[special], want[special], equal_nan=True
        ):
            wrong.append(f"{case} {case.sample}: {int((~np.isfinite(ours)).sum())}, PyTorch {int(special.sum())}")
    return wrong
