"""Every kind of input, damaged: see :mod:`tests.fuzz`."""

from __future__ import annotations

import pytest

from . import harness


@pytest.mark.parametrize("kind", harness.kinds())
def test_only_typed_errors(kind: str, fuzz_cases: int) -> None:
    report = harness.run_cases(kind, 0, range(fuzz_cases))
    assert not report.failures, f"{report}\n\n{report.failures[0].detail}"
    assert report.accepted + report.refused == fuzz_cases
    assert report.refused, "no case was refused: the inputs are not damaged"
    assert report.accepted, "every case was refused: the inputs are worse than damaged"
