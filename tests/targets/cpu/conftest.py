"""A device that only tests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_compiler import target_config

from ...support.amx_model import amx_model


@pytest.fixture(scope="module")
def amx() -> Iterator[str]:
    """The name of the CPU with modelled AMX, which is in the table of devices for the tests of a module."""
    row = amx_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_config, "_rows", {**target_config._rows, "cpu": [row]})
        yield row.spec
