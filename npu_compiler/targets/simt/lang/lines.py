"""The text of a C++ function under construction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Lines:
    """Statements under construction, with indentation."""

    def __init__(self, depth: int = 1):
        self.text: list[str] = []
        self.depth = depth

    def add(self, *lines: str) -> None:
        """Append ``lines`` with the current indentation."""
        self.text += ["  " * self.depth + line for line in lines]

    def declare(self, kind: str, name: str, value: str = "") -> None:
        """Declare a variable of C++ type ``kind``."""
        self.add(f"{kind} {name}{' = ' if value else ''}{value};")

    def let(self, kind: str, name: str, value: str) -> None:
        """Declare a constant of C++ type ``kind``."""
        self.declare(f"const {kind}", name, value)

    def assign(self, place: str, value: str) -> None:
        """Assign ``value`` to ``place``."""
        self.add(f"{place} = {value};")

    def call(self, function: str, *arguments: str) -> None:
        """Call ``function`` as a statement."""
        self.add(f"{function}({', '.join(arguments)});")

    def return_value(self, value: str) -> None:
        """Return ``value`` from the C++ function."""
        self.add(f"return {value};")

    def return_if(self, condition: str) -> None:
        """Return from the C++ function if ``condition`` holds."""
        self.add(f"if ({condition}) return;")

    def when(self, condition: str) -> AbstractContextManager[None]:
        """Open the block of an ``if``."""
        return self.block(f"if ({condition}) {{")

    def method(self, head: str) -> AbstractContextManager[None]:
        """Open the body of a struct's method."""
        return self.block(f"INLINE {head} {{")

    def unrolled(self, times: int = 0) -> None:
        """Unroll the following loop ``times`` times, or completely if 0."""
        self.add(f"#pragma unroll {times}" if times else "#pragma unroll")

    @contextmanager
    def block(self, header: str, footer: str = "}") -> Iterator[None]:
        """Open an indented block between the lines ``header`` and ``footer``."""
        self.add(header)
        self.depth += 1
        yield
        self.depth -= 1
        self.add(footer)
