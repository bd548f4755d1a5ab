"""What scripts write into the documentation is what they would write today."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from npu_compiler.ops.table import operators_markdown
from npu_compiler.weights.format import BlockFormat, known_formats, weight_format

from .snippets import ROOT, prose

FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = {  # -> the kind of results, of which each machine has a file
    "cpu": "cpu_resnet_*", "calls": "calls_*", "gpu": "h200", "llm": "cpu_llm_*", "gguf": "cpu_gguf_*",
    "metal": "metal_counts", "gpu_layers": "h200_layers",
}  # fmt: skip
SCRIPTS = {
    "cpu": "cpu", "calls": "calls", "gpu": "gpu_table", "llm": "llm_cpu", "gguf": "llm_gguf", "metal": "metal_counts",
    "gpu_layers": "gpu_layers",
}  # fmt: skip
ONLY_PERFORMANCE = ("metal", "gguf", "gpu_layers")  # sections that the README has not


def script(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script that is not part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module(name)


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_show_the_stored_results(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(RESULTS.glob(f"{SECTIONS[section]}.json"))
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    module = script("benchmarks", SCRIPTS[section], monkeypatch)
    table = "\n\n".join(map(module.table, stored))
    shown = script("benchmarks", "readme", monkeypatch).of_readme(stored)
    short = module.table(shown, compared=True) if section == "gpu" else module.table(shown)
    korean = script("benchmarks", "korean", monkeypatch).korean(table)
    assert sorted(re.findall(r"\d+", korean)) == sorted(re.findall(r"\d+", table))
    pages = {"README.md": short, "docs/performance.md": table, "docs/performance.ko.md": korean}
    if section in ONLY_PERFORMANCE:
        del pages["README.md"]
    for page, text in pages.items():
        written = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(rf"<!-- bench:{section} -->\n(.*?)\n<!-- /bench -->", written, re.DOTALL) == [text], page


@pytest.mark.parametrize(
    ("name", "kind", "module", "function"),
    [("ops", "ops", "ops_results", "section"), ("quantised", "cpu_quantised", "quantised", "table")],
)
def test_one_section_for_all_machines_shows_the_stored_results(
    name: str, kind: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{kind}_*.json"))]
    table = getattr(script("benchmarks", module, monkeypatch), function)(stored)
    korean = script("benchmarks", "korean", monkeypatch).korean(table)
    pages = {"docs/performance.md": table, "docs/performance.ko.md": korean}
    for page, text in pages.items():
        written = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(rf"<!-- bench:{name} -->\n(.*?)\n<!-- /bench -->", written, re.DOTALL) == [text], page


def test_a_caption_without_a_translation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no translation of 'All is well"):
        script("benchmarks", "korean", monkeypatch).korean("A launch takes 3 to 5 µs on the host. All is well.")


def test_the_readme_is_one_screen_and_the_tables() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_of_the_site_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert targets and [t for t in targets if not (ROOT / t).exists()] == []


def test_the_pipeline_is_that_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = script("tools", "figures", monkeypatch).pipeline()
    assert (FIGURES / "pipeline.svg").read_text(encoding="utf-8") == drawn, "python tools/figures.py pipeline"


def test_the_roofline_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = script("tools", "figures", monkeypatch).roofline()
    assert (FIGURES / "roofline.svg").read_text(encoding="utf-8") == drawn, "python tools/figures.py roofline"


def test_the_memory_plan_is_one() -> None:
    """No two buffers overlap in space and time, and the tallest column is the arena."""
    tree = ElementTree.parse(FIGURES / "memory_plan.svg")
    tips = [e.text or "" for e in tree.iter("{http://www.w3.org/2000/svg}title")]
    pattern = re.compile(r"\w+: (\d+) bytes at (\d+), steps (\d+) to (\d+)")
    buffers = [tuple(map(int, m.groups())) for tip in tips if (m := pattern.fullmatch(tip))]
    assert len(buffers) > 15
    for i, (size, at, first, last) in enumerate(buffers):
        for size2, at2, first2, last2 in buffers[i + 1 :]:
            assert first > last2 or first2 > last or at >= at2 + size2 or at2 >= at + size


def test_the_figures_have_no_foreign_parts() -> None:
    for path in FIGURES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(href|src)=|url\(|<script|<foreignObject", text), path.name
        ElementTree.fromstring(text)


def test_the_table_of_operators_is_that_of_the_registry() -> None:
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert page.rstrip() == operators_markdown().rstrip(), "npusim ops --markdown > docs/operators.md"


def test_the_table_of_rewrites_is_that_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("tools", "rewrites_table", monkeypatch)
    page = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
    assert f"{module.START}{module.table()}{module.END}" in page, "python tools/rewrites_table.py"


@pytest.mark.parametrize("name", ["api", "environment", "models", "names", "operators"])
def test_korean_pages_of_the_script_follow_the_english_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / f"{name}.ko.md").read_text(encoding="utf-8")
    assert page == script("tools", "korean_pages", monkeypatch).korean(name), "python tools/korean_pages.py"


def test_files_that_pages_name_are_there() -> None:
    """`a/b.py` in the text is the end of a file's path; the table of names has a test of its own."""
    folders = "npu_compiler", "npu_runtime", "npusim", "tests", "tools", "benchmarks", "examples", "docs"
    files = {f"/{p.relative_to(ROOT).as_posix()}" for folder in folders for p in Path(ROOT, folder).rglob("*.*")}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        if not page.name.startswith("names.")
        for line in prose(page)
        for name in re.findall(r"`([\w./]+\.(?:py|h|md|json|svg|txt))`", line)
        if "NAME" not in name and ("/" in name or name.endswith(".py"))
    }
    assert len(named) > 100
    assert sorted(x for x in named if not any(f.endswith(f"/{x[1]}") for f in files)) == []


def rules_of_reasons() -> set[str]:
    """The names of the reasons that the compiler gives."""
    sources = (p.read_text(encoding="utf-8") for p in Path(ROOT, "npu_compiler").rglob("*.py"))
    return {rule for text in sources for rule in re.findall(r'\bReason\(\s*"(\w+)"', text)}


def test_every_reason_is_explained() -> None:
    page = (ROOT / "docs" / "partitioning.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {rule for cell in cells for rule in re.findall(r"`(\w+)`", cell)} == rules_of_reasons()


def test_the_table_of_weight_formats_has_all_of_them_and_their_sizes() -> None:
    page = (ROOT / "docs" / "weight_formats.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    rows = [(re.findall(r"`(\w+)`", names), sizes.split(", ")) for names, _, sizes in cells]
    stated = {n: sizes[at % len(sizes)] for names, sizes in rows for at, n in enumerate(names)}
    assert set(stated) == set(known_formats())
    for name in stated:
        if isinstance(stored := weight_format(name), BlockFormat):
            size = stored.row_bytes(1 << 20)
            assert size is not None and float(stated[name]) == math.floor(100 * 8 * size / 2**20 + 0.5) / 100, name
