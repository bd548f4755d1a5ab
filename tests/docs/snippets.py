"""The code blocks of a page, and what it takes to run them.

A block is run unless the line before it says why not, in a comment that readers of the page do not see:

    <!-- not run: needs an NVIDIA GPU -->       it is parsed: Python compiles, the command line has these options
    <!-- quoted from: tests/porting/rows8.py -->    its lines are in that file, in this order

All blocks of a page share a folder and, if they are Python, a namespace, in the order of the page. ``console`` blocks
have commands after a ``$`` and what they print, in which … stands for any text; ``bash`` blocks have commands alone.
The commands are ``npusim`` and, in ``console`` blocks, ``cat`` of a pattern of files.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npusim import cli

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>.*)$")
_MARK = re.compile(r"<!-- (not run|quoted from): (.+?) -->")


@dataclass(frozen=True)
class Snippet:
    """A code block: its page, the line of its fence, its language, its text, and the comment before it, if any."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""  # 'not run', 'quoted from'
    reason: str = ""  # … and what follows the colon

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    """The code blocks of a page in order."""
    found: list[Snippet] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: tuple[int, re.Match[str]] | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start = number, fence
            continue
        first, opening = start
        start = None
        indent = len(opening["indent"])
        text = "\n".join(x[indent:] for x in lines[first + 1 : number]) + "\n"
        mark = _MARK.fullmatch(lines[first - 1].strip()) if first else None
        found.append(Snippet(page, first + 1, opening["language"], text, *(mark.groups() if mark else ())))
    assert start is None, f"{page}:{start and start[0] + 1}: this block has no end"
    return found


def prose(page: Path) -> list[str]:
    """The lines outside of code blocks."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return kept


def commands(snippet: Snippet) -> Iterator[tuple[list[str], str | None]]:
    """(words, expected output) of every command of a shell block; the output is None in ``bash`` blocks."""
    text = snippet.text.replace("\\\n", " ")
    if snippet.language == "bash":
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                yield words, None
        return
    assert text.startswith("$ "), f"{snippet.where}: a console block begins with '$ '"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield shlex.split(line, comments=True), output


@dataclass
class Page:
    """Where the blocks of a page run: a folder and a namespace. ``counts``: blocks executed, parsed, quoted, shown."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    counts: dict[str, int] = field(default_factory=dict)

    def check(self, snippet: Snippet) -> None:
        """Run, parse or compare one block, as its language and its comment ask for."""
        kind = self._check(snippet)
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _check(self, snippet: Snippet) -> str:
        if snippet.mark == "quoted from":
            _compare(snippet)
            return "quoted"
        match snippet.language:
            case "python":
                return self._python(snippet)
            case "bash" | "console":
                for words, expected in commands(snippet):
                    self._command(snippet, words, expected)
                return "parsed" if snippet.mark else "executed"
            case "json":
                json.loads(snippet.text)
            case "toml":
                tomllib.loads(snippet.text)
            case "":
                return "shown"  # a figure in characters
            case other:
                raise AssertionError(f"{snippet.where}: quote {other} code from a file, in a comment before the block")
        return "parsed"

    def _python(self, snippet: Snippet) -> str:
        tree = ast.parse(snippet.text, snippet.where)
        if snippet.mark:
            return "parsed"
        ast.increment_lineno(tree, snippet.line)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, str(snippet.page), "exec"), self.names)
        return "executed"

    def _command(self, snippet: Snippet, words: list[str], expected: str | None) -> None:
        settings = {}
        while words and (setting := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
            settings[setting[1]] = setting[2]
            words = words[1:]
        if snippet.mark:
            _parse(snippet, words)
            return
        if words[0] == "cat" and expected is not None:
            files = sorted(file for pattern in words[1:] for file in self.folder.glob(pattern))
            status, output = int(not files), "".join(file.read_text(encoding="utf-8") for file in files)
        else:
            assert words[0] == "npusim", f"{snippet.where}: {words[0]} cannot be run here: say why in a comment"
            status, output = run_npusim(words[1:], self.folder, settings)
        place = f"{snippet.where}: {shlex.join(words)}\n{output}"
        if expected is None:
            assert status == 0, place
        else:
            assert _pattern(expected).fullmatch(" ".join(output.split())), f"{place}\nexpected\n{expected}"


def run_npusim(arguments: list[str], folder: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    """The exit status and the output of a command, which runs in this process."""
    written = io.StringIO()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            try:
                status = cli.main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return status, written.getvalue()


def _pattern(expected: str) -> re.Pattern[str]:
    """Text in which … stands for any characters, and white space for white space."""
    return re.compile(".*".join(re.escape(part) for part in " ".join(expected.split()).split("…")), re.DOTALL)


def _parse(snippet: Snippet, words: list[str]) -> None:
    """The options of ``npusim`` exist, and so do the files that ``python`` is to run and the rules of ``make``."""
    match words:
        case ["npusim", *arguments]:
            _, unknown = cli.parser().parse_known_args(arguments)
            assert not unknown, f"{snippet.where}: {unknown}"
        case ["python", script, *_] | ["uv", "run", script, *_] if script.endswith(".py"):
            assert any((ROOT / folder / script).is_file() for folder in (".", "examples")), f"{snippet.where}: {script}"
        case ["make", *rules]:
            known = (ROOT / "Makefile").read_text()
            for rule in rules:
                assert "=" in rule or re.search(rf"^[\w %-]*\b{rule}\b[\w %-]*:", known, re.MULTILINE), (
                    f"{snippet.where}: make {rule}"
                )


def _compare(snippet: Snippet) -> None:
    """Every line is in the file, in this order; what stands between them there may be left out."""
    source = iter((ROOT / snippet.reason).read_text(encoding="utf-8").splitlines())
    lost = [line for line in snippet.text.splitlines() if line.strip("… ") and line not in source]
    assert not lost, f"{snippet.where}: {snippet.reason} does not have\n{lost[0]}"
