"""Renders chat templates in a process of its own, which :mod:`npu_runtime.llm.chat_template` starts as a script.

A template comes with a model's files, so it is a stranger's program. Jinja's sandbox keeps it away from files and from
Python's internals, but not from endless loops or texts of gigabytes. This process has bounded memory and a timer that
ends it. Requests and answers are lines of JSON; the process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any

CPU_SECONDS = 1.0  # of one rendering, which takes milliseconds
MEMORY = 1 << 30
MOST_CHARACTERS = 1 << 24


def main() -> None:
    sys.path[:] = json.loads(sys.stdin.readline())
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):  # macOS knows neither; there the timer alone holds
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
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, also inside of native code
        answer = json.dumps(_render(environment, **json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def _render(environment: Any, template: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text: str = environment.from_string(template).render(variables)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template can raise whatever Python can
        return {"error": f"{str(error)[:1000] or type(error).__name__}"}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it makes {len(text)} characters of them"}
    return {"text": text}


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
