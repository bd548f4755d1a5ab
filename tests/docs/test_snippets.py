"""Every code block of the documentation is run, or parsed if it needs what a test cannot have; the page says why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_compiler import target_config
from npu_compiler.ops.registry import REGISTRY

from ..llm import small_model
from .snippets import ROOT, Page, snippets

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not page.name.endswith(".ko.md")]  # test_translation.py: their blocks are the same
counts: Counter[str] = Counter()


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages call ``my-llama``."""
    folder = tmp_path_factory.mktemp("models") / "my-llama"
    return small_model.write_model(folder, max_position_embeddings=48, num_hidden_layers=1)


@pytest.fixture
def page(tmp_path: Path, language_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A folder with the files that pages take for granted, and default settings except for the compiler; what pages
    register, set or delete is undone afterwards."""
    kept = ("NPU_CACHE_DIR", "NPU_CXX", "NPU_COMPILE_JOBS")
    for name in [n for n in os.environ if n.startswith("NPU_")]:
        if name in kept:
            monkeypatch.setenv(name, os.environ[name])  # a page that deletes it does so for itself
        else:
            monkeypatch.delenv(name)
    (tmp_path / "my-llama").symlink_to(language_model)
    (tmp_path / "text.txt").write_text("The capital of France is Paris.")
    monkeypatch.setattr(target_config, "_rows", {name: [*rows] for name, rows in target_config._rows.items()})
    ops = dict(REGISTRY)
    made = Page(tmp_path)
    yield made
    REGISTRY.clear()
    REGISTRY.update(ops)
    counts.update(made.counts)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_work(path: Path, page: Page) -> None:
    for snippet in snippets(path):
        page.check(snippet)


def test_most_blocks_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    marked = [s for path in PAGES for s in snippets(path) if s.mark == "not run"]
    assert all(len(s.reason.split()) >= 2 for s in marked)
    with capsys.disabled():
        print(f"\ndocumentation: {', '.join(f'{n} blocks {kind}' for kind, n in sorted(counts.items()))}")
    if sum(counts.values()) == sum(len(snippets(path)) for path in PAGES):  # the whole file was run
        assert counts["executed"] > counts["parsed"]
