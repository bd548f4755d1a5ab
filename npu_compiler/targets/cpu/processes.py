"""Runs compilers in a temporary folder. Neither they nor the folder outlive the process that started them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...support.cache import private_folder
from ...support.errors import ToolchainError

# The first process of the group. Its standard input is closed when this process ends, even if it is killed. It sends
# SIGTERM to the compilers first, so that they remove their temporary files.
_WATCHDOG = """
read -r line
trap '' TERM
kill -TERM 0
rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }
kill -KILL 0
"""


@dataclass(frozen=True)
class Finished:
    """The exit status and the output of a process that has ended."""

    status: int
    stdout: str
    stderr: str

    def first_error(self) -> str:
        """Return the first line of the output that reports an error, or the exit status."""
        lines = [line.strip() for line in (self.stderr + self.stdout).splitlines() if line.strip()]
        marked = [line for line in lines if re.search(r"\berror\b|undefined|cannot find", line, re.IGNORECASE)]
        marked = [line for line in marked if not line.startswith("collect2")] or marked
        return (marked or lines or [f"exit status {self.status}"])[0]


class Workplace:
    """A temporary folder and the compilers that run in it, all of one process group; see :func:`workplace`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._stopped = ""  # the reason why no further process may start
        try:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG, "sh", str(folder)], process_group=0,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise ToolchainError(f"cannot run /bin/sh: {error.strerror or error}") from None

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        zig_cache = str(private_folder("zig") or self.folder / "zig")
        own = {"ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache}
        environ = {**own, **os.environ, "LC_ALL": "C", "TMPDIR": str(self.folder)}
        try:
            return subprocess.Popen(
                argv, cwd=self.folder, env=environ, text=True, errors="replace", process_group=self._watchdog.pid,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise ToolchainError(f"cannot run {argv[0]}: {error.strerror or error}") from None

    def run(self, argv: Sequence[str], timeout: float) -> Finished:
        """Run a compiler and wait until it ends. Several threads may call this.

        Raises ``ToolchainError`` if it cannot be started, does not end within ``timeout`` seconds, or was stopped.
        """
        with self._lock:
            if self._stopped:
                raise ToolchainError(self._stopped)
            process = self._start(argv)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            self.stop(f"no end after {timeout:g} s: {shlex.join(argv)}" if late else "interrupted")
            process.communicate()
            if late:
                raise ToolchainError(self._stopped) from None
            raise
        if self._stopped:
            raise ToolchainError(self._stopped)
        return Finished(process.returncode, stdout, stderr)

    def stop(self, reason: str) -> None:
        """Kill all compilers. From now on, :meth:`run` raises ``ToolchainError`` with the first reason."""
        with self._lock:
            if not self._stopped:
                self._stopped = reason
                with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
                    os.killpg(self._watchdog.pid, signal.SIGKILL)
                self._watchdog.communicate()


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """A temporary folder to run compilers in. Compilers that still run are killed and the folder is removed when the
    ``with`` statement ends, and also when this process is killed."""
    with tempfile.TemporaryDirectory(prefix="npu-") as folder:
        place = Workplace(Path(folder))
        try:
            yield place
        finally:
            place.stop("the build has ended")
