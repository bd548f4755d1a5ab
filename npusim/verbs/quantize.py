"""``npusim quantize``: a convolutional network with 8-bit weights and activations, from sample inputs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler import compile as compile_ir
from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target

from ..arrays import IMAGES, read_inputs
from ..builtin import BUILTINS, PREPROCESSING
from ..classes import write_labels
from ..console import Result, Table
from ..program_files import save_program
from ..quantization import calibrate
from ..quantization.calibrate import Inputs, LayerError
from ..quantization.network import Network
from ..sources import is_language_model, read_model

_FILES = (*IMAGES, ".npy", ".npz")
_COMPARED = 8  # samples on which layers are compared


def run(args: argparse.Namespace) -> Result:
    """Find the ranges of the activations, write the quantised program, and compare it with the original."""
    target = args.target or default_target()
    if Path(args.model).suffix != ".npubin" and is_language_model(args.model):
        raise InputError(
            f"{args.model} is a language model; npusim quantize is for convolutional networks. "
            "Its weights can be stored in fewer bits: npusim compile --weights"
        )
    ir, weights, _ = read_model(args.model, 1)
    if weights is None:
        raise InputError(f"{args.model} has no weights; pass a .pt2 file, 'module:function' or a built-in model")
    samples = read_samples(args.calibrate, ir, args.images)
    network = Network(ir, weights)
    affine = calibrate.parameters(network, calibrate.observe(network, samples, target), args.method)
    graph, stored = network.quantized(affine)
    with step("comparing layers"):
        comparison = calibrate.Comparison(network, affine, (graph, stored), target)
        errors = comparison.errors(samples[:_COMPARED])
    photographs, origin = _photographs(ir, samples)
    agree = comparison.agreement(photographs)
    with step(f"compiling {ir.model_name}"):
        program = compile_ir(graph, target)
    files = list(save_program(program, stored, Path(args.output)))
    builtin = BUILTINS.get(args.model)
    if builtin is not None and builtin.weights is not None:
        files += write_labels(files[0])
    return _report(args, network, errors, (agree, len(photographs), origin), files)


def read_samples(folder: str, ir: IRGraph, most: int) -> list[Inputs]:
    """Return the inputs in the images and arrays of a folder, in the order of their names, at most ``most``.

    Raises:
        InputError: the folder does not exist or has no such file, or a file does not fit the network's inputs.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{folder}: is not a folder; pass one with images or arrays (.npy, .npz) of typical inputs")
    files = sorted(f for f in path.iterdir() if f.suffix.lower() in _FILES and f.is_file())[:most]
    if not files:
        raise InputError(f"{folder}: has no file of a known type ({', '.join(_FILES)})")
    expected = {t.name: t for t in ir.graph_inputs}
    samples: list[Inputs] = []
    for file in files:
        found = read_inputs([f"{ir.graph_inputs[0].name}={file}"] if file.suffix != ".npz" else [str(file)],
                            ir.graph_inputs, ir.model_name)  # fmt: skip
        for name, t in expected.items():
            if name not in found:
                raise InputError(f"{file}: has no array {name!r}; the network's inputs are {', '.join(expected)}")
            if found[name].shape != t.shape or str(found[name].dtype) != t.dtype:
                have = f"{found[name].dtype}{list(found[name].shape)}"
                raise InputError(f"{file}: {have}, but the network's input {name!r} is {t.dtype}{list(t.shape)}")
            if found[name].dtype.kind == "f" and not np.isfinite(found[name]).all():
                raise InputError(f"{file}: has a number that is not finite, for which there is no range")
        samples.append(found)
    return samples


def _photographs(ir: IRGraph, samples: list[Inputs]) -> tuple[list[Inputs], str]:
    """Return the demo's photographs as inputs; without network, or for a network that takes no such images, the
    samples."""
    how = PREPROCESSING.get(ir.model_name)
    if how is None:
        return samples, "calibration inputs"
    from ..models import images
    from ..models.download import RegistryUnavailable

    try:
        pictures = images.photos()
    except RegistryUnavailable:
        return samples, "calibration inputs"
    name = ir.graph_inputs[0].name
    return [{name: getattr(images, how)(image)} for image, _ in pictures.values()], "demo photos"


def _report(
    args: argparse.Namespace, network: Network, errors: list[LayerError], agreement: tuple[int, int, str],
    files: list[Path],
) -> Result:  # fmt: skip
    from npu_compiler.support.text import si

    agree, count, origin = agreement
    skipped = [n.location.module if n.location is not None else n.name for n in network.skipped]
    header = ("layer", "op", "weight", "input scale", "zero point", "weight error", "output error")
    rows = [
        (e.layer, e.op.split(".")[1], " x ".join(map(str, e.shape)), f"{e.activation.scale:.4g}",
         e.activation.zero_point, f"{e.weight_error:.2%}", f"{e.relative_rms:.2%}")
        for e in errors
    ]  # fmt: skip
    worst = max(errors, key=lambda e: e.relative_rms)
    lines: list[str | Table] = [
        Table(header, rows),
        "errors: RMS relative to the RMS of the original; outputs have the errors of all layers before",
        f"{len(errors)} layers in 8 bits ({args.method}); the largest output error is {worst.relative_rms:.2%} "
        f"({worst.layer})",
    ]
    if skipped:
        lines.append(f"{len(skipped)} layers stay in float32: {', '.join(skipped[:8])}{' …' if skipped[8:] else ''}")
    lines.append(f"the most likely class is the same for {agree} of {count} {origin}")
    lines.append("wrote " + ", ".join(f"{f} ({si(f.stat().st_size, 'B')})" for f in files))
    data: dict[str, Any] = {
        "program": network.ir.model_name, "method": args.method, "layers": [_row(e) for e in errors],
        "float32_layers": skipped, "top1": {"same": agree, "of": count, "inputs": origin},
        "files": [str(f) for f in files],
    }  # fmt: skip
    return Result(data, lines)


def _row(e: LayerError) -> Mapping[str, Any]:
    return {
        "layer": e.layer, "op": e.op, "weight_shape": list(e.shape), "scale": e.activation.scale,
        "zero_point": e.activation.zero_point, "weight_error": e.weight_error, "output_error": e.relative_rms,
    }  # fmt: skip
