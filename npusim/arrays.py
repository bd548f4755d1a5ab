"""Reads inputs from ``.npy``, ``.npz`` and image files, and writes outputs as ``.npz``."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from npu_compiler.artifact.program import IOSpec
from npu_compiler.aten.ir import TensorSpec
from npu_compiler.support import npy
from npu_compiler.support.errors import InputError
from npu_compiler.support.files import write_atomic

from .builtin import PREPROCESSING

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_inputs(given: Sequence[str], specs: Sequence[IOSpec | TensorSpec], program: str) -> dict[str, np.ndarray]:
    """Read the inputs of a program, by name.

    Args:
        given: FILE, for the inputs in the order of ``specs``, or NAME=FILE. An .npz has several by name.
        program: the program's name, which determines the preprocessing of images.

    Raises:
        InputError: a file cannot be read, or the names do not fit ``specs``.
    """
    expected = ", ".join(f"{s.name} {s.dtype}{list(s.shape)}" for s in specs)
    values: dict[str, np.ndarray] = {}
    for i, item in enumerate(given):
        name, file = _named(item, specs)
        if not name and Path(file).suffix == ".npz":
            values.update(_load_npz(file, specs))
            continue
        if not name and i < len(specs):
            name = specs[i].name
        if not name:
            raise InputError(f"{len(given)} inputs given; expected {expected}")
        if name in values:
            raise InputError(f"input {name!r} is given twice, the second time as {file}")
        values[name] = _image(file, program) if Path(file).suffix.lower() in IMAGES else _load_npy(file)
    for spec in specs:  # numpy writes bfloat16, which it does not know, as two bytes
        if spec.name in values and spec.dtype == "bfloat16" and values[spec.name].dtype == np.dtype("V2"):
            values[spec.name] = values[spec.name].view(ml_dtypes.bfloat16)
    if not values and specs:
        raise InputError(f"the program needs input: {expected}; pass --input FILE for each, in order, or NAME=FILE")
    return values


def _named(item: str, specs: Sequence[IOSpec | TensorSpec]) -> tuple[str, str]:
    """Return (name or '', file). An existing file may have '=' in its name, unless an input's name precedes it."""
    name, found, file = item.partition("=")
    is_name = found and (any(s.name == name for s in specs) or not os.path.exists(item))
    return (name, file) if is_name else ("", item)


def _load_npy(file: str) -> np.ndarray:
    try:
        with open(file, "rb") as stream:
            if stream.read(2) == b"PK":
                raise InputError(f"{file}: it is a zip archive, not one array; name an .npz file .npz")
            stream.seek(0)
            header = npy.read_header(stream)
            return npy.read_data(stream, header, os.fstat(stream.fileno()).st_size - stream.tell())
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file}: cannot be read as an .npy array: {error}") from None


def _load_npz(file: str, specs: Sequence[IOSpec | TensorSpec]) -> dict[str, np.ndarray]:
    """Read all arrays of an archive. Their names and shapes are checked before any of them is read."""
    from npu_compiler.weights.files import open_weights

    source, known = open_weights(Path(file)), {s.name: s for s in specs}
    for name in source.names():
        if name not in known:
            raise InputError(f"{file}: it holds {name!r}; the inputs are {', '.join(known) or 'none'}")
        shape, expected = source.spec(name)[0], known[name]
        if shape != tuple(expected.shape):
            raise InputError(f"{file}: {name!r} has shape {list(shape)}, expected {list(expected.shape)}")
    return {name: source.read(name) for name in source.names()}


def _image(file: str, program: str) -> np.ndarray:
    how = PREPROCESSING.get(program)
    if how is None:
        known = ", ".join(PREPROCESSING)
        raise InputError(f"{file}: the preprocessing for {program} is unknown (known: {known}); pass an .npy array")
    try:
        from .models import images
    except ImportError:
        raise InputError(f"{file}: images need pillow; install it, or pass an .npy array") from None
    result: np.ndarray = getattr(images, how)(images.read_image(file))
    return result


def save_npz(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an uncompressed archive for ``numpy.load``. bfloat16 arrays are stored as float32, without loss.

    ``numpy.savez`` is not used, because an array's name could collide with its parameters.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, array in arrays.items():
                known = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, known, allow_pickle=False)
        write_atomic(path, buffer.getvalue())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    except (ValueError, struct.error, zipfile.LargeZipFile) as error:
        raise InputError(f"{path}: an output's name cannot be written: {error}") from None
