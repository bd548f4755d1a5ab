"""A kind of its own for the tests of the harness: its cases fail in every way there is."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from npu_compiler.support.errors import InputError


class _Panic(BaseException):
    """As Rust's panics arrive in Python."""


def case(rng: random.Random, folder: Path) -> None:
    assert not list(folder.iterdir())
    (folder / "file").write_bytes(rng.randbytes(4))
    match rng.randrange(40):
        case 0:
            raise KeyError("untyped")
        case 1:
            raise _Panic("untyped")
        case 2:
            bytearray(64 << 30)
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 4:
            os._exit(3)
        case 5:
            while True:
                time.sleep(0.01)
        case n if n < 20:
            raise InputError("typed")
