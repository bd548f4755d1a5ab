"""An on-disk store of compiled things: bytes by key, safe under concurrent processes, bounded in size.

Entries are written to a temporary file and renamed, so a reader sees all of an entry or none. Each carries a checksum:
one that was cut short or altered reads as absent and is removed. Nothing here is ever an error for the caller: a cache
directory that cannot be used costs a recompilation and one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from . import env

_log = logging.getLogger(__name__)

_MAGIC = b"NPUCACH1"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_STALE_TEMPORARY_S = 3600.0
_TRIM_TO = 0.9


class Cache:
    """Bytes by key under ``root``, at most ``limit`` bytes of them; ``limit`` 0 stores nothing.

    A key is any string; it is hashed. When the bound is passed, the entries used longest ago go first.
    """

    def __init__(self, root: Path, limit: int):
        self.root = root
        self.limit = limit
        self._warned = False

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.root / digest[:2] / digest[2:]

    def get(self, key: str) -> bytes | None:
        """The bytes stored under ``key``, or ``None``; a hit counts as a use."""
        if not self.limit:
            return None
        path = self._path(key)
        try:
            blob = path.read_bytes()
        except OSError:
            return None
        data = blob[_HEADER:]
        if blob[:_HEADER] != _MAGIC + hashlib.sha256(data).digest():
            _log.warning("removing a damaged cache entry: %s", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # only the order of eviction suffers
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store ``data``; replaces atomically what was there."""
        if not self.limit or len(data) + _HEADER > self.limit:
            return
        self._write(self._path(key), lambda file: file.write(_MAGIC + hashlib.sha256(data).digest() + data))

    def file(self, key: str) -> Path | None:
        """The file stored by :meth:`put_file` under ``key``, or ``None``; a hit counts as a use. It has no checksum:
        the reader maps what it holds, and checks what it must."""
        path = self._path(key)
        try:
            os.utime(path)
        except OSError:
            return None
        return path if self.limit else None

    def put_file(self, key: str, size: int, write: Callable[[BinaryIO], object]) -> Path | None:
        """Store what ``write`` puts into a file, about ``size`` bytes, and return its path; ``None`` if that is more
        than the bound or half of what is free on the disk. A section holds either files or the bytes of :meth:`put`."""
        path = self._path(key)
        if size > self.limit:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if size > shutil.disk_usage(path.parent).free // 2:
                return None
        except OSError as error:
            self._warn(error)
            return None

        def write_through(file: BinaryIO) -> None:  # to the disk before it gets its name: no checksum will tell
            write(file)
            file.flush()
            os.fsync(file.fileno())

        return path if self._write(path, write_through) else None

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> bool:
        """Create ``path`` whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    write(file)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the cache in %s cannot be written (%s); set NPU_CACHE_DIR", self.root, error)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of all entries; temporary files that a killed process left behind are removed."""
        found = []
        for path in self.root.glob("??/*"):
            with contextlib.suppress(OSError):  # another process may have removed it
                stat = path.stat()
                if not path.name.startswith("tmp-"):
                    found.append((stat.st_mtime, stat.st_size, path))
                elif stat.st_mtime < time.time() - _STALE_TEMPORARY_S:
                    path.unlink()
        return found

    def size(self) -> int:
        """Bytes in use."""
        return sum(size for _, size, _ in self._entries())

    def trim(self) -> None:
        """Enforce the bound; call it once after a batch of :meth:`put`."""
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        if total <= self.limit:
            return
        for _, size, path in sorted(entries):
            if total <= self.limit * _TRIM_TO:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def open_cache(section: str, limit: int | None = None) -> Cache:
    """The cache in subdirectory ``section`` of ``NPU_CACHE_DIR``; each section is bounded by itself, by ``limit`` bytes
    or
    ``NPU_CACHE_SIZE``."""
    return Cache(env.cache_dir() / section, env.cache_size() if limit is None else limit)
