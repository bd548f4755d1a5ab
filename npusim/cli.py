"""The ``npusim`` command line. It only imports its parser; each verb imports what it needs."""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from .parser import INTERNAL, OK, POLICY, SCHEMA_VERSION, USER_ERROR, Parser, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    _prepare_streams()
    top = parser()
    Parser.as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    args, unknown = top.parse_known_args(argv)
    if unknown:
        (args.parser if args.verb else top).unknown(unknown)
    if args.version:
        from npu_compiler import __version__

        print(f"npusim {__version__}")
        return OK
    if args.verb is None:
        top.print_help()
        return USER_ERROR
    args.given = _given(args)
    try:
        return _finish(_run(args), args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        _drop_output()
        return OK
    except OSError as error:  # the output goes to a full disk
        _drop_output()
        print(f"npusim: {error.filename or 'the output'} cannot be written: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR


def _prepare_streams() -> None:
    """Open what the caller closed. Text that an encoding cannot express is escaped on output; on input, it passes, and
    the command that reads it refuses it."""
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)


def _given(args: argparse.Namespace) -> dict[str, str]:
    """Return the options that differ from their defaults, by the name of their attribute."""
    actions = [a for a in args.parser._actions if a.option_strings and hasattr(args, a.dest)]
    return {a.dest: a.option_strings[0] for a in actions if getattr(args, a.dest) != a.default}


def _drop_output() -> None:
    """Let the interpreter write what is left of the output to nowhere when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> Any:
    from npu_compiler.support import env, log
    from npu_compiler.support.errors import CompileError, NPUError

    from .bars import progress_bars
    from .console import Result

    try:
        least = logging.ERROR if args.quiet else log.level(max(args.verbose, env.debug()))
        bars = nullcontext() if args.quiet or args.json or args.verbose else progress_bars()
        with warnings.catch_warnings(), log.shown(least), bars:
            warnings.showwarning = _warn
            return import_module(f"npusim.verbs.{args.verb}").run(args)
    except NPUError as error:
        refused = isinstance(error, CompileError) and not getattr(args, "fallback", True) and bool(error.reasons)
        code = POLICY if refused else USER_ERROR
        return Result(_error(error, getattr(error, "reasons", [])), [f"npusim: {error}"], code)
    except BrokenPipeError:  # not a bug: main() handles it
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # not a bug either: files are written by name, so it is the output
        if args.verbose or os.environ.get("NPU_DEBUG", "0") not in ("", "0"):
            raise
        text = f"npusim: internal error: {type(error).__name__}: {error}\n-v shows where; please report it"
        return Result(_error(error, []), [text], INTERNAL)


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning, which is about the caller's data, as one line without the place where it was raised. What
    libraries will change is not about that data."""
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | FutureWarning):
        print(f"npusim: warning: {message}", file=sys.stderr)


def _error(error: Exception, reasons: Sequence[Any]) -> dict[str, Any]:
    listed = [{"node": n, "op": o, "rule": r.rule, "detail": r.detail, "fix": r.fix} for n, o, r in reasons]
    return {"error": {"type": type(error).__name__, "message": str(error), "reasons": listed}}


def _finish(result: Any, args: argparse.Namespace) -> int:
    from .console import show

    if args.json:
        from npu_compiler.support.text import json_safe

        data = {"schema_version": SCHEMA_VERSION, "command": args.verb, **result.data}
        print(json.dumps(json_safe(data), allow_nan=False))
    else:
        show(result.blocks, sys.stderr if "error" in result.data else sys.stdout)
    sys.stdout.flush()
    code: int = result.code
    return code


if __name__ == "__main__":
    sys.exit(main())
