"""Shared by the examples: a wrong argument or file ends them with one line and exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from npu_compiler.support.errors import NPUError
from npu_compiler.support.text import printable

try:
    import PIL  # noqa: F401
    import tokenizers  # noqa: F401
    import torch  # noqa: F401
except ImportError as missing:
    print(f"the examples need {missing.name}: pip install 'npusim[examples]'", file=sys.stderr)
    raise SystemExit(2) from None


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parse the command line and run ``main`` with it."""
    args = parser.parse_args()
    try:
        main(args)
    except (NPUError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)


def show(text: str, end: str = "\n") -> None:
    """Print generated text; control characters, which random weights also generate, are shown as escapes."""
    print("\n".join(map(printable, text.split("\n"))), end=end, flush=True)


def positive(text: str) -> int:
    """Return a positive whole number from an argument."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
