"""Work that several processes or threads want at once is done once, and a dead process holds up no other one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_compiler.support.cache import Cache
from npu_compiler.support.progress import listening
from npu_compiler.support.turns import turn

pytest.importorskip("fcntl")

HOLDER = """
import sys, time
from pathlib import Path
from npu_compiler.support.turns import turn
with turn(Path(sys.argv[1]), "work"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_an_entry_that_threads_miss_together_is_made_once(tmp_path: Path) -> None:
    made, start = [], threading.Barrier(4)

    def find() -> bytes | None:
        cache = Cache(tmp_path, 10**6)
        start.wait()
        with cache.turn("key", "work"):
            if cache.get("key") is None:
                time.sleep(0.05)
                made.append(cache.put("key", b"data"))
        return cache.get("key")

    texts: set[str] = set()
    with listening(lambda step: texts.add(step.text)), ThreadPoolExecutor(4) as pool:
        found = [pool.submit(find) for _ in range(4)]
        assert [f.result() for f in found] == [b"data"] * 4
    assert len(made) == 1 and texts == {"waiting for another process or thread: work"}
    assert not list((tmp_path / "turns").iterdir())
    assert Cache(tmp_path, 10**6).size() > 0


def test_a_process_that_dies_releases_its_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lock"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], env=environment, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with caplog.at_level(logging.WARNING), turn(path, "compiling small", wait=0.1):
            assert path.exists()  # the holder's: this block runs without it
        assert "still busy with this after 0 s: compiling small" in caplog.text and str(path) in caplog.text
        caplog.clear()
        threading.Timer(0.1, holder.kill).start()
        with turn(path, "work", wait=30):
            assert holder.wait(10) != 0
    assert not path.exists() and not caplog.text


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with turn(path, "work"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        start = time.monotonic()
        with turn(path, "work", wait=20):
            assert time.monotonic() - start < 10
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_error_releases_the_lock_and_folders_without_locks_cost_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong"), turn(tmp_path / "lock", "work"):
        raise ValueError("wrong")
    assert not list(tmp_path.iterdir())
    with turn(tmp_path / "none" / "lock", "work"):
        assert not list(tmp_path.iterdir())
    with Cache(tmp_path / "off", 0).turn("key", "work"):
        assert not list(tmp_path.iterdir())
