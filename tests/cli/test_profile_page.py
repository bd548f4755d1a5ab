"""The page of a profile in a real browser. Skipped where there is no Chromium on PATH."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim.profiling.records import Arena, Block, Held, Limits, NotOnNPU, Place, Row, Section
from npusim.profiling.report import ProfileReport

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000 --timeout=20000"
).split()
ROWS = 1000


def row(n: int) -> Row:
    kind, name = ("gemm", "loops", "attention")[n % 3], f"k{n}_" + "long_name_" * (8 if n == 5 else 0)
    place = Place(f"model.layers.{n // 10}.mlp", "Linear", f"models/model.py:{n}")
    return Row(
        index=n, name=name, device="host" if n == 7 else "npu", kind=kind, part=0, seconds=1e-5 * (1 + n % 7),
        least=1e-5, start=3e-5 * n, end=3e-5 * n + 2e-5, flops=0 if n % 3 == 1 else 10**6 * (1 + n % 5), read=10**5,
        written=10**4, roof=5e-6, bound="memory", dtype="float32", inputs=("float32[8, 8] x",),
        outputs=("float32[8, 8] y",), ops=(f"op_{n}",), places=(place,), text="</script><b>bad</b>",
        after=(n - 1,) if n else (),
    )  # fmt: skip


def report(rows: int) -> ProfileReport:
    blocks = tuple(Block(f"b{n}", "float32[8, 8]", 256 * n, 256, n, n + 3) for n in range(min(rows, 6)))
    arena = Arena("model", 2048, blocks, 3, 1024, (0, 1, 2, 3), tuple(range(rows)))
    section = Section("main", "prefill", 5, 0.02, 0.019, tuple(map(row, range(rows))), (arena,))
    return ProfileReport(
        "<model> & co", "cpu", "cpu:avx2", "a CPU", "float32", "1", "2026-01-01",
        (section, replace(section, name="decode", title="decode", rows=section.rows[: rows // 2])),
        (Held("w", "weight", "float32[8, 8]", 256),),
        Limits({"float32": 1e11}, ((1e6, 2e11),), 1e10, "made up"),
        (NotOnNPU("op_7", "aten.x.default", "no lowering", "", (Place("a", "A", "a.py:1"),)),),
        ("a note",),
    )  # fmt: skip


# What a reader does, and what the page then shows.
PROBE = """<script>
window.faults = [];
addEventListener("error", (e) => faults.push(String(e.message)));
addEventListener("unhandledrejection", (e) => faults.push(String(e.reason)));
</script>"""
ACT = """<script>
const $ = (q) => document.querySelector(q), all = (q) => [...document.querySelectorAll(q)];
const column = (n) => all("#kernels tbody tr.row").map((r) => r.children[n].textContent);
const seen = { rows: all("#kernels tbody tr.row").length, lost: column(11).slice(0, 3) };
const header = (text) => all("#kernels th button").find((b) => b.textContent === text);
header("#").click(); seen.first = column(0)[0];
header("#").click(); seen.last = column(0)[0];
const type = (text) => { $("#filter").value = text; $("#filter").dispatchEvent(new Event("input")); };
type("op_42"); seen.filtered = column(0);
type("nothing like this"); seen.none = $("#kernels tbody").textContent;
type("");
all("#chips button")[0].click(); seen.kind = new Set(column(2)).size; all("#chips button")[0].click();
$("#timeline").focus();
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
press("ArrowRight"); press("ArrowRight"); seen.tip = $("#tip").textContent; press("Enter");
seen.details = $("#kernels tr.detail").textContent;
seen.marks = all("#timeline rect.mark").length; seen.points = all("#roofline circle").length;
const width = $("#timeline svg").getBoundingClientRect().width;
$("#zoom-in").click(); seen.zoomed = $("#timeline svg").getBoundingClientRect().width / width;
seen.blocks = all("#memory rect.mark").length; seen.host = $("#host tbody").textContent;
seen.title = $("h1").textContent;
seen.modules = all("#modules .name").map((n) => n.textContent);
all("#sections button")[1].click(); seen.second = all("#kernels tbody tr.row").length;
const paint = () => getComputedStyle(document.body).backgroundColor;
const before = paint(); $("#theme").click(); const light = paint(); $("#theme").click();
seen.themes = [before, light, paint()];
seen.requests = performance.getEntriesByType("resource").length; seen.faults = faults;
seen.overflow = document.documentElement.scrollWidth - innerWidth;
const made = document.createElement("pre"); made.id = "seen"; made.textContent = JSON.stringify(seen);
document.body.append(made);
</script>"""


def chromium(tmp_path: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_the_page_is_one_file_without_links(tmp_path: Path) -> None:
    text = report(20).save(tmp_path / "p.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "</script><b>" not in text and "&lt;model&gt; &amp; co" in text and "{{" not in text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found and json.loads(found[1])["model"] == "<model> & co"


@browser
def test_what_a_reader_does(tmp_path: Path) -> None:
    page = report(ROWS).save(tmp_path / "p.html")
    text = page.read_text().replace("<body>", f"<body>{PROBE}").replace("</body>", f"{ACT}</body>")
    page.write_text(text)
    run = chromium(tmp_path, page, "--dump-dom", "--enable-logging=stderr", "--window-size=1300,900")
    assert "CONSOLE" not in run.stderr, run.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.S)
    assert found is not None
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert seen["faults"] == [] and seen["requests"] == 0 and seen["overflow"] <= 0
    assert seen["rows"] == ROWS and seen["lost"] == ["65.0 µs"] * 3  # what loses most comes first
    assert (seen["first"], seen["last"]) == ("0", str(ROWS - 1))
    assert seen["filtered"][0] == "429" and len(seen["filtered"]) == 11  # 42 and 420 to 429
    assert seen["none"] == "No kernel fits the filter." and seen["kind"] == 1
    assert "k1_" in seen["tip"] and "models/model.py:1" in seen["details"]
    assert "</script><b>bad</b>" in seen["details"] and seen["title"] == "<model> & co"
    assert seen["marks"] == ROWS and seen["points"] == ROWS - ROWS // 3 and 1.7 < seen["zoomed"] < 2.1
    assert seen["blocks"] == 6 and "no lowering" in seen["host"]
    assert seen["modules"][0] == "model.layers.*.mlp" and seen["second"] == ROWS // 2
    assert seen["themes"][1] != seen["themes"][2]


@browser
def test_both_themes_are_painted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="reading the screenshots needs pillow")
    page = report(40).save(tmp_path / "p.html")
    pixels = {}
    for theme in ("light", "dark"):
        text = page.read_text().replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
        (tmp_path / f"{theme}.html").write_text(text)
        shot = tmp_path / f"{theme}.png"
        chromium(tmp_path, tmp_path / f"{theme}.html", f"--screenshot={shot}", "--window-size=1000,1500")
        pixels[theme] = np.asarray(image.open(shot).convert("RGB"), np.float64)
    light, dark = pixels["light"], pixels["dark"]
    assert light.shape == dark.shape == (1500, 1000, 3)
    assert light.mean() > 180 and dark.mean() < 80
    for picture in (light, dark):
        for top in range(0, 1500, 300):  # the head, the figures, the charts, the table
            assert picture[top : top + 300].std() > 4, f"rows {top} to {top + 300} are blank"
        spread = picture.max(2) - picture.min(2)
        assert (spread > 60).sum() > 3000  # coloured marks
