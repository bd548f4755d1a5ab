"""An on-disk cache: bytes by key, safe under concurrent processes, bounded in size.

Entries are written to a temporary file and renamed, so a reader sees a complete entry or none. Each has a checksum of
its key and its contents: an entry that was truncated, altered or moved reads as absent and is removed.

Entries are code that will run in this process. The directory is therefore created for its owner only, and a directory
that another user could have written to is not used, by the rules of ssh (:func:`obstacle`). The cache never raises: if
its directory cannot be used, programs are compiled again and one warning is issued.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from . import env
from .files import atomic_file, is_temporary, remove_leftovers
from .turns import turn

_log = logging.getLogger(__name__)

_MAGIC = b"NPUCACH2"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_TRIM_TO = 0.9
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[Path] = set()  # roots that this process has warned about
_room: dict[Path, int] = {}  # bytes that this process may store under a root before it counts what is there again
_SHARE = 16  # of the space left when it was last counted: other processes may store there, too


def obstacle(root: Path) -> str:
    """Return what is wrong with ``root``, a section of a cache directory, and how to fix that: it is not a directory,
    or another user could have written to it. '' if nothing is wrong.

    The section and the cache directory must belong to this user or to root, and neither group nor others may write to
    them. A directory above them may be world-writable only if it is sticky, like /tmp: otherwise another user could
    replace it.
    """
    if not hasattr(os, "geteuid"):
        return ""
    try:
        resolved = root.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        return f"{root}: {error}; set NPU_CACHE_DIR"
    for path in (resolved, *resolved.parents):
        try:
            found = path.stat()
        except OSError:  # it will be created, or writing to it will fail
            continue
        if path in (resolved, resolved.parent):
            if not stat.S_ISDIR(found.st_mode):  # such as /dev/null, whose mode must stay as it is
                return f"{path} is not a directory; set NPU_CACHE_DIR to one"
            if not _owned(found):
                return f"{path} belongs to user {found.st_uid}; set NPU_CACHE_DIR to a directory of your own"
            if found.st_mode & _OTHERS_WRITE:
                mode = f"other users can write to {path} (mode {stat.S_IMODE(found.st_mode):04o})"
                return f"{mode}; if you trust what is in it: chmod -R go-w '{path}'"
        elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"every user can replace what is in {path}; chmod o-w '{path}', or set NPU_CACHE_DIR"
    return ""


def _owned(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), 0)


class Cache:
    """Bytes by key under ``root``, at most ``limit`` bytes of them; ``limit`` 0 stores nothing.

    A key is any string; it is hashed. When the bound is passed, the entries used longest ago go first. A root that
    others can write to is not used: ``obstacle`` says why, ``limit`` becomes 0.
    """

    def __init__(self, root: Path, limit: int):
        self.root = root
        self.obstacle = obstacle(root) if limit else ""
        self.limit = 0 if self.obstacle else limit
        if self.obstacle:
            self._warn(f"the cache in {root} is not used: {self.obstacle}")

    def _path(self, key: str) -> Path:
        digest = _digest(key)
        return self.root / digest[:2] / digest[2:]

    def turn(self, key: str, work: str) -> contextlib.AbstractContextManager[None]:
        """Return a lock for a ``with`` statement: processes and threads that miss the entry of ``key`` take turns, and
        all but the first one find it. Look for the entry again inside; ``work`` and the limits are those of
        :func:`turns.turn`. If the cache is not used, nothing waits."""
        if not self.limit:
            return contextlib.nullcontext()
        folder = self.root / "turns"
        with contextlib.suppress(OSError):  # without the folder, turn() goes on without a lock
            make_folders(folder)
        return turn(folder / _digest(key), work)

    def get(self, key: str) -> bytes | None:
        """Return the bytes stored under ``key``, or ``None``; a hit counts as a use."""
        file = self.open(key)
        if file is None:
            return None
        try:
            with file:
                blob = file.read()
        except OSError:
            return None
        data = memoryview(blob)[_HEADER:]
        if blob[:_HEADER] != _seal(key, data):
            self.drop(key)
            return None
        return bytes(data)

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` atomically in place of an earlier entry."""
        if not self.limit or len(data) + _HEADER > self.limit:
            return
        self._write(self._path(key), lambda file: file.write(_seal(key, data) + data))

    def open(self, key: str) -> BinaryIO | None:
        """Return the entry stored under ``key``, open for reading, or ``None``; a hit counts as a use.

        Entries of :meth:`put_file` have no checksum; their reader must check them.
        """
        if not self.limit:
            return None
        path = self._path(key)
        try:
            # Opening a FIFO would wait for a writer.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb")
        except OSError:
            return None
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or not _owned(found) or found.st_mode & _OTHERS_WRITE:
            file.close()
            self.drop(key)
            return None
        with contextlib.suppress(OSError):  # the cache cannot be written: only the order of eviction is affected
            os.utime(path)
        return file

    def drop(self, key: str) -> None:
        """Remove an entry that turned out to be damaged."""
        path = self._path(key)
        _log.warning("removing a damaged cache entry: %s", path)
        with contextlib.suppress(OSError):
            path.unlink()

    def put_file(self, key: str, size: int, write: Callable[[BinaryIO], object]) -> Path | None:
        """Store the file of about ``size`` bytes that ``write`` writes, and return its path; ``None`` if that is more
        than the limit, or than half of the free disk space. A section holds either files or entries of :meth:`put`."""
        path = self._path(key)
        if size > self.limit:
            return None
        try:
            make_folders(path.parent)
            if size > shutil.disk_usage(path.parent).free // 2:
                return None
        except OSError as error:
            self._warn_unwritable(error)
            return None

        return path if self._write(path, write, sync=True) else None

    def _write(self, path: Path, write: Callable[[BinaryIO], object], sync: bool = False) -> bool:
        """Create ``path`` for this user only: an entry that others can write to is not used."""
        try:
            make_folders(path.parent)
            with atomic_file(path, 0o600, sync) as file:
                write(file)
                _room[self.root] = _room.get(self.root, 0) - file.tell()
        except OSError as error:
            self._warn_unwritable(error)
            return False
        return True

    def unwritable(self) -> str:
        """Return why nothing can be written into the cache, or '' if it can, or is not used at all."""
        if not self.limit:
            return ""
        try:
            make_folders(self.root)
            with tempfile.TemporaryFile(dir=self.root):
                return ""
        except OSError as error:
            return str(error)

    def _warn_unwritable(self, error: OSError) -> None:
        self._warn(f"the cache in {self.root} cannot be written ({error}); set NPU_CACHE_DIR")

    def _warn(self, message: str) -> None:
        """Warn once per root and process."""
        if self.root not in _warned:
            _warned.add(self.root)
            _log.warning("%s", message)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, path) of all entries, and remove temporary files that a killed process left."""
        found = []
        for folder in self.root.glob("??"):
            remove_leftovers(folder)
        for path in self.root.glob("??/*"):
            with contextlib.suppress(OSError):  # another process may have removed it
                entry = path.stat()
                if not is_temporary(path.name):
                    found.append((entry.st_mtime, entry.st_size, path))
        return found

    def size(self) -> int:
        """Return the bytes in use."""
        return sum(size for _, size, _ in self._entries())

    def trim(self) -> None:
        """Remove the entries used longest ago until the limit holds; call it once after a batch of :meth:`put`. A cache
        that stores nothing keeps what others stored there. Entries are counted only if those that this process stored
        since it last counted them could matter: there may be thousands."""
        if not self.limit or _room.get(self.root, 0) > 0:
            return
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries) if total > self.limit else ():
            if total <= self.limit * _TRIM_TO:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        _room[self.root] = (self.limit - total) // _SHARE


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _seal(key: str, data: bytes | memoryview) -> bytes:
    """Return the header of an entry: a checksum of its key and its contents."""
    digest = hashlib.sha256(hashlib.sha256(key.encode()).digest())
    digest.update(data)
    return _MAGIC + digest.digest()


def make_folders(path: Path) -> None:
    """Create ``path`` and missing directories above it, for this user only."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def private_folder(name: str) -> Path | None:
    """Return the folder ``name`` of ``NPU_CACHE_DIR`` for another program's files, created if absent; None if it cannot
    be created or others can write to it."""
    folder = env.cache_dir() / name
    try:
        make_folders(folder)
    except OSError:
        return None
    return None if obstacle(folder) else folder


def open_cache(section: str, limit: int | None = None) -> Cache:
    """Return the cache in subdirectory ``section`` of ``NPU_CACHE_DIR``. Each section has a limit of its own: ``limit``
    bytes, or ``NPU_CACHE_SIZE``."""
    return Cache(env.cache_dir() / section, env.cache_size() if limit is None else limit)
