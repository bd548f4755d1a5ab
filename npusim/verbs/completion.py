"""``npusim completion``: a script with which a shell completes the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from npu_compiler.support.errors import InputError

from ..console import Result

_FILES = {"model", "program", "text", "weights", "output", "compare"}  # besides those whose metavar has FILE in it


def run(args: argparse.Namespace) -> Result:
    """Show the script for a shell. Raises ``InputError`` without the package shtab."""
    try:
        import shtab
    except ImportError:
        raise InputError("completion needs the package shtab: pip install 'npusim[cli]'") from None
    from ..parser import parser

    top = parser()
    for action in _actions(top):
        shown = str(action.metavar or "")
        if action.dest == "dir" or shown == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in _FILES or "FILE" in shown:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(top, shell=args.shell)
    return Result({"shell": args.shell, "script": script}, [script.rstrip("\n")])


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action
