"""What a Mac's owner runs: ``npusim doctor`` and ``benchmarks/metal.py``, with a stand-in for the Mac."""

from __future__ import annotations

import importlib
import json
import platform
from importlib import metadata
from types import ModuleType

import pytest
import torch
from torch import nn

from npusim import cli, mac

from ...support import metal_api
from .selectors import ROOT


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Mac with macOS 15.1 and pyobjc."""
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "12.2.2" if name == mac.PYOBJC else real(name))
    return monkeypatch


def test_another_system_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    assert mac.mac_report() is None


def test_a_good_mac_has_no_problems(device: metal_api.Device, macos: pytest.MonkeyPatch) -> None:
    report = mac.mac_report()
    assert report is not None and report.problems == ()
    assert (report.gpu, report.family, report.pyobjc) == (device.name(), "apple9", "12.2.2")
    assert report.text == f"macOS 15.1, {device.name()} (apple9), pyobjc-framework-Metal 12.2.2"


def test_an_old_system(device: metal_api.Device, macos: pytest.MonkeyPatch) -> None:
    macos.setattr(platform, "mac_ver", lambda: ("13.6.1", ("", "", ""), "arm64"))
    report = mac.mac_report()
    assert report is not None
    assert report.problems == ("macOS 13.6.1 does not compile metal3.1, the language of programs: update to 14",)


def test_a_python_for_intel(device: metal_api.Device, macos: pytest.MonkeyPatch) -> None:
    macos.setattr(platform, "machine", lambda: "x86_64")
    macos.setattr(mac, "_translated", lambda: True)
    report = mac.mac_report()
    assert report is not None and "install one for arm64" in report.problems[0]


def test_no_pyobjc(macos: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    macos.setattr(metadata, "version", absent)
    macos.setattr(mac.device, "default_device", metal_missing)
    report = mac.mac_report()
    assert report is not None and report.gpu is report.family is None
    assert report.problems == ("pyobjc-framework-Metal is not installed: pip install 'npusim[metal]'",)
    assert report.text.endswith("no usable GPU, pyobjc-framework-Metal is not installed")


def metal_missing() -> None:
    raise mac.BackendError("this Mac has no GPU that Metal can use")


def test_an_old_gpu(macos: pytest.MonkeyPatch) -> None:
    with metal_api.installed(metal_api.Device(family=4)):
        report = mac.mac_report()
    assert report is not None and report.gpu is None
    assert "too old" in report.problems[0] and "M1" in report.problems[0]


def test_doctor_shows_the_mac(
    device: metal_api.Device, macos: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    macos.setattr(platform, "mac_ver", lambda: ("12.7", ("", "", ""), "arm64"))
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"Mac        macOS 12.7, {device.name()} (apple9)" in shown and "problem: macOS 12.7" in shown
    assert cli.main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["mac"]["family"] == "apple9" and data["targets"]["metal"]["available"]


# -- the benchmark -------------------------------------------------------------------------------------------------
@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("metal")


def test_without_a_mac_the_benchmark_says_what_it_skips(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "obstacles", lambda: ["Metal needs a Mac"])
    assert script.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    assert "is skipped: no figure is measured and nothing is written: Metal needs a Mac" in shown


def test_engines_that_are_not_installed_are_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None if name.startswith("mlx") else name)
    engines, skipped = script.available()
    assert engines == ["npusim metal", "torch mps", "llama.cpp metal"]
    assert skipped == ["mlx is skipped: not installed: mlx, mlx_lm"]
    assert set(script.ENGINES) <= set(importlib.import_module("llm_engines").ENGINES)


def test_results_have_the_name_of_the_chip_and_a_verdict(script: ModuleType) -> None:
    assert script.result_file("Apple M3 Max").name == "metal-apple-m3-max.json"
    good, bad = {"within_gate": True, "argmax_kept": True}, {"within_gate": False, "argmax_kept": True}
    rows = {"resnets": [{"model": "a", "verdict": good}], "language_models": [{"model": "b", "verdict": bad}]}
    assert script.failed(rows) == ["b"]


def test_a_network_is_measured_and_judged(
    device: metal_api.Device, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(name: str) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 49, 5)
        return nn.Sequential(*layers).eval()

    monkeypatch.setattr(importlib.import_module("cpu"), "build_model", tiny)
    row = script.resnet("tiny", 1, 0.0)
    assert {"npusim", "npusim, NPU_METAL_INDIRECT=0"} <= row["median_ms"].keys() and min(row["median_ms"].values()) > 0
    assert len(device.indirect) == 1 and row["verdict"]["argmax_kept"]
    assert 0 < row["verdict"]["error"] < 4 * row["verdict"]["eager_error"]
