"""Renders chat templates in a separate process, which :mod:`npu_runtime.llm.chat_template` starts as a script.

A template comes with a model's files, so it is an untrusted program. Jinja's sandbox denies it files and Python's
internals, but does not bound its time or memory. This process therefore has a limit of memory and a timer that ends it.
Requests and answers are lines of JSON; the process ends at the end of its standard input.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any

CPU_SECONDS = 1.0  # limit of one rendering, which usually takes milliseconds
MEMORY = 1 << 30
MAX_CHARACTERS = 1 << 24


def main() -> None:
    """Answer requests until standard input ends. Its first line is ``sys.path``."""
    sys.path[:] = json.loads(sys.stdin.readline())
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):  # macOS supports neither; only the timer works there
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (MEMORY, MEMORY))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process even inside native code
        answer = json.dumps(_render(environment, **json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def _render(environment: Any, template: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text: str = environment.from_string(template).render(variables)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template can raise any exception
        return {"error": f"{str(error)[:1000] or type(error).__name__}"}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"}
    return {"text": text}


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
