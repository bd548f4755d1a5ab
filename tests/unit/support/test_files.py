"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from npu_compiler.support.files import write_atomic, write_together


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_file_has_the_mode_that_the_process_gives_new_files(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "new", b"data")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == b"data"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask


def test_writing_leaves_the_mask_of_the_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that other threads create meanwhile would have the wrong mode."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the mask was changed"))
    write_atomic(tmp_path / "file", b"data")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "file", b"new")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"old")]


def test_of_files_that_belong_together_none_changes_unless_all_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, folder = tmp_path / "first", tmp_path / "new" / "second", tmp_path / "folder"
    write_together({first: b"1", second: b"2"})
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_together({first: b"3", folder: b"4"})
    assert error.value.filename == str(folder)
    written = iter(range(2))

    def full(descriptor: int) -> None:
        if next(written):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as failure:
        write_together({first: b"5", second: b"6"})
    assert failure.value.filename == str(second)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["first", "folder", "new"] and not [*folder.iterdir()]
