"""Runs a script of the repository as ``__main__`` of this process, which saves the import of torch."""

from __future__ import annotations

import runpy
import sys

import pytest

from .names_page import ROOT

EXAMPLES = ROOT / "examples"


def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: str
) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of ``examples/name``."""
    for package in ("torch", "tokenizers", "PIL"):
        pytest.importorskip(package)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [name, *arguments])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        finally:
            for shared in ("common", "qwen"):
                sys.modules.pop(shared, None)
    return status, *capsys.readouterr()
