"""A device that only tests have, and a cache, headers and a compiler of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_compiler import target_config
from npu_compiler.targets.cpu import compilers

from ...support.amx_model import amx_model
from .cxx import CXX, write_script


@pytest.fixture(scope="module")
def amx() -> Iterator[str]:
    """The name of the CPU with modelled AMX, which is in the table of devices for the tests of a module."""
    row = amx_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_config, "_rows", {**target_config._rows, "cpu": [row]})
        yield row.spec


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NPU_CXX", "CXX", "NPU_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def include(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "api.h").write_text(
        '#pragma once\n#include "deeper.h"\n#define API extern "C" __attribute__((visibility("default")))\n'
    )
    (folder / "deeper.h").write_text("constexpr int DEEP = 7;\n")
    return folder


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NPU_CXX is a wrapper that logs one line an invocation; the log starts empty after the probe."""
    log = tmp_path / "log"
    wrapper = write_script(tmp_path / "bin" / "counting-c++", f'echo "$@" >> {log}\nexec {CXX} "$@"')
    monkeypatch.setenv("NPU_CXX", str(wrapper))
    compilers.find_compiler()
    log.write_text("")
    return log
