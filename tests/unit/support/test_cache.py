"""The cache on disk: what others could have written is not used; damaged, moved and odd entries read as absent."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from npu_compiler.support import cache as cache_module
from npu_compiler.support import env, files
from npu_compiler.support.cache import Cache, open_cache, private_folder
from npu_compiler.support.errors import ConfigError
from npusim.models.download import cache_path
from npusim.verbs import doctor

needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_users
def test_the_directory_is_for_its_owner_alone(base: Path) -> None:
    cache = open_cache("kernels")
    cache.put("key", b"data")
    assert cache.get("key") == b"data"
    assert {mode(p) for p in (base, *base.rglob("*")) if p.is_dir()} == {0o700}
    assert {mode(p) for p in base.rglob("*") if p.is_file()} == {0o600}


@needs_users
@pytest.mark.parametrize("bits", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", ["base", "section"])
def test_a_directory_that_others_can_write_to_is_not_used(
    base: Path, bits: int, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_cache("kernels").put("key", b"data")
    folder = base if which == "base" else base / "kernels"
    folder.chmod(bits)
    for _ in range(3):
        cache = open_cache("kernels")
        assert cache.get("key") is None and cache.open("key") is None
        cache.put("other", b"data")
        assert cache.put_file("file", 4, lambda file: file.write(b"data")) is None
    assert len(list(base.rglob("*"))) == 3  # the section, a folder, the entry
    (record,) = [r for r in caplog.records if r.name == cache_module.__name__]
    assert f"chmod -R go-w '{folder}'" in record.message and f"{bits:04o}" in record.message
    folder.chmod(0o755)
    assert open_cache("kernels").get("key") == b"data"


@needs_users
def test_what_is_no_directory_is_not_used(base: Path) -> None:
    """The reason does not advise to change its mode: it may be /dev/null."""
    base.touch()
    base.chmod(0o666)
    assert open_cache("kernels").obstacle == f"{base.resolve()} is not a directory; set NPU_CACHE_DIR to one"


@needs_users
def test_another_users_directory_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_cache("kernels").put("key", b"data")
    monkeypatch.setattr(os, "geteuid", lambda: base.stat().st_uid + 1)
    found = open_cache("kernels")
    if base.stat().st_uid == 0:  # root's directories are as good as one's own
        assert not found.obstacle
        return
    assert found.get("key") is None
    assert f"belongs to user {base.stat().st_uid}; set NPU_CACHE_DIR" in found.obstacle


@needs_users
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_given_away_is_not_used(base: Path) -> None:
    open_cache("kernels").put("key", b"data")
    os.chown(base, 12345, -1)
    assert "belongs to user 12345" in open_cache("kernels").obstacle


@needs_users
def test_directories_above_may_be_sticky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("NPU_CACHE_DIR", str(shared / "a" / "cache"))
    for bits, fine in ((0o1777, True), (0o777, False), (0o755, True)):
        shared.chmod(bits)
        assert (not open_cache("kernels").obstacle) == fine


@needs_users
def test_doctor_says_that_it_is_not_used(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    result = doctor.run(argparse.Namespace(markdown=False))
    assert any("chmod -R go-w" in problem for problem in result.data["problems"])
    assert any(isinstance(b, str) and b.startswith("cache") and "not used" in b for b in result.blocks)


@needs_users
def test_other_programs_folders_are_private_too(base: Path) -> None:
    """Under a umask that lets groups write, the cache directory is private, no matter which component makes it."""
    before = os.umask(0o002)
    try:
        for name in ("zig", "models"):
            assert (private_folder(name) if name == "zig" else cache_path(None)) == base / name
            assert mode(base) == mode(base / name) == 0o700
            assert not open_cache("kernels").obstacle
            shutil.rmtree(base)
        private_folder("zig")
        (base / "zig").chmod(0o777)
        assert private_folder("zig") is None
    finally:
        os.umask(before)


def entries(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_entries_under_each_others_names_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path / "c", 10_000)
    cache.put("one", b"first")
    cache.put("two", b"second")
    a, b = cache._path("one"), cache._path("two")
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with caplog.at_level(logging.WARNING):
        assert cache.get("one") is None and cache.get("two") is None
    assert caplog.text.count("damaged cache entry") == 2 and not entries(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_entries_that_are_no_files(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 10_000)
    cache.put("key", b"data")
    path = cache._path("key")
    path.unlink()
    os.mkfifo(path)
    began = time.monotonic()
    assert cache.get("key") is None
    os.mkfifo(path) if not path.exists() else None
    assert cache.open("key") is None
    assert time.monotonic() - began < 5
    cache.put("key", b"again")
    assert cache.get("key") == b"again"


def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system: root may write to a read-only directory, so the system calls refuse here."""
    cache = Cache(tmp_path / "c", 10_000)
    cache.put("key", b"data")
    cache.put_file("file", 4, lambda file: file.write(b"data"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get("key") == b"data"
    file = cache.open("file")
    assert file is not None
    with file:
        assert file.read() == b"data"


def test_names_of_directories_that_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", "~nobody-at-all/x")
    with pytest.raises(ConfigError, match="NPU_CACHE_DIR='~nobody-at-all/x' is not understood"):
        env.cache_dir()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NPU_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert env.cache_dir().name.startswith("npusim-")


# ------------------------------------------------------------------------------------------------ files that appear
def test_leftovers_of_killed_savers_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "model.npubin"
    dead = 2**22 + 1  # above the largest process id that Linux gives
    names = {
        f".model.npubin.{dead}.0123456789ab.tmp": (700, True),
        f".model.npubin.{dead}.0123456789ac.tmp": (5, False),  # maybe alive in another container
        f".model.npubin.{os.getpid()}.0123456789ad.tmp": (700, False),
        f".model.npubin.{os.getpid()}.0123456789ae.tmp": (4000, True),
        f".other.npubin.{dead}.0123456789af.tmp": (4000, False),
        ".model.npubin.notes.tmp": (4000, False),
    }
    for name, (age, _) in names.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    files.write_atomic(target, b"whole")
    assert target.read_bytes() == b"whole"
    for name, (_, removed) in names.items():
        assert (tmp_path / name).exists() != removed, name
    assert len(list(tmp_path.iterdir())) == 1 + sum(not removed for _, removed in names.values())


@needs_users
def test_entries_are_for_their_owner_whatever_the_umask_is(tmp_path: Path) -> None:
    cache, before = Cache(tmp_path / "kernels", 1 << 20), os.umask(0)
    try:
        cache.put("key", b"contents")
    finally:
        os.umask(before)
    (entry,) = cache.root.glob("??/*")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600 and cache.get("key") == b"contents"


@needs_users
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the umask is not touched: it is the whole process's."""
    before = os.umask(0o027)
    monkeypatch.setattr(os, "umask", None)
    try:
        files.write_atomic(tmp_path / "file", b"data")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert mode(tmp_path / "file") == 0o640
