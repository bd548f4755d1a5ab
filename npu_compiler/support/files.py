"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

_SHOWN = 60  # characters of a file's name in that of its temporary file: names have at most 255 bytes
_TEMPORARY = re.compile(r"\..*\.(\d+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_DEAD_S, _STALE_S = 600.0, 3600.0  # seconds after which a temporary file is left over: of a dead process, of any


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` so that ``path`` always holds the old file or all of the new one. Raises ``OSError``."""
    with atomic_file(path) as file:
        file.write(data)


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files that belong together: all of their data is on the disk before the first file is replaced, so a full
    disk leaves the old ones. Raises ``OSError`` with the path of the file as its ``filename``."""
    with contextlib.ExitStack() as stack:
        for path, data in files.items():
            try:
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(atomic_file(path))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)
                raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write that replaces ``path`` at the end of the block. If the block raises, ``path`` is unchanged.
    A symbolic link stays; the file that it leads to is replaced. Raises ``OSError``, also if there is a device or
    another thing that is not a regular file.

    ``mode``: permissions, before the umask. ``sync``: wait for the disk before the file is renamed to ``path``.
    Temporary files of earlier writers of ``path`` that were killed are removed.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if target.is_dir() else "it exists and is not a regular file", str(path))
    prefix = f".{target.name[:_SHOWN]}."
    temporary = target.parent / f"{prefix}{os.getpid()}.{secrets.token_hex(6)}.tmp"
    # Not tempfile: its files have mode 0600, and reading the umask sets it to 0 for a moment in the whole process.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    remove_leftovers(target.parent, prefix)


def is_temporary(name: str) -> bool:
    """Whether a file's name is that of a temporary file of :func:`atomic_file`."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: Path, prefix: str = ".") -> None:
    """Remove temporary files whose writer has ended. Process ids of other machines and containers tell nothing, so only
    files that were not written to for a while are removed."""
    with contextlib.suppress(OSError):  # another process removed it, or it belongs to another user
        for entry in os.scandir(folder):
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or not entry.name.startswith(prefix):
                continue
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if age > _STALE_S or (age > _DEAD_S and not _alive(int(found[1]))):
                os.unlink(entry)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return True
