"""Weights that are rounded to TF32 when they are loaded."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.weights.packing import TF32, pack, packed_spec


def test_elements_are_rounded_to_11_bits() -> None:
    w = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    w[0, 0] = [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 2.0**-126]
    fraction, exponent = np.frexp(w.astype(np.float64))
    nearest = np.ldexp(np.trunc(fraction * 2**11 + np.copysign(0.5, fraction)) / 2**11, exponent)
    packed = pack(w, 1, TF32)
    assert packed_spec(TF32, w.shape, "float32", 1) == (packed.shape, packed.dtype.name)
    np.testing.assert_array_equal(packed, nearest)
    np.testing.assert_array_equal(pack(packed, 1, TF32), packed)


def test_infinities_and_nans_stay() -> None:
    ones = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    packed = pack(np.concatenate([ones, np.float32([np.inf, -np.inf, np.finfo(np.float32).max])]), 1, TF32)
    np.testing.assert_array_equal(packed, np.float32([np.nan, np.nan, np.nan, np.inf, -np.inf, np.inf]))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        packed_spec(TF32, (1, 4, 1, 4), "float16", 1)
