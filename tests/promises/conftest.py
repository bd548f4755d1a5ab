"""One convolutional model for all tests, compiled once."""

from __future__ import annotations

import pytest

from .compiled import Compiled, compiled


@pytest.fixture(scope="session")
def convnet() -> Compiled:
    """Convolution, batch norm, ReLU (in place), pooling, a residual and a classifier, in float32."""
    return compiled("convnet")
