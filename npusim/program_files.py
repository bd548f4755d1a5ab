"""The files that are written with a program: its weights beside it, and its sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.mixed.program import MixedProgram
from npu_compiler.support.errors import ArtifactError, InputError
from npu_compiler.support.files import write_together
from npu_compiler.weights.files import BLOCKS, WeightSource, open_weights
from npu_compiler.weights.format import block_format
from npu_runtime.model import weights_beside


def save_program(
    program: CompiledProgram | MixedProgram, weights: Any, path: str | os.PathLike[str]
) -> tuple[Path, Path]:
    """Write a program to ``path`` and, beside it, the weights that it reads as safetensors. Returns both paths.

    If one of the files cannot be written, neither changes.

    Matrices that ``weights`` holds in the blocks that the program stores are written as these blocks.

    Args:
        weights: whatever ``open_weights`` accepts.
        path: '.npubin' is appended if it is missing.

    Raises:
        ArtifactError: a file cannot be written.
        WeightError: a weight is missing or cannot be read.
    """
    import safetensors.numpy

    target = Path(path)
    if target.name in ("", ".."):
        raise ArtifactError(f"{path}: it is a directory; name the file to write")
    target = target if target.suffix == ".npubin" else target.with_name(f"{target.name}.npubin")
    beside = weights_beside(target)
    source = open_weights(weights)
    initial = set(program.states) & set(source.names())
    keys = {w.key for w in program.weights} | initial
    blocks = _stored_blocks(program, source) if isinstance(program, CompiledProgram) else {}
    tensors = {k: np.asarray(blocks[k][1] if k in blocks else source.read(k), order="C") for k in sorted(keys)}
    table = {k: (format, source.spec(k)[0][1], source.spec(k)[1]) for k, (format, _) in blocks.items()}
    data = safetensors.numpy.save(tensors, {BLOCKS: json.dumps(table)} if table else None)
    try:
        write_together({target: program.dumps(), beside: data})
    except OSError as error:
        raise ArtifactError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from None
    return target, beside


def _stored_blocks(program: CompiledProgram, source: WeightSource) -> dict[str, tuple[str, np.ndarray]]:
    """Return the format and the blocks of the weights that the program stores in blocks which ``source`` holds."""
    found = {}
    for node in program.recipes.nodes:
        if node.op == "quantize" and node.inputs[0].op == "weight":
            key, format = node.inputs[0].node.attrs["key"], node.attrs["format"]
            held = source.blocks(key, block_format(format))
            if held is not None:
                found[key] = (format, held)
    return found


def emit_source(program: CompiledProgram | MixedProgram, folder: str | None) -> list[str]:
    """Write the program's sources into ``folder``, which is created; None: do nothing. Each program of a mixed model
    gets a folder of its own in it (p0, p2, … by partition). Returns lines for the user.

    Raises:
        InputError: a file cannot be written.
    """
    if folder is None:
        return []
    programs = {"": program} if isinstance(program, CompiledProgram) else _by_folder(program)
    try:
        for part, each in programs.items():
            (Path(folder) / part).mkdir(parents=True, exist_ok=True)
            for name, text in each.sources.items():
                (Path(folder) / part / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from None
    return [f"wrote {sum(len(p.sources) for p in programs.values())} source files into {folder}"]


def _by_folder(model: MixedProgram) -> dict[str, CompiledProgram]:
    return {f"p{id}": program for id, program in model.programs.items()}
