"""How much of a sweep over combinations runs: a sample by default, all of them with ``NPU_CONFORMANCE=full``.

A sample keeps every value of every parameter, and every pair of values that share a code path of their own; the test
that takes a sample says which.
"""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("NPU_CONFORMANCE") == "full"
IN_FULL = pytest.mark.skipif(not FULL, reason="part of NPU_CONFORMANCE=full")
