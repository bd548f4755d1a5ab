"""What this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from npu_compiler.support import env
from npu_compiler.support.errors import ConfigError, NPUError
from npu_compiler.target_config import TARGETS

from .console import Result, Status, Table

# Package -> what is not possible without it.
_PACKAGES = {
    "numpy": "anything",
    "ml_dtypes": "anything",
    "msgpack": "reading and writing .npubin files",
    "safetensors": "writing weight files",
    "torch": "capturing PyTorch models, and running what the NPU does not",
    "pillow": "reading images",
    "rich": "coloured tables on a terminal",
    "ziglang": "compiling without a system compiler",
    "nvidia-cuda-nvrtc": "compiling for NVIDIA GPUs",
    "cupy-cuda13x": "running on NVIDIA GPUs",
}
_REQUIRED = ("numpy", "ml_dtypes", "msgpack", "safetensors")


def run(args: argparse.Namespace, status: Status) -> Result:
    """All checks; the exit status is 1 if something that every use needs is broken."""
    if args.markdown:
        return Result({"markdown": env.markdown()}, [env.markdown().rstrip()])
    from npu_compiler.targets.cpu.toolchain import compiler_report

    with status("looking for a compiler"):
        report: dict[str, Any] = compiler_report()
    problems: list[str] = []
    compiler = report["compiler"]
    if compiler is None:
        problems.append(f"no C++ compiler: {report['error']}; running .npubin files still works")
    packages = {name: _version(name) for name in _PACKAGES}
    problems += [f"{name} is not installed: no {_PACKAGES[name]}" for name in _REQUIRED if packages[name] is None]
    settings: dict[str, Any] = {}
    try:
        settings = {k: _plain(v) for k, v in env.settings().items()}
    except ConfigError as error:
        problems.append(str(error))
    problems += [f"{name} is set, but npusim knows no such variable" for name in env.unknown()]
    if report.get("cache") and report["cache"]["obstacle"]:
        problems.append(f"the cache is not used: {report['cache']['obstacle']}")
    cpu = report["cpu"]
    targets = _targets(report)
    system = {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    blocks: list[str | Table] = [
        f"system     Python {system['python']}, {system['system']}",
        f"CPU        {cpu['name'] or cpu['arch']}: {env.usable_cpus()} usable, kernels for {report['isa_level']}",
        f"compiler   {_compiler_text(compiler)}",
        f"cache      {_cache_text(report.get('cache'))}",
        "",
        Table(("target", "runs on", "compiles with", "missing"), [_target_row(n, t) for n, t in targets.items()]),
        "",
        Table(("package", "version", "needed for"), [(n, packages[n] or "-", why) for n, why in _PACKAGES.items()]),
        "",
        Table(
            ("variable", "value", "meaning"),
            [(n, _shown(settings[n]) if settings else "?", v.meaning) for n, v in env.VARIABLES.items()],
        ),
        "",
        *([f"problem: {p}" for p in problems] or ["no problems found"]),
    ]
    data = {
        **system, "cpu": cpu, "isa_level": report["isa_level"], "usable_cpus": env.usable_cpus(), "compiler": compiler,
        "cache": report.get("cache"), "packages": packages, "settings": settings, "problems": problems,
        "variables": {name: asdict(v) for name, v in env.VARIABLES.items()},
        "targets": targets,
    }  # fmt: skip
    return Result(data, blocks, 1 if problems else 0)


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


def _targets(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name: whether a program for it can run here (``available``; else the ``reason``), on which ``devices``, which
    ``compiler`` makes programs for it, and what is ``missing`` for either."""
    from npu_runtime.backends.base import available_backends, get_backend

    found: dict[str, dict[str, Any]] = {}
    for name in sorted({*TARGETS, *available_backends()}):
        devices, compiler, missing = _PARTS[name](report) if name in _PARTS else ([], None, [])
        reason = None
        try:
            get_backend(name)
        except NPUError as error:
            reason = str(error)
            missing = missing or [reason]
        available = reason is None
        found[name] = {
            "available": available, "reason": reason, "devices": devices, "compiler": compiler, "missing": missing,
        }  # fmt: skip
    return found


_Parts = tuple[list[str], str | None, list[str]]  # devices, compiler, what is missing


def _cpu_parts(report: dict[str, Any]) -> _Parts:
    compiler, cpu = report["compiler"], report["cpu"]
    missing = [f"no C++ compiler: {report['error']}"] if compiler is None else []
    device = f"{cpu['name'] or cpu['arch']}, {env.usable_cpus()} CPUs"
    return [device], None if compiler is None else f"{compiler['kind']} {compiler['version']}", missing


def _cuda_parts(report: dict[str, Any]) -> _Parts:
    from npu_compiler.targets.cuda import chips
    from npu_compiler.targets.cuda.nvrtc import find_nvrtc
    from npu_runtime.backends.cuda import missing_parts
    from npu_runtime.cuda_driver import driver

    missing, devices, compiler = missing_parts(), [], None
    try:
        for d in driver().devices():
            chip = f"compute capability {d.capability[0]}.{d.capability[1]}"
            devices.append(f"{d.name}, {chip}, {d.memory / 2**30:.0f} GiB")
    except NPUError as error:
        missing = missing or [str(error)]
    try:
        compiler = f"NVRTC {'.'.join(map(str, find_nvrtc().version))} for {chips.arch()}"
    except NPUError as error:
        missing.append(str(error))
    return devices, compiler, missing


def _metal_parts(report: dict[str, Any]) -> _Parts:
    return [], "no compiler: the Mac that loads a program compiles its text", []


_PARTS: dict[str, Callable[[dict[str, Any]], _Parts]] = {"cpu": _cpu_parts, "cuda": _cuda_parts, "metal": _metal_parts}


def _target_row(name: str, target: dict[str, Any]) -> tuple[str, ...]:
    devices = ", ".join(target["devices"]) if target["available"] else "not here"
    return name, devices, target["compiler"] or "nothing yet", "; ".join(target["missing"]) or "-"


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
