"""Compiles a checkpoint in a process of its own, which returns the memory that PyTorch and the compiler take.

Graphs of language models are captured with PyTorch, whose libraries stay in memory once they are imported. A process
that has not imported them, as ``npusim generate``, lets another one compile and keeps the program only. The messages of
that process are msgpack: [number, text, total, unit, done, finished] when a step of progress changes, and in the end
the program. Its other output goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.artifact.serialize import program_from_plain, program_to_plain
from npu_compiler.support import progress
from npu_compiler.support.errors import InputError
from npu_compiler.target_config import target_config
from npu_compiler.weights.format import Weights

if TYPE_CHECKING:
    from npu_compiler.frontend.llm import Checkpoint

_log = logging.getLogger(__name__)

# The process imports from the same places as its parent, which an interrupt ends, and which ends this one.
_MAIN = f"""
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.stdin.readline())
from {__name__} import main
main()
"""
_MAX_MESSAGE = 2**31 - 1  # bytes; a program holds its machine code


@dataclass(frozen=True)
class CompileOptions:
    """What a program depends on besides the checkpoint; see :meth:`LLM.load` and :class:`Loader`."""

    target: str
    max_len: int
    scoring: bool
    speed_over_memory: bool
    kv_cache: str | None
    weights: Weights
    activations: str | None = None


def compile_checkpoint(checkpoint: Checkpoint, options: CompileOptions) -> CompiledProgram:
    """Compile the entry points of a language model in this process.

    Raises ``InputError`` if PyTorch is not installed, else as :func:`npu_compiler.compile`.
    """
    try:
        from npu_compiler.frontend.llm import llm_graphs, scoring_graphs
    except ImportError:
        raise InputError(
            f"{checkpoint.path} must be compiled once, which needs PyTorch: pip install 'npusim[torch]', or compile it "
            "elsewhere with npusim compile and load the .npubin"
        ) from None
    from npu_compiler.pipeline import compile_entries

    wanted, config = target_config(options.target), checkpoint.config
    if options.scoring:
        graphs = scoring_graphs(config, max_len=options.max_len, kv_cache=options.kv_cache)
    else:
        graphs = llm_graphs(
            config, max_len=options.max_len, chunks=wanted.chunks, device_sampling=wanted.asynchronous,
            kv_cache=options.kv_cache,
        )  # fmt: skip
    return compile_entries(
        graphs, options.target, weights=options.weights, speed_over_memory=options.speed_over_memory,
        activations=options.activations,
    )  # fmt: skip


def compile_apart(path: Path, dtype: str | None, options: CompileOptions) -> CompiledProgram | None:
    """Compile a checkpoint in another process.

    Returns None if that would save no memory, because PyTorch is imported here already, or if the process fails. A
    caller that compiles then itself gets the same error, with all that belongs to it.
    """
    if not saves_memory():
        return None
    request = json.dumps([str(path), dtype, asdict(options)])
    try:
        process = subprocess.Popen([sys.executable, "-c", _MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        _log.debug("cannot start a process that compiles: %s", error)
        return None
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{json.dumps(sys.path)}\n{request}\n".encode())
            process.stdin.flush()
            program = _answer(process.stdout)
        except BrokenPipeError:  # it ended early
            program = None
        finally:  # an interrupt must not leave it behind
            process.kill()
    if program is None:
        _log.debug("the process that compiles %s failed; this process compiles it", path)
    return program


def saves_memory() -> bool:
    """Whether a process that compiles can be started, and this one has not imported PyTorch."""
    frozen = getattr(sys, "frozen", False) or not sys.executable  # then the executable is not Python's
    return "torch" not in sys.modules and find_spec("torch") is not None and not frozen


def _answer(stdout: Any) -> CompiledProgram | None:
    with progress.relaying() as relay:
        for message in msgpack.Unpacker(stdout.raw, max_buffer_size=_MAX_MESSAGE):
            if isinstance(message, list):
                relay(*message)
            else:
                return program_from_plain(message, CompiledProgram)
    return None


def main() -> None:
    """Answer the request of :func:`compile_apart` on standard input."""
    path, dtype, options = json.loads(sys.stdin.readline())
    answers, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from npu_compiler.frontend.llm import open_checkpoint

    numbers: dict[progress.Step, int] = {}

    def send(message: object) -> None:
        answers.write(msgpack.packb(message))
        answers.flush()

    def tell(step: progress.Step) -> None:
        with lock:
            number = numbers.setdefault(step, len(numbers))
            send([number, step.text, step.total, step.unit, step.done, step.finished])

    try:
        with progress.listening(tell):
            program = compile_checkpoint(open_checkpoint(Path(path), dtype), CompileOptions(**options))
    except Exception:  # the parent compiles again, and reports it
        sys.exit(1)
    send(program_to_plain(program))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
