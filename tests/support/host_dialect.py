"""The host target of the porting example in several dialects of its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from npu_compiler import target_config, targets
from npu_compiler.targets.simt.lang.dialect import Dialect

from ..porting.target import CXX, DIALECT, HostTarget

LANES = replace(DIALECT, fragment_access=False, grid_barrier=False)
DIALECTS = {
    "fragments": DIALECT,
    "lanes": LANES,
    "one wave": replace(LANES, device=replace(DIALECT.device, registers=0)),
}
# Small GPUs, whose workgroups are persistent where those of others are not.
SMALL = {
    "small": replace(DIALECT, device=replace(DIALECT.device, compute_units=1, registers=1 << 13)),
    "one compute unit": replace(DIALECT, device=replace(DIALECT.device, compute_units=1, registers=1 << 16)),
}
needs_compiler = pytest.mark.skipif(CXX is None, reason="g++ is not installed")


class _Host(HostTarget):
    def __init__(self, dialect: Dialect):
        self._dialect = dialect

    @property
    def dialect(self) -> Dialect:  # type: ignore[override]
        return self._dialect


@contextmanager
def host_in(name: str) -> Iterator[None]:
    """Register the target ``host`` in a dialect of ``DIALECTS`` or ``SMALL``, and restore it at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for table in (target_config._registered, targets._registered):
            patch.setitem(table, "host", None)  # what was there before is put back
        targets.register_target(_Host((DIALECTS | SMALL)[name]))
        yield
