"""Runs that meet: threads, forked children, signal handlers. Tests that could hang run in a process with a timeout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60

_SETUP = """
import os, signal, sys, threading, time
import numpy as np
from npu_compiler.support.errors import BackendError
from npu_runtime import CPUBackend, Executor
from tests.support import handmade

program = handmade.program()
executor = Executor(program, handmade.weights(), CPUBackend(2), "main")
given, wanted = handmade.inputs(), handmade.expected(handmade.inputs())

def check(results):
    for name, array in wanted.items():
        assert np.allclose(results[name], array, rtol=2e-7, atol=1e-6)
"""


def run_script(text: str) -> str:
    """What a Python process prints that has a model of two threads; it must end in time and without an error."""
    script = _SETUP + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
def test_a_child_forked_during_a_run_can_run() -> None:
    printed = run_script(
        """
        # Another thread is inside of a run at the very moment of the fork: it holds the lock until `leave` is set.
        inside, leave = threading.Event(), threading.Event()
        launch = executor.failure

        def hold(status):
            inside.set()
            leave.wait()
            return launch(status)

        executor.failure = hold
        bad = {**given, "idx": given["idx"] + 100}

        def work():
            try:
                executor.run(bad)
            except Exception as error:
                print("thread:", type(error).__name__)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            check(executor.run(given))
            executor.state.reset()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        leave.set()
        thread.join()
        check(executor.run(given))
        """
    )
    assert printed == "thread: InputError\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
def test_children_forked_while_threads_run_the_model() -> None:
    run_script(
        """
        stop = threading.Event()

        def work():
            while not stop.is_set():
                check(executor.run(given))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                check(executor.run(given))
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        stop.set()
        for thread in threads:
            thread.join()
        """
    )


def test_a_signal_handler_that_runs_the_model_gets_an_error() -> None:
    printed = run_script(
        """
        # Python runs the handler in the main thread, which is inside of a run when failure() is called.
        answers, failure = [], executor.failure

        def handler(number, frame):
            for call in (lambda: executor.run(given), executor.bind(given, [np.empty((3, 4), "f4"), np.empty(3, "f4")]),
                         executor.state.reset):
                try:
                    call()
                except BackendError as error:
                    answers.append(str(error).split(",")[0])

        def interrupted(status):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            return failure(status)

        signal.signal(signal.SIGUSR1, handler)
        executor.failure = interrupted
        try:
            executor.run({**given, "idx": given["idx"] + 100})
        except Exception as error:
            print(type(error).__name__)
        print(len(answers), set(answers))
        check(executor.run(given))  # the lock is free again
        """
    )
    assert printed == "InputError\n3 {'the model is already running in this thread'}\n"


def test_alarms_that_run_the_model() -> None:
    run_script(
        """
        refused = ran = 0

        def handler(number, frame):
            global refused, ran
            try:
                check(executor.run(given))
                ran += 1
            except BackendError:
                refused += 1

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        end = time.monotonic() + 20
        while refused + ran < 200 and time.monotonic() < end:
            check(executor.run(given))
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert refused + ran >= 1
        check(executor.run(given))
        """
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
def test_a_child_forked_after_a_build_can_build() -> None:
    """PyTorch's OpenMP threads do not exist in the child, so a build must not have run the model eagerly."""
    run_script(
        """
        import torch, npusim

        def build(channels):
            layers = torch.nn.Sequential(torch.nn.Conv2d(3, channels, 3), torch.nn.ReLU()).eval()
            return npusim.build(layers, (torch.zeros(1, 3, 64, 64),), threads=2)

        model, x = build(32), np.zeros((1, 3, 64, 64), np.float32)
        child = os.fork()
        if child == 0:
            signal.alarm(50)
            assert build(48)(x).shape == (1, 48, 62, 62) and model(x).shape == (1, 32, 62, 62)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )
