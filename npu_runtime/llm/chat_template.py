"""Renders conversations as prompts with the model's own Jinja template, in a process with bounded time and memory."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from npu_compiler.support.errors import InputError

from .chat_worker import CPU_SECONDS

Message = Mapping[str, Any]

# Real time allows for a busy machine; its limit also ends a worker that only waits.
_WALL_SECONDS = 4 * CPU_SECONDS


def render_chat(template: str | None, messages: Sequence[Message], special: Mapping[str, str]) -> str:
    """Return the prompt of a conversation, which ends where the assistant's answer begins.

    Args:
        template: the model's Jinja template. It runs in a sandbox, in a process with limits of time and memory.
        messages: {'role': …, 'content': …}; values must be what JSON can hold.
        special: variables of the template: 'bos_token' and the like.

    Raises:
        InputError: there is no template, a message is malformed, or the template fails or exceeds a limit.
    """
    if template is None:
        raise InputError(
            "this model has no chat template; leave out --chat, or pass a prompt as text or token ids to generate()"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"messages[{i}]: expected a dict with 'role' and 'content', got {message!r}")
    if not messages:
        raise InputError("the conversation has no messages")
    if find_spec("jinja2") is None:
        raise InputError("chat templates need the package jinja2: pip install 'npusim[llm]'")
    variables = {"messages": [dict(m) for m in messages], "add_generation_prompt": True, **special}
    try:
        request = json.dumps({"template": template, "variables": variables})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the messages hold something else than text, numbers, lists and dicts: {error}") from None
    answer = _worker.ask(request)
    if "error" in answer:
        raise InputError(f"the model's chat template refused the messages: {answer['error']}")
    return answer["text"]


class _Worker:
    """A process that renders templates, one at a time. It is started at its first use, in the child of a fork, and
    after a template exceeded a limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, request: str) -> dict[str, str]:
        """Return the worker's answer, or an 'error' if it does not answer in time."""
        with self._lock:
            try:
                stdin, stdout = self._running()
                stdin.write(request.encode() + b"\n")
                stdin.flush()
                line = _read_line(stdout, time.monotonic() + _WALL_SECONDS)
            except BaseException as error:  # a half-read answer must not become the next request's
                self.close()
                if isinstance(error, OSError):
                    raise InputError(f"chat templates cannot be rendered: {error}") from None
                raise
            if not line.endswith(b"\n"):
                return {"error": self._why_silent()}
            answer: dict[str, str] = json.loads(line)
            return answer

    def _running(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is None or self._process.poll() is not None:
            script = Path(__file__).with_name("chat_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C goes to the parent only
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([p for p in sys.path if p]).encode() + b"\n")
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        return stdin, stdout

    def _why_silent(self) -> str:
        assert self._process is not None
        process = self._process
        try:
            status = process.wait(0.1)
        except subprocess.TimeoutExpired:
            status = -signal.SIGPROF
        self.close()
        if status == -signal.SIGPROF:
            return f"it takes more than {CPU_SECONDS:g} seconds"
        return f"its process ended with status {status}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _forget(self) -> None:
        """In the child of a fork, give up the worker: it belongs to the parent."""
        self._lock, self._process = threading.Lock(), None


def _read_line(stream: IO[bytes], deadline: float) -> bytes:
    """Return the bytes up to a newline, the end of the stream or the deadline."""
    chunks: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            chunk = os.read(stream.fileno(), 1 << 16)
            chunks.append(chunk)
            if not chunk or chunk.endswith(b"\n"):
                break
    return b"".join(chunks)


_worker = _Worker()
atexit.register(_worker.close)
