"""The JSON that commands print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npusim import cli

torch = pytest.importorskip("torch")


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == status
    out, err = capsys.readouterr()
    assert not err
    data: dict[str, Any] = json.loads(out)
    assert data["schema_version"] == cli.SCHEMA_VERSION and data["command"] == argv[0]
    return data
