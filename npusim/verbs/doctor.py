"""``npusim doctor``: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from npu_compiler.support import env
from npu_compiler.support.errors import ConfigError, NPUError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target, target_config, target_names
from npu_compiler.targets import get_target

from ..console import Result, Table
from ..mac import mac_report

# Package -> what needs it.
_PACKAGES = {
    "numpy": "anything",
    "ml_dtypes": "anything",
    "msgpack": "reading and writing .npubin files",
    "safetensors": "writing weight files",
    "torch": "capturing PyTorch models, and running what the NPU does not",
    "pillow": "reading images",
    "rich": "coloured tables and progress bars on a terminal",
    "shtab": "completion in shells",
    "ziglang": "compiling without a system compiler",
    "nvidia-cuda-nvrtc": "compiling for NVIDIA GPUs",
    "cupy-cuda13x": "running on NVIDIA GPUs",
    "nvidia-cuda-nvrtc-cu12": "compiling for NVIDIA GPUs whose driver supports CUDA 12",
    "cupy-cuda12x": "running on NVIDIA GPUs whose driver supports CUDA 12",
    "pyobjc-framework-Metal": "running on Apple GPUs",
}
_REQUIRED = ("numpy", "ml_dtypes", "msgpack", "safetensors")


def run(args: argparse.Namespace) -> Result:
    """Run all checks. The exit status is 1 if something that every use needs is broken."""
    if args.markdown:
        return Result({"markdown": env.markdown()}, [env.markdown().rstrip()])
    from npu_compiler.targets.cpu.compilers import compiler_report

    with step("looking for a compiler"):
        report: dict[str, Any] = compiler_report()
    packages = {name: _version(name) for name in _PACKAGES}
    settings, refused = _settings()
    problems = _problems(report, packages, refused)
    targets = _targets()
    mac = mac_report()
    problems += mac.problems if mac is not None else ()
    data = {
        "python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}",
        "cpu": report["cpu"], "device": report["device"], "usable_cpus": env.usable_cpus(),
        "usable_cores": env.usable_cores(), "compiler": report["compiler"],
        "cache": report.get("cache"), "packages": packages, "settings": settings, "problems": problems,
        "variables": {name: asdict(v) for name, v in env.VARIABLES.items()},
        "targets": targets,
        "mac": asdict(mac) if mac is not None else None,
    }  # fmt: skip
    return Result(data, _blocks(data, mac.text if mac is not None else ""), 1 if problems else 0)


def _settings() -> tuple[dict[str, Any], list[str]]:
    """Return the values of the environment variables, and why they are refused; none, then, if one has no value."""
    settings: dict[str, Any] = {}
    try:
        settings = {k: _plain(v) for k, v in env.settings().items()}
        default_target()
    except ConfigError as error:
        return settings, [str(error)]
    return settings, []


def _problems(report: dict[str, Any], packages: dict[str, str | None], refused: list[str]) -> list[str]:
    """Return what is wrong with the compiler, the packages, the ``refused`` settings and the cache, in this order."""
    problems = []
    if report["compiler"] is None:
        problems.append(f"no C++ compiler: {report['error']}; running .npubin files still works")
    problems += [f"{name} is not installed: no {_PACKAGES[name]}" for name in _REQUIRED if packages[name] is None]
    problems += refused
    problems += [f"{name} is set, but npusim knows no such variable" for name in env.unknown()]
    if report.get("cache") and report["cache"]["obstacle"]:
        problems.append(f"the cache is not used: {report['cache']['obstacle']}")
    return problems


def _blocks(data: dict[str, Any], mac: str) -> list[str | Table]:
    """Return the report for people. ``mac``: what it says about a Mac, or ''."""
    cpu, packages, settings = data["cpu"], data["packages"], data["settings"]
    variables = [(n, _shown(settings[n]) if settings else "?", v.meaning) for n, v in env.VARIABLES.items()]
    return [
        f"system     Python {data['python']}, {data['system']}",
        *([f"Mac        {mac}"] if mac else []),
        f"CPU        {cpu['name'] or cpu['arch']}: {data['usable_cores']} cores usable, {data['device']}",
        f"compiler   {_compiler_text(data['compiler'])}",
        f"cache      {_cache_text(data['cache'])}",
        "",
        Table(_TARGET_COLUMNS, [_target_row(n, t) for n, t in data["targets"].items()]),
        "",
        Table(("package", "version", "needed for"), [(n, packages[n] or "-", why) for n, why in _PACKAGES.items()]),
        "",
        Table(("variable", "value", "meaning"), variables),
        "",
        *([f"problem: {p}" for p in data["problems"]] or ["no problems found"]),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        value = ", ".join(value)
    return "-" if value in (None, "") else value


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return value if isinstance(value, int | str | None) else str(value)


def _targets() -> dict[str, dict[str, Any]]:
    """Of each target, by name: whether its programs can run here (``available``, else the ``reason``), on which
    ``devices``, for which ``device`` and with which ``compiler`` programs are compiled, and what is ``missing``."""
    from npu_runtime.backends.base import Backend
    from npu_runtime.registry import available_backends, backend_class, get_backend

    found: dict[str, dict[str, Any]] = {}
    for name in sorted({*target_names(), *available_backends()}):
        device, compiler, missing = _compiled_for(name)
        machines: list[str] = []
        reason = None
        try:
            make = backend_class(name)
            if isinstance(make, type) and issubclass(make, Backend):
                machines, missing = make.machines(), [*make.missing(), *missing]
            get_backend(name)
        except NPUError as error:
            reason = str(error)
            missing = missing or [reason]
        found[name] = {
            "available": reason is None, "reason": reason, "devices": machines, "device": device, "compiler": compiler,
            "missing": missing,
        }  # fmt: skip
    return found


def _compiled_for(target: str) -> tuple[str | None, str | None, list[str]]:
    """(the device that programs are compiled for, the compiler, what is missing) of a target by name."""
    try:
        config = target_config(target)
        device = str(config.device) if config.device is not None else target
        return device, get_target(config).compiler(), []
    except NPUError as error:
        return None, None, [str(error)]


_TARGET_COLUMNS = ("target", "runs on", "compiles for", "compiles with", "missing")


def _target_row(name: str, target: dict[str, Any]) -> tuple[str, ...]:
    devices = ", ".join(target["devices"]) if target["available"] else "not here"
    made = target["device"] or "-", target["compiler"] or "nothing yet"
    return name, devices, *made, "; ".join(target["missing"]) or "-"


def _compiler_text(compiler: dict[str, Any] | None) -> str:
    if compiler is None:
        return "none"
    return f"{' '.join(compiler['argv'])} ({compiler['kind']} {compiler['version']}), found by {compiler['origin']}"


def _cache_text(cache: dict[str, Any] | None) -> str:
    if cache is None:
        return "none"
    if cache["obstacle"]:
        return f"not used: {cache['obstacle']}"
    return f"{cache['path']}: {cache['bytes'] / 1e6:.1f} of {cache['limit'] / 1e6:.0f} MB"
