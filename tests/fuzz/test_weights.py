"""Weight files that change while they are in use."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from npu_compiler.support.errors import WeightError
from npu_compiler.weights.files import open_weights


@pytest.mark.parametrize("change", ["truncate", "overwrite"])
def test_a_file_that_is_written_to_after_it_was_opened(change: str, tmp_path: Path) -> None:
    """Reading behind the end of a mapped file would end the process."""
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"a": np.ones(1 << 20, np.float32), "b": np.ones(4, np.float32)}, path)
    os.utime(path, (1, 1))
    source = open_weights(path)
    assert source.read("b").sum() == 4
    if change == "truncate":
        os.truncate(path, 4096)
    else:
        with open(path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"1234")
    with pytest.raises(WeightError, match=r"w\.safetensors: the file was written to after it was opened"):
        source.read("a")


def test_a_file_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"a": np.ones(1 << 20, np.float32)}, path)
    source = open_weights(path)
    (tmp_path / "other").write_bytes(b"short")
    os.replace(tmp_path / "other", path)
    assert source.read("a").sum() == 1 << 20
