"""What this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from typing import Any

from npu_compiler import env
from npu_compiler.errors import ConfigError
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
}
_REQUIRED = ("numpy", "ml_dtypes", "msgpack", "safetensors")


def run(args: argparse.Namespace, status: Status) -> Result:
    """All checks; the exit status is 1 if something that every use needs is broken."""
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
    targets = _targets()
    cpu = report["cpu"]
    system = {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    blocks: list[str | Table] = [
        f"system     Python {system['python']}, {system['system']}",
        f"CPU        {cpu['name'] or cpu['arch']}: {env.usable_cpus()} usable, kernels for {report['isa_level']}",
        f"compiler   {_compiler_text(compiler)}",
        f"cache      {_cache_text(report.get('cache'))}",
        *(f"{name:10s} target: {why or 'available'}" for name, why in targets.items()),
        "",
        Table(("package", "version", "needed for"), [(n, packages[n] or "-", why) for n, why in _PACKAGES.items()]),
        "",
        Table(("setting", "value"), list(settings.items())),
        "",
        *([f"problem: {p}" for p in problems] or ["no problems found"]),
    ]
    data = {
        **system, "cpu": cpu, "isa_level": report["isa_level"], "usable_cpus": env.usable_cpus(), "compiler": compiler,
        "cache": report.get("cache"), "packages": packages, "settings": settings, "problems": problems,
        "targets": {name: {"available": why is None, "reason": why} for name, why in targets.items()},
    }  # fmt: skip
    return Result(data, blocks, 1 if problems else 0)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return value if isinstance(value, int | str | None) else str(value)


def _targets() -> dict[str, str | None]:
    """Target -> why it cannot run here, None if it can."""
    from npu_compiler.errors import NPUError
    from npu_runtime.backend import available_backends, get_backend

    found: dict[str, str | None] = {}
    for name in sorted({*TARGETS, *available_backends()}):
        try:
            get_backend(name)
            found[name] = None
        except NPUError as error:
            found[name] = str(error)
    return found


def _compiler_text(compiler: dict[str, Any] | None) -> str:
    if compiler is None:
        return "none"
    return f"{' '.join(compiler['argv'])} ({compiler['kind']} {compiler['version']}), found by {compiler['origin']}"


def _cache_text(cache: dict[str, Any] | None) -> str:
    if cache is None:
        return "none"
    return f"{cache['path']}: {cache['bytes'] / 1e6:.1f} of {cache['limit'] / 1e6:.0f} MB"
