"""Write tests/data/metal_api.json, the names that the Metal backend may use: ``python tools/metal_api.py``.

The facts come from two packages for macOS, which this script downloads with pip and does not install:

- pyobjc-framework-Metal (MIT): constants and their values, functions and their argument counts, fields of structs, and
  the selectors whose last arguments return something (pyobjc returns these beside the result);
- mlx-metal, which contains Apple's metal-cpp headers (Apache-2.0): the classes and the selectors of each.

The table has names and numbers only, no text of either package. It cannot say since which macOS a selector exists.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

TABLE = Path(__file__).parents[1] / "tests" / "data" / "metal_api.json"
PACKAGES = {"pyobjc-framework-Metal": "12.2.2", "mlx-metal": "0.32.4"}
PLATFORMS = ("macosx_14_0_arm64", "macosx_10_13_universal2")
HEADERS = "mlx/include/metal_cpp/"
FRAMEWORKS = ("Metal", "Foundation")

_TYPE = re.compile(rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\^?[a-zA-Z@:*#?]")  # one type of an encoded signature
_CLASS = re.compile(r"^class (?:_\w+_EXPORT )?(\w+) : public (?:NS::)?\w+<(\w+)(?:, ([\w:]+))?>", re.MULTILINE)
_NAMESPACE = re.compile(r"^namespace (\w+)", re.MULTILINE)
_SELECTOR = re.compile(r'_PRIVATE_DEF_SEL\(\s*(\w+),\s*"([^"]+)"')
_METHOD = re.compile(r"(?ms)^_(?:MTL|NS)_INLINE [^\n]*?\b(MTL4?|NS)::(\w+)::\w+\([^\n]*\n\{(.*?)^\}")
_USED_SELECTOR = re.compile(r"_(?:MTL|NS)_PRIVATE_SEL\((\w+)\)")


def download(folder: Path) -> dict[str, Path]:
    """Download both packages into ``folder``; return the wheels by the name of the package."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for name, version in PACKAGES.items():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*command, "--python-version", "3.13", *platforms, f"{name}=={version}"], check=True)
    return {name: next(folder.glob(f"{name.lower().replace('-', '_')}-*.whl")) for name in PACKAGES}


# -- pyobjc ---------------------------------------------------------------------------------------------------------
class _Anything:
    """What pyobjc's metadata asks of the module objc besides registering selectors."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *args: Any, **named: Any) -> _Anything:
        return self


def metadata_of(source: str) -> dict[str, Any]:
    """Return constants, functions, structs and the selectors that return something in their arguments, from pyobjc's
    metadata.

    The metadata is a Python module, which runs here with a stand-in of the module objc.
    """
    outs: dict[str, list[int]] = {}

    def register(_: bytes, selector: bytes, meta: dict[str, Any]) -> None:
        arguments = meta.get("arguments", {})
        if where := sorted(at - 2 for at, a in arguments.items() if a.get("type_modifier") == b"o"):
            outs[selector.decode()] = where

    objc = types.ModuleType("objc")
    objc.__dict__.update(arch="arm64", registerMetaDataForSelector=register, __getattr__=lambda name: _Anything())
    objc.__dict__["createStructType"] = lambda name, encoding, fields: tuple(fields)
    before = sys.modules.get("objc")
    sys.modules["objc"] = objc
    names: dict[str, Any] = {}
    try:
        exec(compile(source, "_metadata.py", "exec"), names)
    finally:
        del sys.modules["objc"]
        if before is not None:
            sys.modules["objc"] = before
    constants: dict[str, int | None] = {name: None for name in re.findall(r"\$(\w+)", names["constants"])}
    constants |= {name: int(value, 0) for name, value in re.findall(r"\$(\w+)@(-?\w+)", names["enums"])}
    constants |= {name: value for name, value in names["misc"].items() if isinstance(value, int)}
    functions = {name: len(_TYPE.findall(signature[0])) - 1 for name, signature in names["functions"].items()}
    structs = {name: list(fields) for name, fields in names["misc"].items() if isinstance(fields, tuple)}
    return {"constants": constants, "functions": functions, "structs": structs, "returned_arguments": outs}


# -- metal-cpp ------------------------------------------------------------------------------------------------------
def classes_of(headers: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return by Objective-C name the ``base`` and the ``selectors`` of each class, from metal-cpp's headers by file."""
    spelling = {name: selector for text in headers.values() for name, selector in _SELECTOR.findall(text)}
    classes: dict[str, dict[str, Any]] = {"NSObject": {"base": None, "selectors": {"alloc", "init", "copy"}}}
    for text in headers.values():
        for name, base in _declared(text):
            classes[name] = {"base": base, "selectors": set()}
    for text in headers.values():
        for space, name, body in _METHOD.findall(text):
            for used in _USED_SELECTOR.findall(body):
                if used in spelling and space + name in classes:
                    classes[space + name]["selectors"].add(spelling[used])
    return {name: {**c, "selectors": sorted(c["selectors"])} for name, c in sorted(classes.items())}


def _declared(text: str) -> Iterator[tuple[str, str]]:
    spaces = [(m.start(), m[1]) for m in _NAMESPACE.finditer(text)]
    for m in _CLASS.finditer(text):
        space = [name for at, name in spaces if at < m.start()][-1]
        base = m[3] or "NS::Object"
        yield space + m[2], (base.replace("::", "") if "::" in base else space + base)


# -- the table ------------------------------------------------------------------------------------------------------
def table(wheels: dict[str, Path]) -> dict[str, Any]:
    """Return the table's contents, from the wheels by the name of their package."""
    with ZipFile(wheels["pyobjc-framework-Metal"]) as wheel:
        data = metadata_of(wheel.read("Metal/_metadata.py").decode())
    with ZipFile(wheels["mlx-metal"]) as wheel:
        wanted = [n for n in wheel.namelist() if n.startswith(tuple(f"{HEADERS}{f}/" for f in FRAMEWORKS))]
        headers = {n: wheel.read(n).decode() for n in wanted if n.endswith(".hpp")}
    sources = [f"pyobjc-framework-Metal {PACKAGES['pyobjc-framework-Metal']} (MIT)"]
    sources.append(f"metal-cpp in mlx-metal {PACKAGES['mlx-metal']} (Apache-2.0)")
    return {"facts_from": sources, **data, "classes": classes_of(headers)}


def text_of(data: dict[str, Any]) -> str:
    """Return the table as JSON with one class, constant or function a line, so that a change shows as its lines."""
    blocks = []
    for key, value in data.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items()))
            blocks.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
        else:
            blocks.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    """Download the packages and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text(text_of(table(download(Path(folder)))))
    print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
