"""Damaged ``.npy`` and ``.npz`` files, as inputs of a program and as weights."""

from __future__ import annotations

import io
import random
import zipfile
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from npu_compiler.artifact.program import IOSpec
from npu_compiler.weights.files import open_weights
from npusim.arrays import read_inputs

from ..mutations import INTEGERS, mutate_bytes

_SPECS = (IOSpec("x", (3, 4), "float32", 0), IOSpec("file", (2,), "int64", 1), IOSpec("b", (5,), "bool", 2))
_DESCRIPTIONS = (
    "'<f4'", "'>f8'", "'|b1'", "'|O'", "'<U9'", "'|V2'", "'<c16'", "'|S1000000000'", "[('a', '<i8')]", "('<f4', (2,))",
    "'<f4", "''", "None", "[]", "1", "'<f3'", "'<M8[s]'",
)  # fmt: skip


def case(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.5:
        path = folder / "a.npy"
        path.write_bytes(_damaged_npy(rng))
        read_inputs([str(path)], _SPECS, "program")
        return
    path = folder / "a.npz"
    data = _archive(rng) if rng.random() < 0.5 else rng.choice(_archives())
    path.write_bytes(mutate_bytes(rng, data, rng.choice(_archives())) if rng.random() < 0.7 else data)
    if rng.random() < 0.5:
        read_inputs([str(path)], _SPECS, "program")
        return
    source = open_weights(path)
    for name in source.names():
        shape, dtype = source.spec(name)
        array = source.read(name)
        assert (array.shape, array.dtype) == (shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))


@cache
def _arrays() -> list[np.ndarray]:
    return [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)),
        np.arange(2),
        np.array([True, False] * 3),
        np.float16(3),
        np.zeros((0, 7), np.int8),
        np.arange(9).astype(ml_dtypes.bfloat16),
        np.array(["text"]),
        np.zeros(2, [("a", "<f4"), ("é", "<i8")]),
    ]


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def _damaged_npy(rng: random.Random) -> bytes:
    data = _npy(rng.choice(_arrays()))
    if rng.random() < 0.4:
        return mutate_bytes(rng, data, _npy(rng.choice(_arrays())))
    if rng.random() < 0.1:
        text = rng.choice(("(" * 5000, "{" * 200, "{'a': '", "\\", "1" * 5000, "{'descr': " + "-" * 3000 + "1}"))
    else:
        shape = [rng.choice((3, 4, 12, *INTEGERS)) for _ in range(rng.choice((0, 1, 2, 2, 3, 40)))]
        order = rng.choice(("True", "False", "False", "None", "1"))
        text = f"{{'descr': {rng.choice(_DESCRIPTIONS)}, 'fortran_order': {order}, 'shape': {tuple(shape)}, }}"
        text = mutate_bytes(rng, text.encode()).decode("latin1") if rng.random() < 0.3 else text
    raw = text.encode("latin1") + b"\n"
    version = rng.choice((1, 1, 2, 3))
    return b"\x93NUMPY" + bytes([version, 0]) + len(raw).to_bytes(2 if version == 1 else 4, "little") + raw + data[-48:]


@cache
def _archives() -> list[bytes]:
    made = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, **{"x": _arrays()[0], "b": _arrays()[3][:5]})
        made.append(buffer.getvalue())
        buffer = io.BytesIO()
        save(buffer, *(a for a in _arrays() if a.dtype.names is None))
        made.append(buffer.getvalue())
    return made


def _archive(rng: random.Random) -> bytes:
    """An archive whose members are damaged, doubled, of another kind or compressed in another way."""
    buffer = io.BytesIO()
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    with zipfile.ZipFile(buffer, "w", rng.choice(methods)) as archive:
        for _ in range(rng.randint(0, 3)):
            name = rng.choice(("x.npy", "file.npy", "b", "b.npy", "folder/", "../x.npy", "y.npy", ".npy", "é.npy"))
            good = _npy(rng.choice(_arrays()))
            archive.writestr(name, rng.choice((good, good, _damaged_npy(rng), b"", b"text")))
    return buffer.getvalue()
