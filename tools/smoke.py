"""Check an installed npusim without PyTorch: ``python tools/smoke.py`` with the Python that it is installed for.

It compiles a perceptron for the CPU and, as source, for Metal, and runs it from its file, from Python and from the
command line. Then it compiles all modules to bytecode and imports those that need no extra. It needs the package with
its dependencies and a C++ compiler.
"""

from __future__ import annotations

import compileall
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

PACKAGES = ("npu_compiler", "npu_runtime", "npusim")
EXTRAS = ("torch", "PIL", "rich", "gguf", "jinja2", "tokenizers", "cupy")  # modules that need one of these are left out


def check_modules() -> int:
    """Compile every file, warnings being errors, and import every module; return how many were imported."""
    names = []
    for package in PACKAGES:
        folder = Path(str(importlib.import_module(package).__file__)).parent
        assert (folder / "py.typed").exists(), f"{folder} has no py.typed"
        assert compileall.compile_dir(folder, quiet=1, force=True), f"{folder} does not compile"
        names += [module.name for module in pkgutil.walk_packages([str(folder)], f"{package}.")]
    imported = 0
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except ImportError as error:
            root = (error.name or "").partition(".")[0]
            assert root in EXTRAS, f"{name}: {error}"
    return imported


def perceptron() -> tuple[object, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """softmax(relu(x @ a.T + b) @ c.T) as IR, its weights, an input float32[3, 8] and the expected output."""
    from npu_compiler.aten.ir import IRGraph, OpNode, TensorSpec

    rng = np.random.default_rng(0)
    shapes = {"a": (16, 8), "b": (16,), "c": (4, 16)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = TensorSpec("x", (3, 8), "float32", ("x", 0))
    placeholders = {name: TensorSpec(f"p_{name}", shape, "float32") for name, shape in shapes.items()}

    def node(name: str, op: str, inputs: list[TensorSpec], columns: int, **attrs: object) -> TensorSpec:
        out = TensorSpec(name, (3, columns), "float32", (name, 0))
        nodes.append(OpNode(name, op, inputs, [out], attrs))
        return out

    nodes: list[OpNode] = []
    hidden = node("hidden", "aten.linear.default", [x, placeholders["a"], placeholders["b"]], 16)
    active = node("active", "aten.relu.default", [hidden], 16)
    scores = node("scores", "aten.linear.default", [active, placeholders["c"]], 4)
    y = node("y", "aten.softmax.int", [scores], 4, dim=-1)
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    ir = IRGraph("perceptron", [x], [y], specs, {f"p_{name}": name for name in shapes}, nodes)
    value = rng.standard_normal((3, 8)).astype(np.float32)
    logits = np.maximum(value @ weights["a"].T + weights["b"], 0) @ weights["c"].T
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return ir, weights, value, exps / exps.sum(-1, keepdims=True)


def check_program(folder: Path) -> None:
    """Compile, save, load and run, from Python and from the command line."""
    import npu_compiler
    import npu_runtime

    loaded = "torch" in sys.modules
    ir, weights, x, expected = perceptron()
    program = npu_compiler.compile(ir)
    program.save(folder / "model.npubin")
    y = npu_runtime.load(folder / "model.npubin", weights=weights)(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert ("torch" in sys.modules) == loaded, "torch was imported"
    assert "kernel" in "".join(npu_compiler.compile(ir, target="metal").sources.values())

    npu_compiler.save_ir(ir, folder / "ir.json")
    np.savez(folder / "weights.npz", **weights)
    np.save(folder / "x.npy", x)
    npusim("compile", "ir.json", "-o", "cli.npubin", folder=folder)
    npusim("run", "cli.npubin", "--weights", "weights.npz", "--input", "x.npy", "--output", "y.npz", folder=folder)
    np.testing.assert_array_equal(next(iter(np.load(folder / "y.npz").values())), y)
    assert json.loads(npusim("ops", "--json", folder=folder))["ops"]
    assert npusim("--version", folder=folder).split() == ["npusim", metadata.version("npusim")]


def npusim(*arguments: str, folder: Path) -> str:
    """The standard output of a command, which must succeed."""
    command = [sys.executable, "-W", "error::SyntaxWarning", "-m", "npusim", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout


def main() -> None:
    """Run all checks."""
    with tempfile.TemporaryDirectory() as folder:
        check_program(Path(folder))
    imported = check_modules()
    python = ".".join(map(str, sys.version_info[:3]))
    where = Path(str(importlib.import_module("npusim").__file__)).parent
    print(f"npusim {metadata.version('npusim')} in {where}: {imported} modules, Python {python}: works")


if __name__ == "__main__":
    main()
